"""A zoo of image files: each is read with the right pixels, or refused with a reason, and at once.

`FUZZED_IMAGES=2000 python -m pytest tests/test_images.py` damages more of them.
"""

import io
import os
import random
import re
import resource
import struct
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import read_image
from PIL import Image, ImageOps, PngImagePlugin

from image_classifier.data import decode
from image_classifier.data.decode import (
    MAX_PIXELS,
    check_size,
)

FUZZED = int(os.environ.get("FUZZED_IMAGES", "200"))
SECONDS, PEAK_BYTES = 0.2, 200e6  # that a file may take
HEIGHT, WIDTH = 24, 40
COLORS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]  # of the quarters, by rows
GRAYS = [(76,) * 3, (150,) * 3, (29,) * 3, (226,) * 3]  # the same in ITU-R 601 luma
WHITE = (255, 255, 255)
NO_IMAGE = "not a JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM file"


@pytest.fixture(autouse=True)
def as_users_see_it(recwarn):
    """Pillow's warnings are silenced, as they are outside of pytest: none comes."""
    decode.silence_pillow()
    yield
    assert not recwarn


def quarters(*colors):
    """A picture of four rectangles, each of another color."""
    pixels = np.array(colors, dtype=np.uint8).reshape(2, 2, -1).squeeze()
    return Image.fromarray(pixels).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)


RGB = quarters(*COLORS)
GRAY16 = np.asarray(RGB.convert("L")).astype(np.uint16) * 256 + 77
ALPHA = quarters((0,), (128,), (255,), (255,))
LA = Image.merge("LA", (RGB.convert("L"), ALPHA))
RGBA = Image.merge("RGBA", (*RGB.split(), ALPHA))
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", RGB.size)], "lossless": True}


