"""The pixels of NumPy's files, and of TIFF files that Pillow does not read: by tifffile."""

import io
import logging
import math
import zlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...data import COLORED, NPY, wrong_channels
from ...errors import UserError
from ...runtime.platform import install_command
from ..dataset_formats.arrays import channel_axis

PLAIN, DEFLATE = 1, (8, 32946)  # compressions

# Both raise ValueError: of height, width, channels; and of the shape and the type of an array.
CheckSize = Callable[[int, int, int], object]
CheckArray = Callable[[tuple[int, ...], np.dtype], object]

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # what matters is an error


def read_array(encoded: bytes, channels: int, check_size: CheckSize) -> np.ndarray:
    """The pixels of NumPy's or a TIFF file: (height, width, any).

    They are uint8 or uint16. Sizes are checked before any pixel is decoded.

    Raises:
        ValueError: if it is damaged, of other channels, too large, or of other numbers.
        UserError: if the library that reads TIFF files is missing.
    """
    check = partial(check_array, channels=channels, check_size=check_size)
    read = read_npy if encoded.startswith(NPY) else read_tiff
    array = read(encoded, check)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.ndim == 2:
        return array[:, :, None]
    return np.ascontiguousarray(np.moveaxis(array, channel_axis(array.shape, channels), 2))


def check_array(
    shape: tuple[int, ...], dtype: np.dtype, channels: int, check_size: CheckSize
) -> None:
    """Raise ValueError unless an array of `shape` and `dtype` is an image of such a size."""
    if dtype not in (np.uint8, np.uint16, np.dtype(">u2")):
        raise ValueError(f"its numbers are {dtype}: save it as uint8 or uint16")
    if len(shape) not in (2, 3):
        raise ValueError(f"an array of {len(shape)} dimensions is no image")
    sides = [*shape]
    found = 1
    if len(shape) == 3:
        found = sides.pop(channel_axis(shape, channels))
    elif channels not in COLORED:
        raise wrong_channels(1, channels)
    if 0 in sides:
        raise ValueError("it has no pixels")
    check_size(*sides, found)


def read_npy(encoded: bytes, check: CheckArray) -> np.ndarray:
    """An array that NumPy saved; never a pickle."""
    file = io.BytesIO(encoded)
    version = np.lib.format.read_magic(file)
    headers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in headers:
        raise ValueError(f"NumPy's format {version} is not read")
    shape, _, dtype = headers[version](file)
    check(shape, dtype)
    if math.prod(shape) * dtype.itemsize > len(encoded):  # else they would be allocated
        raise ValueError("it is truncated")
    file.seek(0)
    return np.load(file, allow_pickle=False)


def read_tiff(encoded: bytes, check: CheckArray) -> np.ndarray:
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
