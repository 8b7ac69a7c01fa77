"""Image files to pixels, the same way in training, evaluation and prediction."""

import os
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from .config import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 64_000_000  # a file of a few kB can claim far more: a decompression bomb
ORIENTATION = 0x0112  # EXIF's tag


def read_image(path: Path) -> Tensor:
    """The pixels of an image file: (height, width, 3) uint8, upright, transparency over white.

    Of an animation it is the first frame. 16-bit grey keeps its upper 8 bits.

    Raises:
        UserError: if the file is missing, damaged, of another format, or suspiciously large.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                size = f"{image.width} x {image.height} pixels"
                raise ValueError(f"{size}, more than {MAX_PIXELS:,}")
            rgb = to_rgb(image)
    except Exception as error:  # Pillow's decoders raise errors of many kinds on damaged files
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if "cannot identify image file" in reason:
            reason = f"not a {', '.join(FORMATS)} file"
        raise UserError(f"cannot read image {os.fspath(path)!a}: {reason}") from error
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any image as upright RGB; `convert` alone makes 16-bit grey white and shows hidden colours.

    Raises:
        ValueError: for floating-point pixels, whose range nobody knows.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 bits per channel")
    if image.mode.startswith("I"):
        grey = image.convert("I")
        highest = grey.getextrema()[1]
        image = grey.point(lambda value: value * (1 / 256 if highest > 255 else 1)).convert("L")
    has_exif = "exif" in image.info or image.format == "TIFF"  # to parse it takes time
    if has_exif and image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        image.load()
        return image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def image_size(path: Path) -> tuple[int, int] | None:
    """(height, width) as the file's header has them, or None if it can't be read."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            return image.height, image.width
    except Exception:  # whatever is wrong, `read_image` will say it
        return None


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """(height, width, 3) uint8 scaled to another size, bilinear and antialiased like Pillow's."""
    if pixels.shape[:2] == (height, width):
        return pixels
    batch = pixels.permute(2, 0, 1)[None]  # channels_last: torch has a vectorised kernel for it
    scaled = interpolate(batch, (height, width), mode="bilinear", antialias=True)
    return scaled[0].permute(1, 2, 0)


def centre_crop(pixels: Tensor, size: int) -> Tensor:
    """The middle square of an image, scaled so that its side is `size`: (size, size, 3) uint8."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return resize(pixels[top : top + side, left : left + side], size, size)


def random_boxes(draws: Tensor, height: int, width: int, min_area: float) -> Tensor:
    """Boxes of random area and shape at random places, for random resized crops.

    `draws` is (count, 4) from 0 to 1. Returns (count, 4) float32: top, left, height, width in
    pixels. The area is uniform from `min_area` to 1 of the image, the aspect ratio log-uniform from
    3/4 to 4/3 (https://arxiv.org/abs/1409.4842); a box too long for the image is cut to fit it.
    """
    area = height * width * (min_area + (1 - min_area) * draws[:, 0])
    aspect = (4 / 3) ** (2 * draws[:, 1] - 1)  # width / height
    heights = (area / aspect).sqrt().clamp(max=height)
    widths = (area * aspect).sqrt().clamp(max=width)
    return torch.stack(
        (draws[:, 2] * (height - heights), draws[:, 3] * (width - widths), heights, widths), dim=1
    )


def crop(pixels: Tensor, box: Tensor, size: int) -> Tensor:
    """The part of an image in `box` (top, left, height, width), scaled: (size, size, 3) uint8."""
    top, left, height, width = (round(value) for value in box.tolist())
    part = pixels[top : top + max(1, height), left : left + max(1, width)]
    return resize(part, size, size)