def saved(image, form, **options):
    """An image in a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def claims(jpeg, height, width):
    """A JPEG with another size in its header."""
    place = jpeg.index(b"\xff\xc0")
    return jpeg[: place + 5] + struct.pack(">HH", height, width) + jpeg[place + 9 :]


def bmp(alpha):
    """A BMP with a mask for alpha, as Windows and Photoshop write it."""
    pixels = np.dstack((np.asarray(RGB)[..., ::-1], np.full((HEIGHT, WIDTH), alpha, np.uint8)))
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    head = struct.pack("<IiiHHIIiiII", 108, WIDTH, HEIGHT, 1, 32, 3, pixels.size, 0, 0, 0, 0)
    head = (head + masks).ljust(108, b"\0")
    file = b"BM" + struct.pack("<IHHI", 122 + pixels.size, 0, 0, 122)
    return file + head + pixels[::-1].tobytes()


JPEG, CMYK = saved(RGB, "JPEG", quality=95, subsampling=0), saved(RGB.convert("CMYK"), "JPEG")
PROGRESSIVE = saved(RGB, "JPEG", quality=95, progressive=True)
GARBLED = JPEG[:2] + b"\xff\xe1\0\x12Exif\0\0MMnonsense" + JPEG[2:]
PALETTE = RGB.quantize(8)
UNUSED = Image.new("L", RGB.size)  # alpha that a program did not fill
KEYED, CLEAR = [WHITE, *COLORS[1:]], [WHITE, (127, 255, 127), *COLORS[2:]]
# By name: the file, and the colors of its quarters or the reason why it is refused.
ZOO = {
    "baseline.jpg": (JPEG, COLORS),
    "progressive.jpg": (PROGRESSIVE, COLORS),
    "gray.jpg": (saved(RGB.convert("L"), "JPEG", quality=95), GRAYS),
    "cmyk of Adobe.jpg": (saved(RGB.convert("CMYK"), "JPEG", quality=95), COLORS),
    "mpo.jpg": (saved(RGB, "MPO", quality=95, **FRAMES), COLORS),
    "exif garbled.jpg": (GARBLED, COLORS),
    "in truth a png.jpg": (saved(RGB, "PNG"), COLORS),
    "gray.png": (saved(RGB.convert("L"), "PNG"), GRAYS),
    "gray 16.png": (saved(Image.fromarray(GRAY16), "PNG"), GRAYS),
    "palette.png": (saved(PALETTE, "PNG"), COLORS),
    "palette and key.png": (saved(PALETTE, "PNG", transparency=PALETTE.getpixel((0, 0))), KEYED),
    "gray and alpha.png": (saved(LA, "PNG"), [WHITE, (202,) * 3, *GRAYS[2:]]),
    "rgba.png": (saved(RGBA, "PNG"), CLEAR),
    "alpha of zeros.png": (saved(Image.merge("RGBA", (*RGB.split(), UNUSED)), "PNG"), COLORS),
    "gray and zeros.png": (saved(Image.merge("LA", (RGB.convert("L"), UNUSED)), "PNG"), GRAYS),
    "alpha of zeros.bmp": (bmp(0), COLORS),
    "alpha.bmp": (bmp(255), COLORS),
    "key.png": (saved(RGB, "PNG", transparency=COLORS[0]), KEYED),
    "animated.png": (saved(RGB, "PNG", **FRAMES), COLORS),
    "one column.png": (saved(Image.new("RGB", (1, 60_000), "red"), "PNG"), [COLORS[0]] * 2),
    "animated.gif": (saved(RGB, "GIF", **FRAMES), COLORS),
    "animated.webp": (saved(RGB, "WEBP", **FRAMES), COLORS),
    "plain.bmp": (saved(RGB, "BMP"), COLORS),
    "cmyk.tif": (saved(RGB.convert("CMYK"), "TIFF"), COLORS),
    "gray 16.tif": (saved(Image.fromarray(GRAY16), "TIFF"), GRAYS),
    "float.tif": (saved(RGB.convert("F"), "TIFF"), "floating-point"),
    "gray 32.tif": (saved(Image.fromarray(GRAY16.astype(np.int32) * 99), "TIFF"), "of 32 bits"),
    "nothing.jpg": (b"", NO_IMAGE),
    "new.avif": (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(64), NO_IMAGE),
    "cut.jpg": (JPEG[: len(JPEG) * 2 // 3], "truncated"),
    "cut.png": (saved(RGB, "PNG")[:-60], "truncated|broken|Truncated"),
    "bomb.jpg": (claims(JPEG, 65_500, 65_500), "exceeds limit .* pixels: shrink it"),
    "bomb for Pillow.jpg": (claims(CMYK, 65_500, 65_500), "exceeds limit|65500 x 65500"),
    "large.jpg": (claims(CMYK, 16_100, 16_100), "exceeds limit .* pixels: shrink it"),
    "bomb.gif": (b"GIF89a\xff\xff\xff\xff" + saved(RGB, "GIF")[10:], "pixels"),
    "warned of by Pillow.gif": (
        b"GIF89a" + struct.pack("<HH", 11_500, 11_500) + saved(RGB, "GIF")[10:],
        "11500 x 11500 pixels, more than 64,000,000: shrink it",
    ),
    "missing.jpg": (lambda _: None, "No such file"),
    "folder.jpg": (Path.mkdir, "Is a directory"),
    "pipe.jpg": (os.mkfifo, "not a plain file"),
    "loop.jpg": (lambda path: path.symlink_to(path), "symbolic links"),
    "new\nline \udcff.jpg": (b"no image", NO_IMAGE),
}


def read(path):
    """The pixels of a file, which may neither take long nor much memory."""
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        return read_image(path).numpy()
    finally:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown * (1 if sys.platform == "darwin" else 1024) < PEAK_BYTES
        assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("name", ZOO)
def test_a_file_is_read_right_or_refused_with_its_path_and_the_reason(name, tmp_path):
    content, expected = ZOO[name]
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(content)
    if isinstance(expected, str):
        with pytest.raises(decode.BadImageError) as error:
            read(path)
        said = str(error.value)
        shown = re.escape(ascii(name)[1:-1])
        assert re.match(f"cannot read image '.*{shown}': .*({expected})", said)
        assert said.isascii()
        assert said.isprintable()
        return
    pixels = read(path)
    assert (pixels.shape[2], pixels.dtype) == (3, np.uint8)
    rows, columns = (slice(side // 4, None, side // 2 or 1) for side in pixels.shape[:2])
    found = pixels[rows, columns].reshape(-1, 3)  # the middle of each quarter
    assert np.abs(found - np.array(expected)).max() <= 8


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("image", [RGB, RGB.resize((1, HEIGHT))], ids=("quarters", "column"))
def test_a_turned_image_is_set_upright_as_by_pillow(form, image, tmp_path):
    path = tmp_path / "turned"
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path.write_bytes(saved(image, form, exif=exif, quality=95, lossless=True))
        with Image.open(path) as lying:
            expected = np.asarray(ImageOps.exif_transpose(lying))
        pixels = read(path)
        assert np.array_equal(pixels, expected), orientation
        assert (pixels.shape[0] == HEIGHT) == (orientation not in (5, 6, 7, 8))
        if form == "JPEG" and find_spec("simplejpeg"):
            assert np.array_equal(decode.decode_jpeg(path.read_bytes()), expected)
    assert decode.decode_jpeg(CMYK) is None  # so Pillow's


def test_pillow_decodes_the_same_where_there_is_no_simplejpeg(tmp_path, monkeypatch):
    path = tmp_path / "x.jpg"
    path.write_bytes(saved(RGB, "JPEG", exif=exif(6)))
    pixels = read(path)
    monkeypatch.setattr(decode, "simplejpeg", None)
    assert decode.decode_jpeg(path.read_bytes()) is None
    assert np.array_equal(read(path), pixels)


def segment(marker, content):
    """A segment of a JPEG."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def exif(orientation, order="<", kind=3):
    """EXIF data; of `kind` 3, SHORT, or 4, LONG."""
    head = b"Exif\0\0" + (b"II*\0" if order == "<" else b"MM\0*")
    value = struct.pack(order + ("HH" if kind == 3 else "I"), orientation, *[0] * (kind == 3))
    return head + struct.pack(f"{order}IHHHI", 8, 1, 0x112, kind, 1) + value + bytes(4)


