"""What a model predicts for each image of a split, how confident it is, and whether it is right."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..data import LEFT_OUT, Source
from ..runtime.files import tensor_file, write_whole

BINS = 15  # of the confidence, as in https://arxiv.org/abs/1706.04599
MOST_SAVED = 2**24  # probabilities in a file, of all images and classes


@dataclass(frozen=True, repr=False)
class Predictions:
    """The predictions for all images of a split, in CPU memory and in the order of the split."""

    source: Source  # the images, and their labels
    predicted: Tensor  # (count,) int64: the most probable class; LEFT_OUT for an unreadable image
    probability: Tensor  # (count,) float32: of the predicted class, the confidence
    target_probability: Tensor  # (count,) float32: of the true class
    # If images may have several labels, each of these is (count, classes): `predicted` is int8, as
    # labels are, and the probabilities are those of yes or no.
    probabilities: Tensor | None = None  # (count, classes) float32; None: too many to keep

    def __repr__(self) -> str:
        """What they are of, in a few words: tensors would be hundreds of lines."""
        source = self.source
        return f"<Predictions: {len(source):,} images of {len(source.classes):,} classes>"

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

    def class_counts(self) -> Tensor:
        """How many images of each class count: (classes,) int64."""
        labels = self.source.labels.masked_fill(~self.is_counted, LEFT_OUT)
        return replace(self.source, labels=labels).class_counts()

    def save(self, path: Path, step: int) -> None:
        """Write all but the images, for other programs."""
        is_multi_label = self.source.is_multi_label  # then `probabilities` has the others
        shares = [] if is_multi_label else ["probability", "target_probability"]
        if self.probabilities is not None and self.probabilities.numel() <= MOST_SAVED:
            shares.append("probabilities")
        kind = torch.int8 if is_multi_label else torch.int32
        tensors = {"predicted": self.predicted.to(kind), "target": self.source.labels.to(kind)}
        tensors |= {name: getattr(self, name).half().contiguous() for name in shares}
        about = {
            "step": step,
            "images": self.source.fingerprint(),
            "files": self.source.file_digests,
            "classes": self.source.classes,
        }
        write_whole(path, lambda file: file.write(tensor_file(tensors, about)))


def confusion_of(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The confusion matrix, (classes, classes) int64: row target, column prediction."""
    counted = predicted != LEFT_OUT
    cells = labels[counted] * classes + predicted[counted]
    return torch.bincount(cells, minlength=classes**2).view(classes, classes)


def mistakes_of(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Target, other prediction and images of such pairs: (pairs, 3) int64, most images first."""
    wrong = (predicted != LEFT_OUT) & (predicted != labels)
    cells = labels[wrong].long() * classes + predicted[wrong]
    cells, counts = cells.unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    return torch.stack([cells // classes, cells % classes, counts], dim=1)[order]


def counted_and_correct(predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which images count, and which are right, as all of their known labels are: (count,) bool."""
    counted = (predicted != LEFT_OUT) & (labels != LEFT_OUT)
    right = predicted == labels
    if labels.ndim == 2:
        return counted.any(1), counted.any(1) & (right | ~counted).all(1)
    return counted, counted & right


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
