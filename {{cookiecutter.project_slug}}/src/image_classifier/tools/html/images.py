"""Images in a page, as data URIs: small, each with a caption."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

SIDE = 160  # pixels of the longer side, at most: 72 images of noise are 1.9 MB
TINY = 64  # up to here every pixel is kept, in PNG
QUALITY = 80  # of JPEG, beyond that
SHEET_SIDE, SHEET_COLUMNS = 96, 8  # of the images in a contact sheet


class Picture(NamedTuple):
    """An image and its caption."""

    pixels: Tensor | None  # (height, width, 3) uint8 on the host; None if it cannot be read
    title: str  # shown under the mouse pointer
    lines: list[tuple[str, str, str]]  # each a class of the style sheet, a name, and a percentage


def gallery(pictures: Iterable[Picture]) -> str:
    """Images side by side."""
    tiles = []
    for picture in pictures:
        image = "<i></i>"
        if picture.pixels is not None:
            image = f'<img alt="" src="{data_uri(picture.pixels)}">'
        lines = "".join(
            f'<span class="{style}"><b title="{escape(name)}">{escape(name)}</b> {share}</span>'
            for style, name, share in picture.lines
        )
        tiles.append(f'<div title="{escape(picture.title)}">{image}{lines}</div>')
    return f'<div class="gallery">{"".join(tiles)}</div>'


def data_uri(pixels: Tensor) -> str:
    """An image as an address that holds it: (height, width, 3) uint8."""
    image = Image.fromarray(pixels.numpy())
    image.thumbnail((SIDE, SIDE))  # never larger than it was
    kind = "png" if max(image.size) <= TINY else "jpeg"
    content = io.BytesIO()
    image.save(content, kind, quality=QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode('ascii')}"


def contact_sheet(images: Sequence[Tensor]) -> np.ndarray:
    """Images as squares in rows of one image: each and the result (height, width, 3) uint8."""
    side = SHEET_SIDE
    rows = -(-len(images) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (SHEET_COLUMNS * side, rows * side), "white")
    for place, pixels in enumerate(images):
        row, column = divmod(place, SHEET_COLUMNS)
        square = ImageOps.fit(Image.fromarray(pixels.numpy()), (side, side))
        sheet.paste(square, (column * side, row * side))
    return np.asarray(sheet)
