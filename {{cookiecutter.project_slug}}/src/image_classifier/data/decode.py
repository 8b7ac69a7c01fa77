"""Image files to pixels, the same way in training, evaluation and prediction."""

import errno
import io
import logging
import math
import os
import warnings
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from ..config import DataConfig, FaultError, UserError
from ..runtime.files import open_plain

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 64_000_000  # a file of a few kB can claim far more: a decompression bomb
ORIENTATION = 0x0112  # EXIF's tag
# What sets an image upright, by its orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
DARK = 64  # of 255: an image that stays below looks black
TRIES = 10  # at a random box that fits, as many as torchvision makes
BOX_DRAWS = 2 + 2 * TRIES  # where it is, and area and aspect ratio of each try

# Markers of JPEG (https://www.w3.org/Graphics/JPEG/itu-t81.pdf, table B.1).
JPEG_START, JPEG_EXIF, JPEG_SCAN = b"\xff\xd8\xff", 0xE1, 0xDA
EXIF_START = b"Exif\0\0"
JPEG_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive

# What a system may be short of for a moment.
LACKS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class BadImageError(UserError):
    """An image that can't be read: its file, and in `reason` what is wrong with it."""

    def __init__(self, path: Path, reason: str) -> None:
        """Of the file at `path`."""
        super().__init__(f"cannot read image {os.fspath(path)!a}: {reason}")
        self.reason = reason


