"""The pixels of TIFF files that Pillow does not read: by tifffile."""

import io
import logging
import math
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...errors import UserError
from ...runtime.platform import install_command

PLAIN, DEFLATE = 1, (8, 32946)  # compressions

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # what matters is an error


def read_tiff(encoded: bytes, check: Callable[[tuple[int, ...], np.dtype], object]) -> np.ndarray:
    """The array in a TIFF file; one of several pages that are alike has a channel in each.

    `check` raises ValueError for a shape or a type that no image has, before it is decoded.

    Raises:
        ValueError: if it is damaged, or its parts unpack to more than they should.
        UserError: if the library is missing.
    """
    try:
        import tifffile
    except ImportError as error:
        install = install_command("tifffile")
        raise UserError(
            f"a TIFF file of such channels needs a library: {install} ({error})"
        ) from error
    # Never the other files that one may name.
    with tifffile.TiffFile(io.BytesIO(encoded), _multifile=False) as file:
        series = file.series[0]
        check(series.shape, series.dtype)
        for page in series.pages:
            check_parts(encoded, page)
        return series.asarray(maxworkers=1)


def check_parts(encoded: bytes, page: Any) -> None:  # noqa: ANN401 - of tifffile
    """Raise ValueError if a part of a page unpacks to more than it should.

    The decoders of imagecodecs stop at that size; tifffile's own, of zlib, does not.
    """
    whole = page.keyframe
    compression = page.keyframe.compression
    if compression == PLAIN or find_spec("imagecodecs") is not None:
        return
    if compression not in DEFLATE:
        install = install_command("imagecodecs")
        raise ValueError(f"its compression ({compression}) needs a library: {install}")
    most = math.prod(whole.chunks) * whole.dtype.itemsize
    for start, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        part = zlib.decompressobj().decompress(encoded[start : start + count], most + 1)
        if len(part) > most:
            raise ValueError("a part of it unpacks to more than its size")
