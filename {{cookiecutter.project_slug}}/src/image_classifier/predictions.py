"""What a model predicts for each image of a split, how confident it is, and whether it is right."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from .config import RunConfig
from .data import LEFT_OUT, Source
from .decision import NO_DECISION, Decision, choose_decision
from .runtime.console import printable
from .runtime.files import write_whole

BINS = 15  # of the confidence, as in https://arxiv.org/abs/1706.04599
MOST_SAVED = 2**24  # probabilities in a file, of all images and classes

# Metrics that are better the lower they are, and those that are no shares of 1; names in words.
LOWER = {"loss", "brier", "ece"}
NUMBERS = {"loss", "brier"}
MAIN = ("top1", "exact", "top5", "loss")  # in each line on an evaluation
TITLES = {"top1": "top-1", "top5": "top-5", "exact": "all labels right", "macro_f1": "macro F1"}
TITLES |= {"micro_f1": "micro F1", "auroc": "AUROC", "brier": "Brier score", "ece": "ECE"}


@dataclass(frozen=True)
class Predictions:
    """The predictions for all images of a split, in CPU memory and in the order of the split."""

    source: Source  # the images, and their labels
    predicted: Tensor  # (count,) int64: the most probable class; LEFT_OUT for an unreadable image
    probability: Tensor  # (count,) float32: of the predicted class, the confidence
    target_probability: Tensor  # (count,) float32: of the true class
    # If images may have several labels, each of these is (count, classes): `predicted` is int8, as
    # labels are, and the probabilities are those of yes or no.
    probabilities: Tensor | None = None  # (count, classes) float32; None: too many to keep
    decisions: dict[tuple[float, float], Decision] = field(default_factory=dict, init=False)

    @property
    def is_counted(self) -> Tensor:
        """Which predictions count, as the image could be read and the label is known: bool."""
        return (self.predicted != LEFT_OUT) & (self.source.labels != LEFT_OUT)

    @property
    def is_correct(self) -> Tensor:
        """Which predictions are correct: bool."""
        return self.predicted == self.source.labels

    @property
    def num_unread(self) -> int:
        """How many images have a known label but could not be read, and do not count."""
        unread = (self.predicted == LEFT_OUT) & (self.source.labels != LEFT_OUT)
        return int(unread.view(len(unread), -1).any(1).sum())

    def confusion(self) -> Tensor:
        """With one label, the confusion matrix, as `confusion_of` has it."""
        return confusion_of(self.predicted, self.source.labels, len(self.source.classes))

    def decision(self, run: RunConfig) -> Decision:
        """The temperature and the thresholds that these images choose, which are fitted once."""
        if self.probabilities is None:
            return NO_DECISION
        wishes = run.min_precision, run.error_cost
        if wishes not in self.decisions:
            labels = self.source.labels.masked_fill(~self.is_counted, LEFT_OUT)
            self.decisions[wishes] = choose_decision(self.probabilities, labels, *wishes)
        return self.decisions[wishes]

    def account(self, decision: Decision) -> str:
        """What a decision means for these images, in words."""
        text = f"calibrated by a temperature of {decision.temperature:.2f}"
        if not decision.thresholds:
            return text
        known = self.is_counted
        shares = decision.calibrated(self.probabilities, self.source.is_multi_label)
        if self.source.is_multi_label:
            chosen, own = known & decision.has_label(shares), known & (self.source.labels == 1)
            right = int((chosen & own).sum())
            precision, recall = (right / max(1, int(part.sum())) for part in (chosen, own))
            low, high = (f"{of(decision.thresholds):.1%}" for of in (min, max))
            text += f"; labels count from {low} .. {high} on: precision {precision:.2%}"
            return f"{text}, recall {recall:.2%}"
        chosen = known & decision.is_sure(shares)
        count, right = int(chosen.sum()), int((chosen & self.is_correct).sum())
        text += f"; predictions count from {decision.thresholds[0]:.1%} on: "
        share = count / int(known.sum())
        return f"{text}{share:.2%} of the images, {right / max(1, count):.2%} of them right"

    def save(self, path: Path, step: int) -> None:
        """Write all but the images, for `compare` and for other programs."""
        shares = {
            "probability": self.probability,
            "target_probability": self.target_probability,
            "probabilities": self.probabilities,
        }
        if self.probabilities is None or self.probabilities.numel() > MOST_SAVED:
            del shares["probabilities"]
        if self.source.is_multi_label:  # they are those of `probabilities`
            del shares["probability"], shares["target_probability"]
        kind = torch.int8 if self.source.is_multi_label else torch.int32
        content = save(
            {
                "predicted": self.predicted.to(kind),
                "target": self.source.labels.to(kind),
                **{name: share.half().contiguous() for name, share in shares.items()},
            },
            metadata={
                "step": str(step),
                "images": self.source.fingerprint(),
                "files": json.dumps(self.source.file_digests()),
                "classes": json.dumps(self.source.classes),
            },
        )
        write_whole(path, lambda file: file.write(content))


def confusion_of(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The confusion matrix, (classes, classes) int64: row target, column prediction."""
    counted = predicted != LEFT_OUT
    cells = labels[counted] * classes + predicted[counted]
    return torch.bincount(cells, minlength=classes**2).view(classes, classes)


