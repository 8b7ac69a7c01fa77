"""Image files to pixels, the same way in training, evaluation and prediction."""

import errno
import io
import logging
import os
import re
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor

from ..errors import FaultError, UserError
from ..extensions import function
from .arrays import COLORED, fitted, wrong_channels

try:
    import simplejpeg
except (ImportError, ValueError):  # there is none for this Python or NumPy: Pillow is slower
    simplejpeg = None

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SUFFIXES += (".ppm", ".pgm", ".pnm", ".npy")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_PIXELS = 64_000_000  # against decompression bombs
JPEG_SHRINK = 2  # a JPEG of more pixels is decoded at half its sides, up to 4 times as many
FOR_LARGE = "shrink it"
NPY = b"\x93NUMPY"  # the first bytes of `.npy` files
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
PAGES = re.compile('\nchannels=3\n|SizeC="3"')  # ImageJ and OME: pages are channels
# Markers of JPEG (https://www.w3.org/Graphics/JPEG/itu-t81.pdf, table B.1).
JPEG_START = b"\xff\xd8\xff"
FILL = 0xFF
APP1 = 0xE1
SCAN = 0xDA
WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD8))  # TEM and RST0 to RST7
# What tells the orientation, by its name in Pillow's `info`.
METADATA = {"exif": b"Exif\0\0", "xmp": b"http://ns.adobe.com/xap/1.0/\0"}

# The system lacks memory or file descriptors.
LACKS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class BadImageError(UserError):
    """An unreadable image; `reason` says what is wrong with it."""

    def __init__(self, name: str | Path, reason: str) -> None:
        """`name` is the path or the number of the image."""
        super().__init__(f"cannot read image {os.fspath(name)!a}: {reason}")
        self.reason = reason


def silence_pillow() -> None:
    """Turn off Pillow's warnings, which each worker would repeat; what matters is an error.

    Its limit of pixels becomes the largest of ours; the error is at twice of what it names.
    """
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS * JPEG_SHRINK**2 // 2
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())


silence_pillow()


