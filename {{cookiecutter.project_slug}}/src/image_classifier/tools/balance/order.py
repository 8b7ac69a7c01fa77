"""Orders in which each class is equally frequent, and weights by which it counts alike."""

import torch
from torch import Tensor

from ...config import DataConfig
from ...data import Source
from ...errors import UserError
from ...runtime.seeding import ORDER, generator_at


def change_order(order: Tensor, data: DataConfig, source: Source, seed: int, epoch: int) -> Tensor:
    """The order of an epoch, (count,) int64: a balanced one with `data.balance` sampling."""
    return balanced_order_at(seed, epoch, source.labels) if data.balance == "sampling" else order


def change_weights(weights: Tensor | None, data: DataConfig, source: Source) -> Tensor | None:
    """How much each image counts in the loss: with `data.balance` loss less in a larger class.

    Raises:
        UserError: if each class is to be seen equally often, and images have several labels.
    """
    if data.balance == "sampling" and source.is_multi_label:
        raise UserError(
            "--data.balance sampling shows each class equally often, which images with several "
            "labels do not allow: try --data.balance loss"
        )
    if data.balance != "loss" or source.is_multi_label:  # see `loss.py`
        return weights
    weights = torch.ones(len(source)) if weights is None else weights
    return weights / source.labels.bincount()[source.labels]


def balanced_order_at(seed: int, epoch: int, labels: Tensor) -> Tensor:
    """An order of the same length in which each class is equally frequent: (count,) int64.

    Class counts differ by one at most. Large classes are subsampled, images of small ones repeat,
    with the numbers that `seeding.images_of` explains.
    """
    count = len(labels)
    generator = generator_at(ORDER, seed, epoch)
    drawn = torch.randperm(count, generator=generator)
    by_class = drawn[labels[drawn].argsort(stable=True)]  # class by class, each in random order
    sizes = labels.bincount()
    starts = sizes.cumsum(0) - sizes
    classes = sizes.nonzero().flatten()
    classes = classes[torch.randperm(len(classes), generator=generator)]
    share, more = divmod(count, len(classes))  # the first few classes come once more
    quotas = torch.full((len(classes),), share) + (torch.arange(len(classes)) < more)
    chosen = classes.repeat_interleave(quotas)  # the class of each place
    number = torch.arange(count) - (quotas.cumsum(0) - quotas).repeat_interleave(quotas)
    rounds = number // sizes[chosen]
    images = by_class[starts[chosen] + number % sizes[chosen]]
    return (images + rounds * count)[torch.randperm(count, generator=generator)]
