"""Pixels of any number of channels and of 8 or 16 bits: converted and moved."""

import numpy as np
import torch
from torch import Tensor

COLORED = (1, 3)  # channels: gray and color, each of which is converted to the other
TO_WIDE = 257  # 255 becomes 65535
GRAY_WEIGHTS, GRAY_BITS = np.array([19595, 38470, 7471], np.uint32), 16  # those of Pillow's `L`


def dtype_of(bits: int) -> torch.dtype:
    """The type of numbers of 8 or 16 bits."""
    return torch.uint8 if bits == 8 else torch.uint16


def take(pixels: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """`pixels.index_select(0, rows)`; 16-bit numbers as int16, which every device can move."""
    if pixels.dtype == torch.uint8:
        return torch.index_select(pixels, 0, rows, out=out)
    words = None if out is None else out.view(torch.int16)
    return torch.index_select(pixels.view(torch.int16), 0, rows, out=words).view(pixels.dtype)


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
