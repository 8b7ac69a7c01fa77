"""A picture of images with a caption below each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from ...data import fitted

SIDE, GAP, LINE = 160, 8, 14  # pixels of an image's longer side, around it, and of a line of text
COLUMNS = 6
LETTERS = 26  # of a line, as many as fit


class Tile(NamedTuple):
    """An image and its caption."""

    pixels: Tensor | None  # (height, width, channels) uint8 or uint16; None: it cannot be read
    lines: tuple[str, ...]
    is_marked: bool  # in black; else in gray


def draw_tiles(tiles: Sequence[Tile]) -> Image.Image:
    """The tiles in rows, each image in a square."""
    columns = min(COLUMNS, len(tiles))
    rows = -(-len(tiles) // COLUMNS)
    width = SIDE + GAP
    height = SIDE + GAP + LINE * max(len(tile.lines) for tile in tiles)
    page = Image.new("RGB", (columns * width + GAP, rows * height + GAP), "white")
    draw = ImageDraw.Draw(page)
    for number, tile in enumerate(tiles):
        left = GAP + number % COLUMNS * width
        top = GAP + number // COLUMNS * height
        image = small_image(tile.pixels)
        page.paste(image, (left + (SIDE - image.width) // 2, top + (SIDE - image.height) // 2))
        for place, line in enumerate(tile.lines):
            color = "black" if tile.is_marked else "gray"
            draw.text((left, top + SIDE + LINE * place), line, color)
    return page


def small_image(pixels: Tensor | None) -> Image.Image:
    """An image, no side of which is longer than SIDE; of 16 bits the upper 8, of colors three."""
    if pixels is None:
        return Image.new("RGB", (SIDE, SIDE), "lightgray")
    shown = fitted(pixels.numpy()[:, :, : 3 if pixels.shape[2] >= 3 else 1], channels=3, bits=8)
    return ImageOps.contain(Image.fromarray(np.ascontiguousarray(shown)), (SIDE, SIDE))
