"""Pixels of any number of channels and of 8 or 16 bits: converted, moved, read from array files."""

import io
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..extensions import function

COLORED = (1, 3)  # channels: gray and color, each of which is converted to the other
TO_WIDE = 257  # 255 becomes 65535
GRAY_WEIGHTS, GRAY_BITS = np.array([19595, 38470, 7471], np.uint32), 16  # those of Pillow's `L`
NPY_START = b"\x93NUMPY"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF

# Both raise ValueError: of height, width, channels; and of the shape and the type of an array.
CheckSize = Callable[[int, int, int], object]
CheckArray = Callable[[tuple[int, ...], np.dtype], object]


def dtype_of(bits: int) -> torch.dtype:
    """The type of numbers of 8 or 16 bits."""
    return torch.uint8 if bits == 8 else torch.uint16


def take(pixels: Tensor, rows: Tensor, dim: int = 0, out: Tensor | None = None) -> Tensor:
    """`pixels.index_select(dim, rows)`; 16-bit numbers as int16, which every device can move."""
    if pixels.dtype == torch.uint8:
        return torch.index_select(pixels, dim, rows, out=out)
    words = None if out is None else out.view(torch.int16)
    return torch.index_select(pixels.view(torch.int16), dim, rows, out=words).view(pixels.dtype)


def fitted(pixels: np.ndarray, channels: int, bits: int) -> np.ndarray:
    """(height, width, any) uint8 or uint16 as (height, width, channels) of `bits`.

    Color becomes gray by luminance, gray becomes color; of 16 bits the upper 8 are kept.

    Raises:
        ValueError: if there are other channels.
    """
    found = pixels.shape[2]
    if found != channels:
        if not {found, channels} <= {*COLORED}:
            raise wrong_channels(found, channels)
        if channels == 1:
            gray = (pixels @ GRAY_WEIGHTS + (1 << (GRAY_BITS - 1))) >> GRAY_BITS
            pixels = gray.astype(pixels.dtype)[:, :, None]
        else:
            pixels = pixels.repeat(3, axis=2)
    if bits == 16 and pixels.dtype == np.uint8:
        return pixels.astype(np.uint16) * np.uint16(TO_WIDE)
    return (pixels >> 8).astype(np.uint8) if bits == 8 and pixels.dtype != np.uint8 else pixels


def wrong_channels(found: int, wanted: int) -> ValueError:
    """The error for an image with other channels than `data.channels` says."""
    plural = "s" * (found != 1)
    return ValueError(f"it has {found} channel{plural}, not {wanted}: --data.channels {found}")


def channel_axis(shape: tuple[int, ...], channels: int, order: tuple[int, int] = (2, 0)) -> int:
    """Which axis of an image's `shape` has the channels; HWC counts before CHW, as `order` says.

    Raises:
        ValueError: if none has as many as there should be, or as can become as many.
    """
    for wanted in (channels, *COLORED) if channels in COLORED else (channels,):
        for axis in order:
            if shape[axis] == wanted:
                return axis
    raise wrong_channels(min(shape[0], shape[2]), channels)


def decode_array(encoded: bytes, channels: int, check_size: CheckSize) -> np.ndarray:
    """The pixels of NumPy's or a TIFF file: (height, width, any).

    They are uint8 or uint16. Sizes are checked before any pixel is decoded.

    Raises:
        ValueError: if it is damaged, of other channels, too large, or of other numbers.
        UserError: if a library or the tool that reads TIFF files is missing.
    """
    check = partial(check_array, channels=channels, check_size=check_size)
    if encoded.startswith(NPY_START):
        array = read_npy(encoded, check)
    elif encoded.startswith(TIFF_STARTS):
        read_tiff = function("decoder", "read_tiff")
        if read_tiff is None:
            raise UserError("a TIFF file of such channels needs a tool: pretuned add tiff")
        array = read_tiff(encoded, check)
    else:
        raise ValueError("of its 16-bit colors only 8 bits can be read: save it as TIFF or .npy")
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
