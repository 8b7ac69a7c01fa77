"""Random resized crops of a batch, cut on the device from images that are in memory."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from ...augment import local_draws
from ...config import AugmentConfig
from ...data import BOX_DRAWS, Batch, TrainData, random_sides

Crops = Callable[[Batch, Tensor | None, int], Tensor]  # of a batch, its draws and its step


def change_crops(crops: Crops, augment: AugmentConfig, data: TrainData) -> Crops:
    """Crops of boxes of the images, where workers do not cut them."""
    if data.cropper != "device":
        return crops

    def cropped(batch: Batch, draws: Tensor, step: int) -> Tensor:
        images = batch.images.permute(0, 2, 3, 1)
        further_tries = local_draws(data.seed, step, 2, count=BOX_DRAWS - 4, data=data)
        boxes = torch.cat((draws[:, 3:7], further_tries), dim=1)
        pixels = crop_on_device(images, boxes, data.data.image_size, augment.min_scale)
        return crops(replace(batch, pixels=pixels, rows=None), draws, step)

    return cropped


def crop_on_device(images: Tensor, draws: Tensor, size: int, min_area: float) -> Tensor:
    """A random resized crop of each image, bilinear: (batch, size, size, channels) float32.

    `draws` is (batch, BOX_DRAWS); `min_area` the smallest share of the image.
    """
    height, width = images.shape[1:3]
    top, left, box_height, box_width = random_boxes(draws, height, width, min_area).T
    # Pixel centers of the output, from 0 to 1 of the box, then in grid_sample's -1..1 of the image.
    centers = (torch.arange(size, device=images.device) + 0.5) / size
    y = (top[:, None] + box_height[:, None] * centers) * (2 / height) - 1
    x = (left[:, None] + box_width[:, None] * centers) * (2 / width) - 1
    # Clamped to pixel centers, which is `padding_mode="border"`: torch 2.11 and 2.12 lack that on
    # Apple's GPUs (https://github.com/pytorch/pytorch/issues/125098).
    y.clamp_(1 / height - 1, 1 - 1 / height)
    x.clamp_(1 / width - 1, 1 - 1 / width)
    grid = torch.stack(
        (x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)), dim=3
    )
    cropped = grid_sample(images.permute(0, 3, 1, 2).float(), grid, align_corners=False)
    return cropped.permute(0, 2, 3, 1).contiguous()


def random_boxes(draws: Tensor, height: int, width: int, min_area: float) -> Tensor:
    """Boxes of random area and shape at random places, for random resized crops.

    `draws` is (count, BOX_DRAWS) from 0 to 1. Returns (count, 4) float32: top, left, height, width
    in pixels. They are those of `place_box`, but not in whole pixels.
    """
    sides = random_sides(draws[:, 2:], min_area) * math.sqrt(height * width)
    fits = (sides[..., 0] <= height) & (sides[..., 1] <= width)  # (count, TRIES)
    fits[:, -1] = True
    first = fits.int().argmax(dim=1)
    heights, widths = sides[torch.arange(len(sides), device=sides.device), first].T
    heights, widths = heights.clamp(max=height), widths.clamp(max=width)
    return torch.stack(
        (draws[:, 0] * (height - heights), draws[:, 1] * (width - widths), heights, widths), dim=1
    )
