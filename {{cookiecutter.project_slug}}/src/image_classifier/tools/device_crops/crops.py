"""Random resized crops of a batch, cut on the device from images that are in memory."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...augment import local_draws
from ...config import AugmentConfig
from ...data import BOX_DRAWS, Batch, TrainData, crop, largest_box, random_sides

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
    """A random resized crop of each image, as workers cut it: (batch, size, size, channels).

    `images` are (batch, height, width, channels) whole numbers, and so are the crops on a CPU;
    elsewhere these are float32. `draws` is (batch, BOX_DRAWS), `min_area` the smallest share of the
    image.
    """
    boxes = random_boxes(draws, *images.shape[1:3], min_area)
    if images.device.type != "cpu":
        return crop_by_products(images, boxes, size)
    crops = torch.empty((len(images), size, size, images.shape[3]), dtype=images.dtype)
    for image, box, place in zip(images, boxes.int().tolist(), crops, strict=True):
        crop(image, box, place)
    return crops


def crop_by_products(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """A box of each image, (batch, 4), bilinear and antialiased: (batch, size, size, channels).

    By two products of matrices for a whole batch; for a CPU most of a matrix is zeros.
    """
    height, width = images.shape[1:3]
    top, left, box_height, box_width = boxes.T
    columns = crop_weights(left, box_width, width, size)
    rows = crop_weights(top, box_height, height, size)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would keep 11 bits, of 16 in some images
    try:
        narrow = images.permute(0, 3, 1, 2).float() @ columns[:, None].mT
        return (rows[:, None] @ narrow).permute(0, 2, 3, 1).contiguous()
    finally:
        torch.set_float32_matmul_precision(precision)


def crop_weights(first: Tensor, length: Tensor, count: int, size: int) -> Tensor:
    """How much each of `count` pixels adds to each of `size`: (batch, size, count) float32.

    These are scaled from a part of the pixels, `length` from `first` on, (batch,) whole numbers.
    """
    first = first[:, None, None]
    length = length[:, None, None]
    places = torch.arange(count, device=first.device) + 0.5 - first  # in the part
    centers = (torch.arange(size, device=first.device)[:, None] + 0.5) * length / size
    reach = (length / size).clamp(min=1)  # of a pixel of the result
    weights = (1 - (places - centers).abs() / reach).clamp(min=0)
    weights *= (places > 0) & (places < length)
    return weights / weights.sum(2, keepdim=True)


def random_boxes(draws: Tensor, height: int, width: int, min_area: float) -> Tensor:
    """Boxes of random area and shape at random places, those of `place_box`.

    `draws` is (count, BOX_DRAWS) from 0 to below 1. Returns (count, 4) float32 whole numbers: top,
    left, height, width in pixels.
    """
    sides = (random_sides(draws[:, 2:], min_area) * math.sqrt(height * width)).round()
    heights, widths = sides.unbind(2)  # of each try
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first = fits.int().argmax(dim=1, keepdim=True)
    has_fit = fits.any(dim=1)
    largest_height, largest_width = largest_box(height, width)
    heights = heights.gather(1, first)[:, 0].where(has_fit, largest_height)
    widths = widths.gather(1, first)[:, 0].where(has_fit, largest_width)
    top = (draws[:, 0] * (height - heights + 1)).floor()
    left = (draws[:, 1] * (width - widths + 1)).floor()
    return torch.stack((top, left, heights, widths), dim=1)
