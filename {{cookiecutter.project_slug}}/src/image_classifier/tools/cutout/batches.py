"""Cutout: a square of each training image is blanked, at a random place."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...augment import NUM_DRAWS, local_draws
from ...config import AugmentConfig
from ...data import Augmented, Batch, TrainData
from ...runtime.phases import phase

Augment = Callable[[Batch, int], Augmented]  # a batch as the model sees it at a step


def change_batches(augment: Augment, how: AugmentConfig, data: TrainData, seed: int) -> Augment:
    """The augmentation of a run, which blanks squares if `how` says so."""
    if not how.cutout:
        return augment

    def blanked(batch: Batch, step: int) -> Augmented:
        found = augment(batch, step)
        with phase("augment"):
            draws = local_draws(seed, step, count=NUM_DRAWS, data=data)[:, 7:9]
            # In images that grow in a run, a square grows with them.
            cutout(found.images, draws, how.cutout * found.images.shape[2] // data.data.image_size)
        return found

    return blanked


def cutout(images: Tensor, draws: Tensor, side: int) -> None:
    """Cutout, in place: https://arxiv.org/abs/1708.04552.

    Blanks a square of `side` pixels, centered anywhere, in each of `images`, normalized
    (batch, channels, height, width). `draws` is (batch, 2).
    """
    height, width = images.shape[2:]
    y = torch.arange(height, device=images.device)
    x = torch.arange(width, device=images.device)
    top = (draws[:, :1] * height).long() - side // 2
    left = (draws[:, 1:] * width).long() - side // 2
    rows = (y >= top) & (y < top + side)  # (batch, height)
    columns = (x >= left) & (x < left + side)
    images.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)