def silence_pillow() -> None:
    """Let Pillow not warn: what it warns of it mends, or refuses soon after.

    Else every worker would tell it of every such image, and of a bomb before it is refused.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())


silence_pillow()


def read_image(path: Path, keep: int | None = None) -> Tensor:
    """The pixels of an image file: (height, width, 3) uint8, upright, transparency over white.

    Of an animation it is the first frame. 16-bit grey keeps its upper 8 bits. With `keep`, a JPEG
    is decoded at 1/2, 1/4 or 1/8 of its size as long as its shorter side keeps so many pixels.

    Raises:
        BadImageError: if the file is missing, damaged, of another format, or suspiciously large.
        FaultError: if the system is out of memory or of open files, which is no fault of this one.
    """
    try:
        with open_plain(path) as file:
            return decode(file.read(), keep)
    except Exception as error:  # Pillow's decoders raise errors of many kinds on damaged files
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if getattr(error, "errno", None) in LACKS:
            raise FaultError(
                f"no more images can be read: {reason}, at {os.fspath(path)!a}"
            ) from error
        if "cannot identify image file" in reason:
            reason = f"not a {', '.join(FORMATS)} file"
        raise BadImageError(path, " ".join(reason.split())) from error


def decode(encoded: bytes, keep: int | None = None) -> Tensor:
    """`read_image` of what a file holds.

    Raises:
        Exception: of whatever kind Pillow's decoders have for what is wrong.
    """
    pixels = decode_jpeg(encoded, keep) if encoded.startswith(JPEG_START) else None
    if pixels is not None:
        return torch.from_numpy(pixels)
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        check_size(image.height, image.width)
        rgb = to_rgb(image)
    pixels = np.frombuffer(bytearray(rgb.tobytes()), dtype=np.uint8)
    return torch.from_numpy(pixels).view(rgb.height, rgb.width, 3)


def decode_jpeg(encoded: bytes, keep: int | None = None) -> np.ndarray | None:
    """The pixels of a sound colour or grey JPEG, upright; None for any other, which is Pillow's.

    libjpeg-turbo without Pillow around it: the same pixels in about half of the time.

    Raises:
        ValueError: if it is suspiciously large.
    """
    frame = jpeg_frame(encoded)
    if frame is None:
        return None
    height, width, orientation = frame
    check_size(height, width)
    try:
        pixels = unpack_jpeg(encoded, height, width, keep)
    except ValueError:  # damaged, even if only a little: Pillow says how, or takes it
        return None
    if orientation in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 6, 7):
        pixels = pixels[::-1]
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    return np.ascontiguousarray(pixels)


def unpack_jpeg(
    encoded: bytes | np.ndarray, height: int, width: int, keep: int | None
) -> np.ndarray:
    """The pixels of a JPEG of a known size, as they lie in it; for `keep` see `read_image`.

    Raises:
        ValueError: if it is damaged, even if only a little.
    """
    factor = 1
    while keep and factor < 8 and min(height, width) // (2 * factor) >= keep:
        factor *= 2
    least = {} if factor == 1 else {"min_height": height // factor, "min_width": width // factor}
    return simplejpeg.decode_jpeg(encoded, "RGB", min_factor=factor, **least)


def pixels_to_keep(data: DataConfig, side: int) -> int | None:
    """What `read_image` is to keep of the shorter side for images of `side` pixels; None: all."""
    return 2 * side if data.decode == "reduced" else None


def jpeg_frame(encoded: bytes) -> tuple[int, int, int] | None:
    """Height, width and EXIF orientation (1: upright) of a JPEG with 8 bits in 1 or 3 channels.

    None if it is another, or what comes before its pixels is not in order.
    """
    place, exif = 2, b""
    while place + 10 < len(encoded) and encoded[place] == 0xFF:
        marker, length = encoded[place + 1], int.from_bytes(encoded[place + 2 : place + 4], "big")
        if marker in JPEG_FRAMES:
            bits, channels = encoded[place + 4], encoded[place + 9]
            height = int.from_bytes(encoded[place + 5 : place + 7], "big")
            width = int.from_bytes(encoded[place + 7 : place + 9], "big")
            if bits != 8 or channels not in (1, 3) or not height or not width:
                return None
            return height, width, orientation_in(exif) if exif else 1
        if marker == JPEG_EXIF and encoded[place + 4 : place + 10] == EXIF_START:
            # What is longer than a segment goes on in the next, after the same start.
            exif += encoded[place + (10 if exif else 4) : place + 2 + length]
        if marker == JPEG_SCAN:
            return None
        place += 2 + length
    return None


def orientation_in(exif: bytes) -> int:
    """How an image is to be turned by its EXIF data: from 2 to 8, or 1 if it is upright.

    Damaged data say nothing: whoever shows such an image shows it as it lies.
    """
    tags = Image.Exif()
    try:
        tags.load(exif)
        orientation = tags.get(ORIENTATION)
        return orientation if orientation in TURNS else 1
    except Exception:  # of many kinds, as for pixels
        return 1


def check_size(height: int, width: int) -> None:
    """Refuse an image that is suspiciously large before its pixels are decoded."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels, more than {MAX_PIXELS:,}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Any image as upright RGB; `convert` alone makes 16-bit grey white and shows hidden colours.

    Raises:
        ValueError: for pixels whose range nobody knows.
    """
    image.load()  # some formats have their EXIF data last; a TIFF is upright by now
    exif = image.info.get("exif") if image.format != "TIFF" else None
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 bits per channel")
    if image.mode.startswith("I"):
        grey = image.convert("I")
        lowest, highest = grey.getextrema()
        if lowest < 0 or highest >= 2**16:
            raise ValueError("its pixels are numbers of 32 bits; save it with 8 bits per channel")
        image = grey.point(lambda value: value * scale_of_grey(highest)).convert("L")
    turn = TURNS.get(orientation_in(exif)) if exif else None
    if turn is not None:
        image = image.transpose(turn)
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def scale_of_grey(highest: int) -> float:
    """What the values of a 16-bit grey image are multiplied by, if `highest` is among them."""
    return 1 / 256 if highest > 255 else 1


def highest_grey(image: Image.Image) -> int | None:
    """The highest value of a 16-bit grey image; None of any other, whose pixels are not decoded."""
    return int(image.convert("I").getextrema()[1]) if image.mode.startswith("I") else None


def highest_in_file(path: Path) -> int | None:
    """`highest_grey` of a file; None also for one that can't be read."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            check_size(image.height, image.width)
            return highest_grey(image)
    except Exception:  # whatever is wrong, `read_image` will say it
        return None


def is_dark(highest: int) -> bool:
    """Whether a 16-bit grey image with this highest value becomes all but black."""
    return highest * scale_of_grey(highest) < DARK


def image_size(path: Path) -> tuple[int, int] | None:
    """(height, width) as the file's header has them, or None if it can't be read."""
    try:
        with open_plain(path) as file, Image.open(file, formats=FORMATS) as image:
            return image.height, image.width
    except Exception:  # whatever is wrong, `read_image` will say it
        return None


