"""Mixup and CutMix: the images of a rank are mixed in pairs, by random numbers of the step."""

import random
from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from ...config import AugmentConfig
from ...data import LEFT_OUT, Augmented, Batch, TrainData
from ...errors import UserError
from ...runtime import seeding
from ...runtime.phases import phase

Augment = Callable[[Batch, int], Augmented]  # a batch as the model sees it at a step
TINY = 1e-30  # a weight that two images of weight 0 have together


def change_batches(augment: Augment, how: AugmentConfig, data: TrainData, seed: int) -> Augment:
    """The augmentation of a run, whose images are mixed if `how` says so.

    Raises:
        UserError: if there is an odd number of images on a rank.
    """
    if not how.mixup and not how.cutmix:
        return augment
    share = data.world.local_slice(data.batch_size)
    if (share.stop - share.start) % 2:
        raise UserError(
            f"mixup and cutmix work on pairs: --data.batch-size {data.batch_size} must leave each "
            f"of the {data.world.size} processes an even number of images"
        )

    def mixed(batch: Batch, step: int) -> Augmented:
        found = augment(batch, step)
        place = seeding.seed_at(seeding.BATCH, seed, step, 1)
        with phase("augment"):
            chance = random.Random(place)  # noqa: S311 - reproducible
            return mixup_cutmix(found, how, data.num_classes, chance)

    return mixed


def mixup_cutmix(
    batch: Augmented, augment: AugmentConfig, num_classes: int, chance: random.Random
) -> Augmented:
    """Mixup (https://arxiv.org/abs/1710.09412) or CutMix (https://arxiv.org/abs/1905.04899).

    Mixes neighboring images of a rank, and their losses. If both are on, each step picks one.
    """
    images, labels, weights = batch
    count, _, height, width = images.shape
    partner = torch.arange(count, device=images.device) ^ 1
    others = images[partner]
    coin = chance.random() < 0.5
    if augment.cutmix and (coin or not augment.mixup):
        kept = chance.betavariate(augment.cutmix, augment.cutmix)
        half_height = sqrt(1 - kept) * height / 2
        half_width = sqrt(1 - kept) * width / 2
        y, x = chance.uniform(0, height), chance.uniform(0, width)
        rows = slice(max(0, round(y - half_height)), min(height, round(y + half_height)))
        columns = slice(max(0, round(x - half_width)), min(width, round(x + half_width)))
        images[:, :, rows, columns] = others[:, :, rows, columns]
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        kept = 1 - area / (height * width)  # the border may have cut the box
    else:
        kept = chance.betavariate(augment.mixup, augment.mixup)
        images = torch.lerp(others, images, kept)
    if weights is not None:  # a label counts as its image does
        of_own = kept * weights
        weights = torch.lerp(weights[partner], weights, kept)
        kept = (of_own / weights.clamp(min=TINY))[:, None]
    if labels.ndim == 2:
        return Augmented(images, mix_several(labels, partner, kept), weights)
    return Augmented(images, mix_classes(labels, partner, kept, num_classes), weights)


def mix_classes(labels: Tensor, partner: Tensor, kept: float | Tensor, num_classes: int) -> Tensor:
    """Shares of (count,) classes; an image that could not be read has none.

    `kept` is the share of an image in its own labels, a number or (count, 1).
    """
    targets = torch.zeros((len(labels), num_classes), device=labels.device)
    targets.scatter_(1, labels.clamp(min=0)[:, None], (labels >= 0).float()[:, None])
    return torch.lerp(targets[partner], targets, kept)


def mix_several(labels: Tensor, partner: Tensor, kept: float | Tensor) -> Tensor:
    """Shares of (count, classes) labels; what is unknown of one image stays unknown."""
    targets = labels.float()
    mixed = torch.lerp(targets[partner], targets, kept)
    return mixed.masked_fill((labels < 0) | (labels[partner] < 0), LEFT_OUT)