def xmp(text):
    """XMP data."""
    return b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta>" + text + b"</x:xmpmeta>"


def segments_of(jpeg):
    """The segments before the pixels, and the rest."""
    found, place = [], 2
    while jpeg[place + 1] != 0xDA:
        stop = place + 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
        found.append(jpeg[place:stop])
        place = stop
    return found, jpeg[place:]


def with_segments(jpeg, chance):
    """A JPEG with other segments, as cameras and programs write them, in any order."""
    turn, other = chance.randrange(10), chance.randrange(1, 9)
    small = saved(Image.new("RGB", (8, 8), "blue"), "JPEG", exif=exif(other))
    fourfold = b'<rdf tiff:Orientation="%d"/>' % other
    kinds = [
        segment(0xE0, b"JFXX\0\x10" + small),
        segment(0xED, b"Photoshop 3.0\0008BIM\4\x0c\0\0" + struct.pack(">I", len(small)) + small),
        segment(0xFE, b"\xff\xda"),
        segment(0xFE, b"note " + exif(other)),
        segment(0xE2, b"ICC_PROFILE\0\1\1" + exif(other)),
        segment(0xE1, xmp(b"Exif\0\0II*\0")),
        segment(0xE1, xmp(fourfold)),
        segment(0xE1, b"Exif"),
        segment(0xE1, exif(turn)),
        segment(0xE1, exif(turn, ">")),
        segment(0xE1, exif(turn, ">", 4)),
        segment(0xE1, exif(turn)[:20]) + segment(0xE1, b"Exif\0\0" + exif(turn)[20:]),  # split
        segment(0xE1, exif(turn)[: chance.randrange(32)]),
        segment(0xE5, b"")[:2] + b"\0\0",  # shorter than its length, 2
        b"\xff\xff\xff" + segment(0xE4, b"\xff\xe1"),  # bytes that fill
        b"\xff\xd3",  # a marker alone
    ]
    found, pixels = segments_of(jpeg)
    for more in chance.sample(kinds, chance.randrange(1, 7)):
        found.insert(chance.randrange(len(found) + 1), more)
    return jpeg[:2] + b"".join(found) + pixels


