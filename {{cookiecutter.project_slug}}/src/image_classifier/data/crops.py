"""Images and boxes of them, scaled to the size that the model sees: `data.fit` says how."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

TRIES = 10  # at a random box that fits, as many as torchvision makes
ASPECT = 4 / 3  # of the longest random box
BOX_DRAWS = 2 + 2 * TRIES  # where it is, and area and aspect ratio of each try
Box = tuple[int, int, int, int]  # in pixels: top, left, height, width


def crop(pixels: Tensor, box: Box, out: Tensor, mirrored: bool = False) -> None:
    """Scale a box of an image to fill `out`, (height, width, channels).

    Bilinear and antialiased: what Pillow makes of it, up to rounding. Both are uint8, or uint16.
    """
    top, left, height, width = box
    rows, columns, channels = out.shape
    if rows > columns == 1 and pixels.dtype is not torch.uint8:  # torch would repeat the first row
        return crop(pixels.transpose(0, 1), (left, top, width, height), out.transpose(0, 1))
    part = planes(pixels, top, left, height, width, channels)
    place = planes(out, 0, 0, rows, columns, channels)
    if mirrored:  # before it is scaled, which copies the box anyway
        part = (part if part.dtype is torch.uint8 else part.float()).flip(3)
    if part.shape == place.shape:
        place.copy_(part)
        return
    if pixels.dtype is not torch.uint8:  # there is no kernel for 16 bits
        scaled = interpolate(part.float(), (rows, columns), mode="bilinear", antialias=True)
        place.copy_(scaled.round_())
        return
    # What `interpolate(antialias=True)` calls, but into memory that is there already.
    torch._C._nn._upsample_bilinear2d_aa(part, place.shape[2:], False, None, None, out=place)


def planes(  # noqa: PLR0917 - a box
    pixels: Tensor, top: int, left: int, height: int, width: int, channels: int
) -> Tensor:
    """A box of (height, width, channels) pixels as torch's kernels want it: (1, channels, ...).

    By one operation in place of four, as this is done for every image, twice.
    """
    row, column, channel = pixels.stride()
    start = pixels.storage_offset() + top * row + left * column
    return pixels.as_strided((1, channels, height, width), (1, channel, row, column), start)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """(height, width, channels) pixels scaled to another size, as `crop` does."""
    scaled = torch.empty((height, width, pixels.shape[2]), dtype=pixels.dtype)
    crop(pixels, (0, 0, *pixels.shape[:2]), scaled)
    return scaled


def fit_square(pixels: Tensor, out: Tensor, fit: str, mean: Sequence[float]) -> None:
    """Make an image fill `out`, (side, side, channels), as `fit` says, which is a `data.fit`.

    `mean` is the color around an image that is padded, from 0 to 1 for each channel.
    """
    height, width = pixels.shape[:2]
    if fit == "crop" or height == width:
        side = min(height, width)
        crop(pixels, ((height - side) // 2, (width - side) // 2, side, side), out)
    elif fit == "squash":
        crop(pixels, (0, 0, height, width), out)
    else:
        (top, height), (left, width) = padded_span(height, width, len(out))
        out.copy_(mean_color(mean, out.dtype))
        out[top : top + height, left : left + width] = resize(pixels, height, width)


def padded_span(height: int, width: int, side: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where in a square of `side` a padded image is, by rows and by columns: first, and how many.

    In whole numbers, which the graph of an exported model computes alike.
    """
    longer = max(height, width)
    counts = (max(1, (2 * length * side + longer) // (2 * longer)) for length in (height, width))
    return tuple(((side - count) // 2, count) for count in counts)


def mean_color(mean: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A color, from 0 to 1 for each channel, as (channels,) pixels of `dtype`."""
    return (torch.tensor(mean, dtype=torch.float64) * torch.iinfo(dtype).max).round().to(dtype)


def random_sides(draws: Tensor, min_area: float) -> Tensor:
    """Height and width of random boxes in an image of area 1, `TRIES` to choose from.

    The area is uniform from `min_area` to 1, the aspect ratio log-uniform from 3/4 to 4/3
    (https://arxiv.org/abs/1409.4842). (count, 2 * TRIES) from 0 to 1 -> (count, TRIES, 2) float32.
    """
    area = min_area + (1 - min_area) * draws[:, 0::2]
    aspect = ASPECT ** (2 * draws[:, 1::2] - 1)  # width / height
    return torch.stack((area / aspect, area * aspect), dim=2).sqrt()


def place_box(sides: list[list[float]], draws: list[float], height: int, width: int) -> Box:
    """A box of random area and shape at a random place.

    `sides` is of `random_sides`, `draws` are two from 0 to below 1: where in the image. A box that
    does not fit is drawn anew; if none fits, it is the `largest_box`, as in torchvision, but at a
    random place. In plain Python, as workers meet images of all sizes, one at a time.
    """
    scale = math.sqrt(height * width)
    for side_height, side_width in sides:
        box_height = round(scale * side_height)
        box_width = round(scale * side_width)
        if 0 < box_height <= height and 0 < box_width <= width:
            break
    else:
        box_height, box_width = largest_box(height, width)
    top = int(draws[0] * (height - box_height + 1))
    left = int(draws[1] * (width - box_width + 1))
    return top, left, box_height, box_width


def largest_box(height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box in an image that is no longer than 4 to 3."""
    return min(height, round(width * ASPECT)), min(width, round(height * ASPECT))
