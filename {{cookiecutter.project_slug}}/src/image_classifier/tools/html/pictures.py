"""Pictures for a page, held in the page itself: small, and with what is said of them below.

Text from outside, such as the path of an image, passes through `escape`.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from ...config import FaultError, UserError
from ...data import Source

SIDE = 160  # pixels of the longer side, at most: 72 pictures of noise are 1.9 MB
TINY = 64  # up to here every pixel is kept, in PNG
QUALITY = 80  # of JPEG, beyond that
SHEET_SIDE, SHEET_COLUMNS = 96, 8  # of the pictures that are made one


class Picture(NamedTuple):
    """A picture and what is said of it."""

    pixels: Tensor | None  # (height, width, 3) uint8 on the host; None if it can't be read
    title: str  # shown where a pointer rests on it
    lines: list[tuple[str, str, str]]  # each a class of the style sheet, a name, and a share


def gallery(pictures: Iterable[Picture]) -> str:
    """Pictures side by side."""
    return f'<div class="gallery">{"".join(map(tile, pictures))}</div>'


def tile(picture: Picture) -> str:
    """One picture with its lines."""
    shown = (
        "<i></i>" if picture.pixels is None else f'<img alt="" src="{data_uri(picture.pixels)}">'
    )
    lines = "".join(
        f'<span class="{kind}"><b title="{escape(name)}">{escape(name)}</b> {share}</span>'
        for kind, name, share in picture.lines
    )
    return f'<div title="{escape(picture.title)}">{shown}{lines}</div>'


def data_uri(pixels: Tensor) -> str:
    """A picture as an address that holds it: (height, width, 3) uint8."""
    image = Image.fromarray(pixels.numpy())
    image.thumbnail((SIDE, SIDE))  # never larger than it was
    kind = "png" if max(image.size) <= TINY else "jpeg"
    content = io.BytesIO()
    image.save(content, kind, quality=QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode('ascii')}"


def contact_sheet(pictures: Sequence[Tensor]) -> np.ndarray:
    """Pictures in rows, each cut to a square: (height, width, 3) uint8, of as many."""
    side = SHEET_SIDE
    rows = -(-len(pictures) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (SHEET_COLUMNS * side, rows * side), "white")
    for place, pixels in enumerate(pictures):
        row, column = divmod(place, SHEET_COLUMNS)
        square = ImageOps.fit(Image.fromarray(pixels.numpy()), (side, side))
        sheet.paste(square, (column * side, row * side))
    return np.asarray(sheet)


def read_small(source: Source, index: int) -> Tensor | None:
    """Image `index`, whole; None if it can't be read any more, which is no reason to end a run."""
    try:
        return source.read(index)
    except (UserError, FaultError):
        return None


def place_of(source: Source, index: int) -> str:
    """Where image `index` is to be found."""
    if source.paths is None:
        return f"image {index}"
    return source.paths.relative(index).decode("utf-8", "backslashreplace")


def share_text(share: float) -> str:
    """A share: one decimal where it would otherwise be said to be nothing or all."""
    percent = f"{share:.0%}"
    return f"{share:.1%}" if percent in ("0%", "100%") else percent


def names_in(label: Tensor, classes: tuple[str, ...]) -> list[tuple[str, str]]:
    """The name of a label, () int64; or of all that are mixed in it, with their shares.

    Two images of one class are mixed too: it then has 100.0%.
    """
    if label.ndim == 0:
        return [(classes[int(label)], "")]
    shares = sorted(((float(label[n]), int(n)) for n in label.nonzero().flatten()), reverse=True)
    return [(classes[n], share_text(share)) for share, n in shares]