def crop(
    pixels: Tensor, box: tuple[int, int, int, int], out: Tensor, mirrored: bool = False
) -> None:
    """Scale a box of an image (top, left, height, width) to fill `out`, (height, width, 3) uint8.

    Bilinear and antialiased: what Pillow makes of it, up to rounding.
    """
    top, left, height, width = box
    part = planes(pixels, top, left, height, width)
    place = planes(out, 0, 0, out.shape[0], out.shape[1])
    if mirrored:  # before it is scaled, which copies the box anyway
        part = part.flip(3)
    if part.shape == place.shape:
        place.copy_(part)
        return
    # What `interpolate(antialias=True)` calls, but into memory that is there already.
    torch._C._nn._upsample_bilinear2d_aa(part, place.shape[2:], False, None, None, out=place)


def planes(pixels: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """A box of (height, width, 3) pixels as torch's kernels want it: (1, 3, height, width).

    By one operation in place of four, as this is done for every image, twice.
    """
    row, column, channel = pixels.stride()
    start = pixels.storage_offset() + top * row + left * column
    return pixels.as_strided((1, 3, height, width), (1, channel, row, column), start)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """(height, width, 3) uint8 scaled to another size, as `crop` does."""
    scaled = torch.empty((height, width, 3), dtype=torch.uint8)
    crop(pixels, (0, 0, *pixels.shape[:2]), scaled)
    return scaled


def centre_crop(pixels: Tensor, out: Tensor) -> None:
    """Scale the middle square of an image to fill `out`, (side, side, 3) uint8."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    crop(pixels, ((height - side) // 2, (width - side) // 2, side, side), out)


def random_boxes(draws: Tensor, height: int, width: int, min_area: float) -> Tensor:
    """Boxes of random area and shape at random places, for random resized crops.

    `draws` is (count, BOX_DRAWS) from 0 to 1. Returns (count, 4) float32: top, left, height, width
    in pixels. The area is uniform from `min_area` to 1 of the image, the aspect ratio log-uniform
    from 3/4 to 4/3 (https://arxiv.org/abs/1409.4842). As everywhere, a box too long for the image
    is drawn anew, so that boxes are smaller on average than `min_area` says; the last is cut.
    """
    sides = random_sides(draws[:, 2:], min_area) * math.sqrt(height * width)
    fits = (sides[..., 0] <= height) & (sides[..., 1] <= width)  # (count, TRIES)
    fits[:, -1] = True
    first = fits.int().argmax(dim=1)
    heights, widths = sides[torch.arange(len(sides), device=sides.device), first].T
    heights, widths = heights.clamp(max=height), widths.clamp(max=width)
    return torch.stack(
        (draws[:, 0] * (height - heights), draws[:, 1] * (width - widths), heights, widths), dim=1
    )


def random_sides(draws: Tensor, min_area: float) -> Tensor:
    """Height and width of random boxes in an image of area 1, `TRIES` to choose from.

    (count, 2 * TRIES) from 0 to 1 -> (count, TRIES, 2) float32.
    """
    area = min_area + (1 - min_area) * draws[:, 0::2]
    aspect = (4 / 3) ** (2 * draws[:, 1::2] - 1)  # width / height
    return torch.stack((area / aspect, area * aspect), dim=2).sqrt()


def place_box(
    sides: list[list[float]], draws: list[float], height: int, width: int
) -> tuple[int, int, int, int]:
    """One of `random_boxes`, in whole pixels: top, left, height, width.

    `sides` is of `random_sides`, `draws` are two from 0 to 1: where in the image. In plain Python,
    as workers meet images of all sizes, one at a time.
    """
    scale = math.sqrt(height * width)
    box_height = box_width = 0.0
    for side_height, side_width in sides:
        box_height, box_width = scale * side_height, scale * side_width
        if box_height <= height and box_width <= width:
            break
    box_height = min(height, max(1, round(box_height)))
    box_width = min(width, max(1, round(box_width)))
    top, left = round(draws[0] * (height - box_height)), round(draws[1] * (width - box_width))
    return top, left, box_height, box_width
