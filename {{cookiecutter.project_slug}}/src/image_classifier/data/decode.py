"""Image files to pixels, the same way in training, evaluation and prediction."""

import errno
import io
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor

from ..errors import FaultError, UserError
from ..runtime.files import read_plain
from .arrays import COLORED, NPY_START, TIFF_STARTS, decode_array, fitted, wrong_channels

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".npy")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 64_000_000  # against decompression bombs
# Markers of JPEG (https://www.w3.org/Graphics/JPEG/itu-t81.pdf, table B.1).
JPEG_START, JPEG_SCAN, EXIF_START = b"\xff\xd8\xff", b"\xff\xda", b"Exif\0\0"
JPEG_COLORS = ("Gray", "YCbCr", "RGB")
COLOR_SPACES = {1: "GRAY", 3: "RGB"}  # of the pixels, by their channels

# The system lacks memory or file descriptors.
LACKS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class BadImageError(UserError):
    """An unreadable image; `reason` says what is wrong with it."""

    def __init__(self, name: str | Path, reason: str) -> None:
        """`name` is the path or the number of the image."""
        super().__init__(f"cannot read image {os.fspath(name)!a}: {reason}")
        self.reason = reason


def silence_pillow() -> None:
    """Turn off Pillow's warnings, which each worker would repeat; what matters is an error."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())


silence_pillow()


def read_image(
    path: Path, channels: int = 3, bits: int = 8, read: Callable[[], bytes] | None = None
) -> Tensor:
    """The pixels of an image file: (height, width, channels) uint8 or, of 16 bits, uint16.

    They are upright, and colors that are transparent lie over white. An animation gives its first
    frame. Gray becomes color or color gray; 8 bits are scaled to 16, of 16 the upper 8 are kept.
    Other channels must be in the file: TIFF, `.npy`, or an image with transparency as a channel.
    `read` returns the content of what is no file of its own.

    Raises:
        BadImageError: if the file is missing, damaged, of another format or other channels, or too
            large.
        UserError: if the library for such files is missing.
        FaultError: if the system is out of memory or file descriptors, or `read` raises it.
    """
    try:
        return decode(read() if read else read_plain(path), channels, bits)
    except (UserError, FaultError):
        raise
    except Exception as error:  # Pillow's decoders raise errors of many kinds on damaged files
        raise unreadable(path, error) from error


def unreadable(name: str | Path, error: Exception) -> BadImageError | FaultError:
    """The error for an image that could not be opened or decoded."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if getattr(error, "errno", None) in LACKS:
        return FaultError(f"no more images can be read: {reason}, at {os.fspath(name)!a}")
    if "cannot identify image file" in reason:
        reason = f"not a {', '.join(FORMATS)} file"
    return BadImageError(name, " ".join(reason.split()))


def decode(encoded: bytes, channels: int = 3, bits: int = 8) -> Tensor:
    """`read_image` of the bytes of a file; Pillow's decoders raise errors of any kind."""
    pixels = decode_jpeg(encoded, channels) if encoded.startswith(JPEG_START) else None
    if pixels is None:
        pixels = decode_other(encoded, channels, bits)
    return torch.from_numpy(fitted(pixels, channels, bits))


def decode_other(encoded: bytes, channels: int, bits: int) -> np.ndarray:
    """The pixels of a file that `decode_jpeg` does not read: (height, width, any)."""
    is_tiff = encoded.startswith(TIFF_STARTS)
    if encoded.startswith(NPY_START) or (is_tiff and channels not in COLORED):
        return decode_array(encoded, channels, check_size)
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            check_size(image.height, image.width)
            # Of 16-bit colors Pillow would keep 8 bits.
            if bits == 8 or image.mode.startswith("I") or ";16" not in str(image.tile):
                return image_pixels(image, channels, bits)
    except UnidentifiedImageError:
        if not is_tiff:
            raise
        if (count := channels_of_tiff(encoded)) not in (0, channels):
            raise wrong_channels(count, channels) from None
        if bits == 8:
            raise
    return decode_array(encoded, channels, check_size)


def channels_of_tiff(encoded: bytes) -> int:
    """The channels of a TIFF file; 0 if it is damaged."""
    try:
        tags, file = TiffImagePlugin.ImageFileDirectory_v2(encoded[:8]), io.BytesIO(encoded)
        file.seek(tags.next)
        tags.load(file)
        return int(tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 0))
    except Exception:  # Pillow raises many kinds
        return 0


def decode_jpeg(encoded: bytes, channels: int = 3) -> np.ndarray | None:
    """The pixels of an undamaged color or gray JPEG, upright, in color or gray; None for others.

    libjpeg-turbo gives the same pixels as Pillow in about half of the time.
    """
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(encoded)
    except ValueError:  # damaged: Pillow accepts it, or says how
        return None
    if colors not in JPEG_COLORS or channels not in COLOR_SPACES:
        return None
    check_size(height, width)
    try:
        pixels = simplejpeg.decode_jpeg(encoded, COLOR_SPACES[channels])
    except ValueError:
        return None
    start = encoded.find(EXIF_START, 0, encoded.find(JPEG_SCAN))
    length = int.from_bytes(encoded[start - 2 : start], "big") - 2
    orientation = orientation_in(encoded[start : start + length]) if start >= 0 else 1
    return upright(pixels, orientation)


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels turned and mirrored as their EXIF orientation says."""
    if orientation == 1:
        return pixels
    if orientation in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 6, 7):
        pixels = pixels[::-1]
    return (pixels.swapaxes(0, 1) if orientation >= 5 else pixels).copy()


def orientation_in(exif: bytes) -> int:
    """The orientation in EXIF data, from 2 to 8; 1 (upright) if there is none or it is damaged."""
    tags = Image.Exif()
    try:
        tags.load(exif)
        orientation = tags.get(ExifTags.Base.Orientation)
        return orientation if orientation in range(2, 9) else 1
    except Exception:  # Pillow raises many kinds
        return 1


def check_size(height: int, width: int, channels: int = 3) -> None:
    """Raise ValueError for an image that is too large, before its pixels are decoded."""
    most = MAX_PIXELS * 3 // max(3, channels)
    if width * height > most:
        raise ValueError(f"{width} x {height} pixels, more than {most:,}")


def image_pixels(image: Image.Image, channels: int = 3, bits: int = 8) -> np.ndarray:
    """Any image, upright: (height, width, any) uint8; or uint16, if it is gray and to have 16 bits.

    `convert` alone makes 16-bit gray white and shows hidden colors.
    """
    image.load()  # some formats have their EXIF data last; a TIFF is upright by now
    exif = image.info.get("exif") if image.format != "TIFF" else None
    orientation = orientation_in(exif) if exif else 1
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 bits per channel")
    if image.mode.startswith("I"):
        gray = image.convert("I")
        lowest, highest = gray.getextrema()
        if lowest < 0 or highest >= 2**16:
            raise ValueError("its pixels are numbers of 32 bits; save it with 8 bits per channel")
        if bits == 16:
            return upright(np.array(gray, dtype=np.uint16)[:, :, None], orientation)
        scale = 1 / 256 if highest > 255 else 1
        image = gray.point(lambda value: value * scale).convert("L")
    if channels in COLORED:
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB" if channels == 3 else "L")
    pixels = np.array(image)
    return upright(pixels if pixels.ndim == 3 else pixels[:, :, None], orientation)
