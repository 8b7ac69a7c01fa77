"""Confident learning (https://arxiv.org/abs/1911.00068): which labels the predictions deny.

The predictions are of models that did not train on the image. What a model says of a class counts
by the mean probability that it gives to images with that label: so a class that it is never sure
of is not denied by one that it always is.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...data import LEFT_OUT

TINY = 1e-6  # a mean of equal numbers may be larger than they are; and no probability is smaller


class Ranking(NamedTuple):
    """Images whose label counts, the most doubtful first; each of these is (count,)."""

    image: Tensor  # int64: its number
    column: Tensor  # int64: of several labels, the number of the most doubtful one; else 0
    label: Tensor  # int64: the number of the class; of several labels 1 if it has this one, or 0
    predicted: Tensor  # int64: likewise, what is the most probable
    label_share: Tensor  # float32: the probability of the label
    predicted_share: Tensor  # float32
    is_candidate: Tensor  # bool: whether the label is denied


def rank_labels(labels: Tensor, shares: Tensor) -> Ranking:
    """Rank images by the log of the probability of the label to that of the best other class.

    On photographs with planted errors that finds more of them than the difference of the two.

    Args:
        labels: as a `Source` has them: (count,) int64, or (count, classes) int8.
        shares: probabilities that are not of a model which trained on the image, (count, classes)
            float32. Images with others than numbers, or without a known label, are not ranked.
    """
    is_known = shares.isfinite().all(1) & (labels != LEFT_OUT).view(len(labels), -1).any(1)
    image = is_known.nonzero()[:, 0]
    labels = labels[image]
    shares = shares[image]
    if labels.ndim == 1:
        column = torch.zeros_like(labels)
        margin, is_candidate = margins(labels, shares)
        label = labels
    else:
        column, margin, is_candidate = worst_labels(labels, shares)
        label = labels.gather(1, column[:, None])[:, 0].long()
        share = shares.gather(1, column[:, None])
        shares = torch.cat([1 - share, share], dim=1)
    predicted_share, predicted = shares.max(1)
    order = torch.argsort(margin, stable=True)
    label_share = shares.gather(1, label[:, None])[:, 0]
    columns = (image, column, label, predicted, label_share, predicted_share, is_candidate)
    return Ranking(*(values[order] for values in columns))


def margins(labels: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The margin of each label, (count,) float32, and whether it is denied, bool.

    The margin is the log of its probability less that of the most probable other class.

    It is denied if, of the classes whose probability reaches the mean of images with that label,
    the most probable is another, and the label is not the most probable of all.
    """
    num_classes = shares.shape[1]
    own = shares.gather(1, labels[:, None])[:, 0]
    sums = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, labels, own.double())
    means = (sums / labels.bincount(minlength=num_classes)).float()  # nan: no image has the label
    reaches = shares.where(shares >= means - TINY, -1.0)
    best, found = reaches.max(1)
    other = shares.scatter(1, labels[:, None], 0.0).amax(1)
    margin = own.clamp(min=TINY).log() - other.clamp(min=TINY).log()
    return margin, (best >= 0) & (found != labels) & (own < other)


def worst_labels(labels: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of several labels, each against its absence: the number of the most doubtful one, (count,).

    And the margin of that one, float32, and whether it is denied, bool.
    """
    margin = torch.full(labels.shape, torch.inf)  # what is unknown is not doubtful
    is_candidate = torch.zeros(labels.shape, dtype=torch.bool)
    for number, (own, share) in enumerate(zip(labels.T, shares.T, strict=True)):
        known = own != LEFT_OUT
        both = torch.stack([1 - share[known], share[known]], dim=1)
        margin[known, number], is_candidate[known, number] = margins(own[known].long(), both)
    column = margin.argmin(1)
    chosen = (values.gather(1, column[:, None])[:, 0] for values in (margin, is_candidate))
    return column, *chosen
