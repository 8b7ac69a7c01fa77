"""Boxes of images, scaled to the size that the model sees."""

import math

import torch
from torch import Tensor

TRIES = 10  # at a random box that fits, as many as torchvision makes
BOX_DRAWS = 2 + 2 * TRIES  # where it is, and area and aspect ratio of each try


def crop(
    pixels: Tensor, box: tuple[int, int, int, int], out: Tensor, mirrored: bool = False
) -> None:
    """Scale a box of an image (top, left, height, width) to fill `out`, (height, width, 3) uint8.

    Bilinear and antialiased: what Pillow makes of it, up to rounding.
    """
    top, left, height, width = box
    part = planes(pixels, top, left, height, width)
    place = planes(out, 0, 0, out.shape[0], out.shape[1])
    if mirrored:  # before it is scaled, which copies the box anyway
        part = part.flip(3)
    if part.shape == place.shape:
        place.copy_(part)
        return
    # What `interpolate(antialias=True)` calls, but into memory that is there already.
    torch._C._nn._upsample_bilinear2d_aa(part, place.shape[2:], False, None, None, out=place)


def planes(pixels: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """A box of (height, width, 3) pixels as torch's kernels want it: (1, 3, height, width).

    By one operation in place of four, as this is done for every image, twice.
    """
    row, column, channel = pixels.stride()
    start = pixels.storage_offset() + top * row + left * column
    return pixels.as_strided((1, 3, height, width), (1, channel, row, column), start)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """(height, width, 3) uint8 scaled to another size, as `crop` does."""
    scaled = torch.empty((height, width, 3), dtype=torch.uint8)
    crop(pixels, (0, 0, *pixels.shape[:2]), scaled)
    return scaled


def center_crop(pixels: Tensor, out: Tensor) -> None:
    """Scale the middle square of an image to fill `out`, (side, side, 3) uint8."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    crop(pixels, ((height - side) // 2, (width - side) // 2, side, side), out)


def random_boxes(draws: Tensor, height: int, width: int, min_area: float) -> Tensor:
    """Boxes of random area and shape at random places, for random resized crops.

    `draws` is (count, BOX_DRAWS) from 0 to 1. Returns (count, 4) float32: top, left, height, width
    in pixels. The area is uniform from `min_area` to 1 of the image, the aspect ratio log-uniform
    from 3/4 to 4/3 (https://arxiv.org/abs/1409.4842). As everywhere, a box too long for the image
    is drawn anew, so that boxes are smaller on average than `min_area` says; the last is cut.
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


def random_sides(draws: Tensor, min_area: float) -> Tensor:
    """Height and width of random boxes in an image of area 1, `TRIES` to choose from.

    (count, 2 * TRIES) from 0 to 1 -> (count, TRIES, 2) float32.
    """
    area = min_area + (1 - min_area) * draws[:, 0::2]
    aspect = (4 / 3) ** (2 * draws[:, 1::2] - 1)  # width / height
    return torch.stack((area / aspect, area * aspect), dim=2).sqrt()


def place_box(
    sides: list[list[float]], draws: list[float], height: int, width: int
) -> tuple[int, int, int, int]:
    """One of `random_boxes`, in whole pixels: top, left, height, width.

    `sides` is of `random_sides`, `draws` are two from 0 to 1: where in the image. In plain Python,
    as workers meet images of all sizes, one at a time.
    """
    scale = math.sqrt(height * width)
    box_height = box_width = 0.0
    for side_height, side_width in sides:
        box_height, box_width = scale * side_height, scale * side_width
        if box_height <= height and box_width <= width:
            break
    box_height = min(height, max(1, round(box_height)))
    box_width = min(width, max(1, round(box_width)))
    top, left = round(draws[0] * (height - box_height)), round(draws[1] * (width - box_width))
    return top, left, box_height, box_width
