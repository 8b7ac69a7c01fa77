"""What a model predicts for each image of a split, how confident it is, and whether it is right."""

import json
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from .data import LEFT_OUT, Source
from .runtime.console import printable
from .runtime.files import write_whole

BINS = 15  # of the confidence, as in https://arxiv.org/abs/1706.04599


@dataclass(frozen=True)
class Predictions:
    """The predictions for all images of a split, in CPU memory and in the order of the split."""

    source: Source  # the images, and their labels
    predicted: Tensor  # (count,) int64: the most probable class; LEFT_OUT for an unreadable image
    probability: Tensor  # (count,) float32: of the predicted class, the confidence
    target_probability: Tensor  # (count,) float32: of the true class

    @property
    def is_counted(self) -> Tensor:
        """Which images could be read: (count,) bool."""
        return self.predicted != LEFT_OUT

    @property
    def is_correct(self) -> Tensor:
        """Which predictions are correct: (count,) bool."""
        return self.predicted == self.source.labels

    def confusion(self) -> Tensor:
        """The confusion matrix, (classes, classes) int64: row target, column prediction."""
        classes, counted = len(self.source.classes), self.is_counted
        cells = self.source.labels[counted] * classes + self.predicted[counted]
        return torch.bincount(cells, minlength=classes**2).view(classes, classes)

    def save(self, path: Path, step: int) -> None:
        """Write all but the images, for `compare` and for other programs."""
        content = save(
            {
                "predicted": self.predicted.int(),
                "target": self.source.labels.int(),
                "probability": self.probability.half(),
                "target_probability": self.target_probability.half(),
            },
            metadata={
                "step": str(step),
                "images": self.source.fingerprint(),
                "files": json.dumps(self.source.file_digests()),
                "classes": json.dumps(self.source.classes),
            },
        )
        write_whole(path, lambda file: file.write(content))


def calibrate(predictions: Predictions) -> Tensor:
    """Images, their mean confidence and their accuracy, by confidence: (3, BINS) float64.

    The bins have equal width. Unreadable images do not count; where a bin is empty, all are 0.
    """
    counted = predictions.is_counted & predictions.probability.isfinite()
    confidence = predictions.probability[counted].double()
    correct = predictions.is_correct[counted].double()
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # a bin includes its upper end
    counts = torch.bincount(bins, minlength=BINS)
    sums = (torch.bincount(bins, values, minlength=BINS) for values in (confidence, correct))
    return torch.stack([counts.double(), *(values / counts.clamp(min=1) for values in sums)])


def calibration_error(bins: Tensor) -> float:
    """Expected calibration error (ECE) of `calibrate`d bins: mean gap of confidence, accuracy."""
    counts, confidence, accuracy = bins
    return sum((counts * (confidence - accuracy).abs()).tolist()) / max(1, int(counts.sum()))


def phrase(metrics: dict[str, float]) -> str:
    """The metrics of an evaluation in a line."""
    top5 = f"top-5 {metrics['val/top5']:.2%}, " if "val/top5" in metrics else ""
    left_out = metrics.get("val/bad_images", 0)
    without = f", without {left_out} that could not be read" if left_out else ""
    return f"top-1 {metrics['val/top1']:.2%}, {top5}loss {metrics['val/loss']:.4f}{without}"


def scores_text(
    metrics: dict[str, float], confusion: Tensor, classes: tuple[str, ...], most: int = 20
) -> str:
    """The accuracy of up to `most` classes, worst first, and the metrics of an evaluation.

    `confusion` is (classes, classes): row is the target, column the prediction.
    """
    recall = (confusion.diagonal() / confusion.sum(1)).tolist()  # nan without images
    names = [printable(name) for name in classes]
    pairs = zip(recall, names, strict=True)
    ranked = sorted((share, name) for share, name in pairs if not isnan(share))
    width = max(map(len, names))
    lines = [f"  {name:<{width}} {share:7.2%}" for share, name in ranked[:most]]
    if len(ranked) > most:
        lines.append(f"  and {len(ranked) - most} classes with higher accuracy")
    return "\n".join([*lines, phrase(metrics)])