def counted_and_correct(predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which images count, and which are right, as all of their known labels are: (count,) bool."""
    counted, right = (predicted != LEFT_OUT) & (labels != LEFT_OUT), predicted == labels
    if labels.ndim == 2:
        return counted.any(1), counted.any(1) & (right | ~counted).all(1)
    return counted, counted & right


def better(name: str) -> int:
    """1 if more of a metric is better, -1 if less is."""
    return -1 if name in LOWER else 1


def calibrate(predictions: Predictions) -> Tensor:
    """Predictions, their mean confidence and their accuracy, by confidence: (3, BINS) float64.

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


def metric_title(name: str) -> str:
    """A metric's name in words."""
    return TITLES.get(name, name.replace("_", " "))


def metric_number(name: str, value: float, digits: int = 2) -> str:
    """A metric's value: a percentage, unless it is no share of 1."""
    return f"{value:.4f}" if name in NUMBERS else f"{value:.{digits}%}"


def metric_text(name: str, value: float, digits: int = 2) -> str:
    """A metric in words: `top-1 93.20%`."""
    return f"{metric_title(name)} {metric_number(name, value, digits)}"


def phrase(metrics: dict[str, float], best_by: str = "top1") -> str:
    """The most important metrics of an evaluation in a line; `best_by` is the first."""
    names = dict.fromkeys((best_by, *MAIN))
    left_out = metrics.get("val/bad_images", 0)
    without = f", without {left_out} that could not be read" if left_out else ""
    return words(metrics, names) + without


def words(metrics: dict[str, float], names: Iterable[str]) -> str:
    """Those of the metrics `names` that are there."""
    found = ((name, metrics.get(f"val/{name}")) for name in names)
    return ", ".join(metric_text(name, value) for name, value in found if value is not None)


def scores_text(
    metrics: dict[str, float],
    shares: Sequence[float],
    classes: tuple[str, ...],
    best_by: str = "top1",
    most: int = 20,
) -> str:
    """What is told of up to `most` classes, worst first, and the metrics of an evaluation.

    `shares` are from 0 to 1, one for each class, nan if nothing is known of it; or none at all.
    """
    names = [printable(name) for name in classes]
    pairs = zip(shares, names, strict=False)
    ranked = sorted((share, name) for share, name in pairs if not isnan(share))
    width = max(map(len, names))
    lines = [f"  {name:<{width}} {share:7.2%}" for share, name in ranked[:most]]
    if len(ranked) > most:
        lines.append(f"  and {len(ranked) - most} classes with higher values")
    main = phrase(metrics, best_by)
    names = [name.removeprefix("val/") for name in metrics]
    lines.append(words(metrics, [n for n in names if n not in (best_by, *MAIN, "bad_images")]))
    return "\n".join([*filter(None, lines), main])