def unreadable(name: str | Path, error: Exception) -> BadImageError | FaultError:
    """The error for an image that could not be opened or decoded."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if getattr(error, "errno", None) in LACKS:
        return FaultError(f"no more images can be read: {reason}, at {os.fspath(name)!a}")
    if "cannot identify image file" in reason:
        reason = f"not a {', '.join(FORMATS)} file"
    return BadImageError(name, " ".join(reason.split()))


def decode_image(encoded: bytes, channels: int = 3, bits: int = 8) -> Tensor:
    """The pixels of an image file: (height, width, channels) uint8 or, of 16 bits, uint16.

    They are upright, and colors that are transparent lie over white. An animation gives its first
    frame. Gray becomes color or color gray; 8 bits are scaled to 16, of 16 the upper 8 are kept.
    A JPEG of more than 64 megapixels has half its height and width.
    Other channels must be in the file: TIFF, `.npy`, or an image with transparency as a channel.
    Pillow's decoders raise errors of any kind on damaged files.
    """
    pixels = decode_jpeg(encoded, channels) if encoded.startswith(JPEG_START) else None
    if pixels is None:
        pixels = decode_other(encoded, channels, bits)
    return torch.from_numpy(fitted(pixels, channels, bits))


def decode_other(encoded: bytes, channels: int, bits: int) -> np.ndarray:
    """The pixels of a file that `decode_jpeg` does not read: (height, width, any)."""
    is_tiff = encoded.startswith(TIFF_STARTS)
    count, description = tags_of_tiff(encoded) if is_tiff else (0, "")
    has_pages = (count, channels) == (1, 3) and PAGES.search(description) is not None
    if encoded.startswith(NPY) or has_pages or (is_tiff and channels not in COLORED):
        return decode_array(encoded, channels)
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            is_jpeg = image.format in ("JPEG", "MPO")
            check_size(image.height, image.width, shrink=JPEG_SHRINK if is_jpeg else 1)
            if image.height * image.width > MAX_PIXELS:
                image.draft(None, (image.width // JPEG_SHRINK, image.height // JPEG_SHRINK))
            # Of 16-bit colors Pillow would keep 8 bits. Those of PPM have a highest value.
            codec, _, _, details = image.tile[0] if image.tile else ("", (), 0, ())
            is_deep = details[1] > 255 if codec == "ppm" else ";16" in str(image.tile)
            if bits == 8 or image.mode.startswith("I") or not is_deep:
                return image_pixels(image, channels, bits)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{str(error).partition(',')[0]}: {FOR_LARGE}") from error
    except UnidentifiedImageError:
        if not is_tiff:
            raise
        if count not in (0, channels):
            raise wrong_channels(count, channels) from None
        if bits == 8:
            raise
    return decode_array(encoded, channels)


def decode_array(encoded: bytes, channels: int) -> np.ndarray:
    """The pixels of an array file, or of a TIFF file that Pillow does not read, by a tool."""
    if not encoded.startswith((NPY, *TIFF_STARTS)):
        raise ValueError("of its 16-bit colors only 8 bits can be read: save it as TIFF or .npy")
    if (read_array := function("decoder", "read_array")) is None:
        raise UserError(
            "a TIFF file of such channels, or an array, needs a tool: pretuned add tiff"
        )
    return read_array(encoded, channels, check_size)


def tags_of_tiff(encoded: bytes) -> tuple[int, str]:
    """The channels of a TIFF file, and what it says of itself; 0 if it is damaged."""
    try:
        tags = TiffImagePlugin.ImageFileDirectory_v2(encoded[:8])
        file = io.BytesIO(encoded)
        file.seek(tags.next)
        tags.load(file)
        count = int(tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 0))
        return count, str(tags.get(TiffImagePlugin.IMAGEDESCRIPTION, ""))
    except Exception:  # Pillow raises many kinds
        return 0, ""


def decode_jpeg(encoded: bytes, channels: int = 3) -> np.ndarray | None:
    """The pixels of an undamaged color or gray JPEG, upright, in color or gray; None for others.

    simplejpeg, where there is one, gives the same colors as Pillow in about half of the time.
    """
    if simplejpeg is None or channels not in COLORED or (metadata := metadata_of(encoded)) is None:
        return None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(encoded)
        if colors not in ("Gray", "YCbCr", "RGB"):
            return None
        check_size(height, width, shrink=JPEG_SHRINK)
        shrink = JPEG_SHRINK if height * width > MAX_PIXELS else 1
        least = [-(-side // shrink) for side in (height, width)]
        kind = "RGB" if channels == 3 else "GRAY"
        pixels = simplejpeg.decode_jpeg(encoded, kind, min_height=least[0], min_width=least[1])
    except ValueError:  # damaged or too large: Pillow accepts it, or says why not
        return None
    about = Image.Image()
    about.info = metadata
    return upright(pixels, orientation_of(about) if metadata else 1)


def metadata_of(jpeg: bytes) -> dict[str, bytes] | None:
    """The EXIF and XMP data of a JPEG as Pillow's `info` has them; None if it is damaged.

    They may follow other segments, and these may contain anything: thumbnails, with markers of
    their own, or text.
    """
    found = {}
    place = 2
    end = len(jpeg) - 4
    while place < end and jpeg[place] == FILL:
        marker = jpeg[place + 1]
        if marker == SCAN:
            return found
        if marker in WITHOUT_LENGTH or marker == FILL:
            place += 1 if marker == FILL else 2
            continue
        start = place + 4
        place = place + 2 + max(2, (jpeg[place + 2] << 8) + jpeg[place + 3])
        if marker != APP1:
            continue
        if jpeg.startswith(METADATA["exif"], start, place):  # split, if it is long
            whole = found.get("exif")
            found["exif"] = jpeg[start:place] if whole is None else whole + jpeg[start + 6 : place]
        elif jpeg.startswith(METADATA["xmp"], start, place):
            found["xmp"] = jpeg[start + len(METADATA["xmp"]) : place]
    return None


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels turned and mirrored as their EXIF orientation says."""
    if orientation == 1:
        return pixels
    if orientation in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 6, 7):
        pixels = pixels[::-1]
    return (pixels.swapaxes(0, 1) if orientation >= 5 else pixels).copy()


def orientation_of(image: Image.Image) -> int:
    """The orientation that Pillow finds for an image, 2 to 8; 1, upright, if none or damaged."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
        return orientation if orientation in range(2, 9) else 1
    except Exception:  # Pillow raises many kinds
        return 1


def check_size(height: int, width: int, channels: int = 3, shrink: int = 1) -> None:
    """Raise ValueError for an image that is too large, before its pixels are decoded."""
    most = MAX_PIXELS * shrink**2 * 3 // max(3, channels)
    if width * height > most:
        raise ValueError(f"{width} x {height} pixels, more than {most:,}: {FOR_LARGE}")


def image_pixels(image: Image.Image, channels: int = 3, bits: int = 8) -> np.ndarray:
    """Any image, upright: (height, width, any) uint8; or uint16, if it is gray and to have 16 bits.

    `convert` alone makes 16-bit gray white and shows hidden colors.
    """
    image.load()  # some formats have their EXIF data last; a TIFF is upright by now
    orientation = orientation_of(image) if image.format != "TIFF" else 1
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 bits per channel")
    if image.mode.startswith("I"):
        gray = image.convert("I")
        lowest, highest = gray.getextrema()
        if lowest < 0 or highest >= 2**16:
            raise ValueError("its pixels are numbers of 32 bits; save it with 8 bits per channel")
        if bits == 16:
            return upright(np.array(gray, dtype=np.uint16)[:, :, None], orientation)
        scale = 1 / 256 if image.mode != "I" or image.format == "PPM" or highest > 255 else 1
        image = gray.point(lambda value: value * scale).convert("L")
    if channels in COLORED:
        if image.has_transparency_data:
            image = image.convert("RGBA")
            if image.getbbox():  # an alpha channel of zeros is none: some programs leave it so
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if channels == 3 else "L")
    pixels = np.array(image)
    return upright(pixels if pixels.ndim == 3 else pixels[:, :, None], orientation)
