"""Images in a page, as data URIs: small, each with a caption."""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from ...data import fitted

SIDE = 160  # pixels of the longer side, at most
TINY = 64  # up to here every pixel is kept, in PNG
QUALITY = 80  # of JPEG, beyond that


class Picture(NamedTuple):
    """An image and its caption."""

    pixels: Tensor | None  # (height, width, channels) on the host; None if it cannot be read
    title: str  # shown under the mouse pointer
    lines: list[tuple[str, str, str]]  # each a class of the style sheet, a name, and a percentage
    heat: Tensor | None = None  # a second image, shown below


def gallery(pictures: Sequence[Picture]) -> str:
    """Images side by side."""
    tiles = []
    for pixels, title, captions, heat in pictures:
        image = "<i></i>" if pixels is None else f'<img alt="" src="{data_uri(pixels)}">'
        image += "" if heat is None else f'<img alt="" src="{data_uri(heat)}">'
        lines = "".join(
            f'<span class="{style}"><b title="{escape(name)}">{escape(name)}</b> {share}</span>'
            for style, name, share in captions
        )
        tiles.append(f'<div title="{escape(title)}">{image}{lines}</div>')
    return f'<div class="gallery">{"".join(tiles)}</div>' if tiles else "<p>None.</p>"


def data_uri(pixels: Tensor) -> str:
    """An image as an address that holds it: (height, width, channels) uint8 or uint16.

    Of 16 bits the upper 8 are shown; of 3 or more channels the first three, else the first.
    """
    shown = fitted(pixels.numpy()[:, :, : 3 if pixels.shape[2] >= 3 else 1], channels=3, bits=8)
    image = Image.fromarray(np.ascontiguousarray(shown))
    image.thumbnail((SIDE, SIDE))  # never larger than it was
    kind = "png" if max(image.size) <= TINY else "jpeg"
    content = io.BytesIO()
    image.save(content, kind, quality=QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode('ascii')}"
