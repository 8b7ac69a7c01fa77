"""What a model answered to each image of a split: how sure it was, and whether it was right."""

import json
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .config import UserError
from .data import LEFT_OUT, Source
from .runtime.console import printable
from .runtime.files import write_whole

BINS = 15  # of the probability, as in https://arxiv.org/abs/1706.04599


@dataclass(frozen=True)
class Answers:
    """The answers to all images of a split, in host memory and in the order of the split."""

    source: Source  # the images, and what they truly are
    answer: Tensor  # (count,) int64: the most probable class; LEFT_OUT if it could not be read
    probability: Tensor  # (count,) float32: of the answer
    probability_of_truth: Tensor  # (count,) float32

    @property
    def is_counted(self) -> Tensor:
        """Which images could be read: (count,) bool."""
        return self.answer != LEFT_OUT

    @property
    def is_right(self) -> Tensor:
        """Which answers are true: (count,) bool."""
        return self.answer == self.source.labels

    def confusion(self) -> Tensor:
        """How often each class got each answer: (classes, classes) int64, row is the truth."""
        classes, counted = len(self.source.classes), self.is_counted
        places = self.source.labels[counted] * classes + self.answer[counted]
        return torch.bincount(places, minlength=classes**2).view(classes, classes)

    def worst(self, most: int) -> list[int]:
        """The numbers of images with a wrong answer, the most probable of them first."""
        wrong = (self.is_counted & ~self.is_right).nonzero().flatten()
        return wrong[self.probability[wrong].argsort(descending=True, stable=True)][:most].tolist()

    def least_certain(self, most: int) -> list[int]:
        """The numbers of the images whose answers are the least probable."""
        counted = self.is_counted.nonzero().flatten()
        return counted[self.probability[counted].argsort(stable=True)][:most].tolist()

    def save(self, path: Path, step: int) -> None:
        """Write all but the images, for `compare` and for other programs.

        Raises:
            OSError: if there is no space.
        """
        content = save(
            {
                "answer": self.answer.int(),
                "truth": self.source.labels.int(),
                "probability": self.probability.half(),
                "probability_of_truth": self.probability_of_truth.half(),
            },
            metadata={
                "step": str(step),
                "images": self.source.fingerprint(),
                "files": json.dumps(self.source.file_digests()),
                "classes": json.dumps(self.source.classes),
            },
        )
        write_whole(path, lambda file: file.write(content))


@dataclass(frozen=True)
class Predictions:
    """What `Answers.save` wrote of a run."""

    answer: Tensor  # (count,) int32; LEFT_OUT if the image could not be read
    truth: Tensor  # (count,) int32
    images: str  # their fingerprint
    files: dict[str, str]  # their digests
    step: int  # after which the model gave them


def read_predictions(path: Path) -> Predictions | None:
    """What `Answers.save` wrote; None if there is no such file.

    Raises:
        UserError: if it holds something else.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            answer, truth = file.get_tensor("answer"), file.get_tensor("truth")
            about = file.metadata()
            images, step = about["images"], int(about["step"])
            files = dict(json.loads(about.get("files", "{}")))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{str(path)!a} can't be read: {error}") from error
    if answer.ndim != 1 or answer.shape != truth.shape:
        raise UserError(f"{str(path)!a} has {tuple(answer.shape)} answers to {tuple(truth.shape)}")
    return Predictions(answer, truth, images, files, step)


@dataclass(frozen=True)
class Calibration:
    """How probable answers were said to be, and how often they were right, bin by bin."""

    counts: list[int]  # of the images in each of BINS bins of the probability, from 0 to 1
    said: list[float]  # the mean probability in each; 0 where it is empty
    right: list[float]  # the share of right answers in each

    @property
    def count(self) -> int:
        """How many images there are."""
        return sum(self.counts)

    def mean(self, values: list[float]) -> float:
        """The mean over all images of what each bin has."""
        pairs = zip(self.counts, values, strict=True)
        return sum(count * value for count, value in pairs) / max(1, self.count)

    @property
    def error(self) -> float:
        """The expected calibration error: by how much the two differ, on the average."""
        return self.mean([abs(s - r) for s, r in zip(self.said, self.right, strict=True)])


def calibrate(answers: Answers) -> Calibration:
    """Sort the answers by their probability; those to images that can't be read don't count."""
    counted = answers.is_counted & answers.probability.isfinite()
    said, right = answers.probability[counted].double(), answers.is_right[counted].double()
    # A bin has its upper end, as in the paper.
    bins = (said * BINS).ceil().long().clamp(1, BINS) - 1
    counts = torch.bincount(bins, minlength=BINS)
    sums = (torch.bincount(bins, values, minlength=BINS) for values in (said, right))
    means = ((values / counts.clamp(min=1)).tolist() for values in sums)
    return Calibration(counts.tolist(), *means)


def phrase(metrics: dict[str, float]) -> str:
    """An evaluation in words."""
    top5 = f"top-5 {metrics['val/top5']:.2%}, " if "val/top5" in metrics else ""
    left_out = metrics.get("val/bad_images", 0)
    without = f", without {left_out} that could not be read" if left_out else ""
    return f"top-1 {metrics['val/top1']:.2%}, {top5}loss {metrics['val/loss']:.4f}{without}"


def scores_text(
    metrics: dict[str, float], confusion: Tensor, classes: tuple[str, ...], most: int = 20
) -> str:
    """An evaluation by class, worst first and `most` at the most, and in all.

    `confusion` is (classes, classes): row is the truth, column the answer.
    """
    recall = (confusion.diagonal() / confusion.sum(1)).tolist()  # nan without images
    names = [printable(name) for name in classes]
    pairs = zip(recall, names, strict=True)
    ranked = sorted((share, name) for share, name in pairs if not isnan(share))
    width = max(map(len, names))
    lines = [f"  {name:<{width}} {share:7.2%}" for share, name in ranked[:most]]
    if len(ranked) > most:
        lines.append(f"  and {len(ranked) - most} classes that are recognised better")
    return "\n".join([*lines, phrase(metrics)])
