"""Training images that grow: small ones teach most of what large ones do, and cost less.

https://arxiv.org/abs/2104.00298
"""

from collections.abc import Callable
from math import floor

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ...config import AugmentConfig
from ...data import Batch, TrainData

GROWTH = 0.7, 0.85  # shares of the run at which they begin to grow, and reach full size
MOST_SIZES = 6  # with two of evaluation 8, after which torch.compile gives up
Crops = Callable[[Batch, Tensor | None, int], Tensor]  # of a batch, its draws and its step


def change_crops(crops: Crops, augment: AugmentConfig, data: TrainData) -> Crops:
    """The crops in the size that they have at a step, which changes between epochs."""
    if not augment.min_size:
        return crops

    def resized(batch: Batch, draws: Tensor | None, step: int) -> Tensor:
        first = step // data.steps_per_epoch * data.steps_per_epoch  # step of the epoch
        is_last = first + 1.5 * data.steps_per_epoch > data.total_steps  # less than half follows
        done = 1.0 if is_last else first / data.total_steps
        side = side_at(done, augment.min_size, data.data.image_size)
        return resize(crops(batch, draws, step), side)

    return resized


def side_at(done: float, least: int, most: int) -> int:
    """The side of images in pixels after a share of the run: it grows linearly, in a few steps."""
    begin, end = GROWTH
    if done >= end:
        return most
    if done <= begin:
        return least
    # Each size is compiled and tuned anew. Most networks halve large images five times.
    multiple = 32 if most >= 128 else 4
    while (most - 1) // multiple - least // multiple > MOST_SIZES - 2:  # those between
        multiple *= 2
    side = least + (most - least) * (done - begin) / (end - begin)
    return min(most, max(least, multiple * floor(side / multiple + 0.5)))


def resize(pixels: Tensor, side: int) -> Tensor:
    """Images of that side, bilinear with antialiasing: (batch, height, width, channels)."""
    if pixels.shape[1] == side:
        return pixels
    images = pixels.permute(0, 3, 1, 2)
    if images.device.type != "cpu" or images.dtype != torch.uint8:
        images = images.float()  # antialiasing has no other kernels for whole numbers
    return interpolate(images, (side, side), mode="bilinear", antialias=True).permute(0, 2, 3, 1)