def test_a_jpeg_is_upright_wherever_its_orientation_is():
    pytest.importorskip("simplejpeg")
    chance, shapes = random.Random(0), set()
    for number in range(FUZZED):
        content = with_segments(JPEG if number % 2 else PROGRESSIVE, chance)
        fast = decode.decode_jpeg(content)
        assert np.array_equal(fast, decode.decode_other(content, 3, 8)), number
        with Image.open(io.BytesIO(content)) as lying:
            try:
                expected = ImageOps.exif_transpose(lying)
            except Exception:  # damaged EXIF: it stays as it is
                expected = lying
            assert np.array_equal(fast, np.asarray(expected)), number
        shapes.add(fast.shape)
    assert shapes == {(HEIGHT, WIDTH, 3), (WIDTH, HEIGHT, 3)}


def test_an_orientation_is_neither_lost_nor_invented():
    pytest.importorskip("simplejpeg")
    thumbnail = segment(0xED, b"Photoshop 3.0\0" + JPEG)
    for before, turned in (
        (thumbnail + segment(0xE1, exif(6)), True),
        (segment(0xFE, b"\xff\xda") + segment(0xE1, exif(6)), True),
        (segment(0xFE, b"note " + exif(6)), False),
    ):
        pixels = decode.decode_jpeg(JPEG[:2] + before + JPEG[2:])
        assert (pixels.shape[0] == WIDTH) == turned


def test_a_png_of_imagemagick_is_upright(tmp_path):
    about = PngImagePlugin.PngInfo()
    about.add_text("Raw profile type exif", f"\nexif\n{32:8}\n{exif(6).hex()}\n", zip=True)
    path = tmp_path / "x.png"
    path.write_bytes(saved(RGB, "PNG", pnginfo=about))
    with Image.open(path) as lying:
        assert np.array_equal(read(path), np.asarray(ImageOps.exif_transpose(lying)))
    assert read(path).shape[:2] == (WIDTH, HEIGHT)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_of_too_many_pixels_is_read_at_half_its_sides(mode, tmp_path, monkeypatch):
    path = tmp_path / "x.jpg"
    path.write_bytes(saved(RGB.convert(mode), "JPEG", quality=95, exif=exif(6)))
    whole = read(path)
    monkeypatch.setattr(decode, "MAX_PIXELS", HEIGHT * WIDTH // 4)
    half = read(path)
    assert np.array_equal(half, decode.decode_other(path.read_bytes(), 3, 8))
    assert half.shape == (WIDTH // 2, HEIGHT // 2, 3)
    corners = np.s_[[1, 1, -2, -2], [1, -2, 1, -2]]
    assert np.abs(half[corners].astype(int) - whole[corners]).max() <= 8
    monkeypatch.setattr(decode, "MAX_PIXELS", HEIGHT * WIDTH // 4 - 1)
    with pytest.raises(decode.BadImageError, match=r"40 x 24 pixels, more than 956: shrink it"):
        read(path)


def test_a_dark_image_of_16_bits_keeps_its_upper_8_as_a_bright_one_does(tmp_path):
    (tmp_path / "x.png").write_bytes(saved(Image.fromarray(GRAY16 // 512), "PNG"))
    assert not read(tmp_path / "x.png").any()


def test_damaged_files_are_read_or_refused_alike_by_both_decoders(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 1_000_000)  # of those that damage makes large
    chance, path = random.Random(0), tmp_path / "x"
    sound = [content for content, expected in ZOO.values() if isinstance(expected, list)]
    reasons = []
    for number in range(FUZZED):
        content = bytearray(sound[number % len(sound)])
        area = min(len(content), chance.choice((64, len(content))))  # headers matter most
        for _ in range(chance.choice((1, 3, 10))):
            content[chance.randrange(area)] = chance.randrange(256)
        if number % 5 == 0:
            del content[chance.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            pixels = read(path)
            assert pixels.shape[2] == 3
            with monkeypatch.context() as patch:
                patch.setattr(decode, "decode_jpeg", lambda *_: None)
                assert np.array_equal(read_image(path).numpy(), pixels)
        except decode.BadImageError as error:
            reasons.append(str(error))
    assert FUZZED / 3 < len(reasons) < FUZZED
    assert all(reason.isprintable() for reason in reasons)


def test_images_of_many_channels_may_have_fewer_pixels():
    check_size(1, MAX_PIXELS)
    check_size(1, MAX_PIXELS // 4, channels=12)
    with pytest.raises(ValueError, match="more than 16,000,000"):
        check_size(1, MAX_PIXELS // 4 + 1, channels=12)
