"""Arrays, and TIFF files of many channels: as they were saved, or refused in a line."""

import io
import os
import re
import struct
import sys
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from conftest import changed, on_deep, read_image, write_deep
from PIL import Image

from image_classifier.data import (
    BadImageError,
    decode,
    open_dataset,
)
from image_classifier.errors import UserError
from image_classifier.runtime.platform import install_command
from image_classifier.tools.tiff import decoder

NOISE = np.random.default_rng(0)
DEEP = NOISE.integers(65536, size=(12, 9, 5), dtype=np.uint16)
RGB16 = NOISE.integers(65536, size=(24, 40, 3), dtype=np.uint16)


def tiff(array, **options):
    """Any array in a TIFF file, by the library that reads it."""
    library, file = pytest.importorskip("tifffile"), io.BytesIO()
    library.imwrite(file, array, planarconfig="contig", photometric="minisblack", **options)
    return file.getvalue()


def npy(array):
    """An array in a file of NumPy's."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def bomb():
    """A TIFF file of a few pixels, whose one part unpacks to a million bytes."""
    sound, more = tiff(DEEP, compression="zlib"), zlib.compress(bytes(10**6))
    page = sys.modules["tifffile"].TiffFile(io.BytesIO(sound)).pages[0]
    place, start = page.tags["StripByteCounts"].valueoffset, page.dataoffsets[0]
    return sound[:place] + struct.pack("<I", len(more)) + sound[place + 4 : start] + more


READ = {
    "five": (lambda: tiff(DEEP), DEEP),
    "packed": (lambda: tiff(DEEP, compression="zlib"), DEEP),
    "five pages": (lambda: tiff(DEEP.transpose(2, 0, 1)), DEEP),
    "color": (lambda: tiff(RGB16), RGB16),
    "array": (lambda: npy(DEEP), DEEP),
    "big-endian array": (lambda: npy(DEEP.astype(">u2")), DEEP),
    "array of CHW": (lambda: npy(DEEP.transpose(2, 0, 1)), DEEP),
    "array of a plane": (lambda: npy(DEEP[:, :, 0]), DEEP[:, :, :1]),
}


class Attack:
    """What would run code where pickles are read."""

    def __reduce__(self):
        return os._exit, (1,)


HUGE = npy(np.zeros((1, 1), np.uint8)).replace(b"(1, 1), }", b"(9000, 9000), }")


@pytest.mark.parametrize("name", READ)
def test_a_file_has_the_pixels_that_were_saved(name, tmp_path):
    file, expected = READ[name]
    (tmp_path / "x.tif").write_bytes(file())
    pixels = read_image(tmp_path / "x.tif", expected.shape[2], 16).numpy()
    assert pixels.dtype == expected.dtype
    assert np.array_equal(pixels, expected)


def test_an_array_becomes_what_is_asked_for(tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(npy(DEEP))
    assert np.array_equal(read_image(path, 5, 8), DEEP >> 8)
    color = (RGB16 >> 8).astype(np.uint8)
    path.write_bytes(npy(color))
    assert np.array_equal(read_image(path, 1, 8)[:, :, 0], Image.fromarray(color).convert("L"))


REFUSED = {
    "five": (lambda: tiff(DEEP), 3, "it has 5 channels, not 3: --data.channels 5"),
    # In the words of imagecodecs, if that is installed.
    "bomb": (bomb, 5, "(a part of it unpacks to more than its size|.*INSUFFICIENT_SPACE)"),
    "cut": (lambda: tiff(DEEP)[:99], 5, ""),
    "floats": (lambda: tiff(DEEP.astype(np.float32)), 5, "its numbers are float32"),
    "pickle": (lambda: npy(np.array([Attack()])), 3, "its numbers are object: save it as uint8"),
    "array of floats": (lambda: npy(DEEP.astype(np.float32)), 5, "its numbers are float32"),
    "array of five": (lambda: npy(DEEP), 3, "it has 5 channels, not 3: --data.channels 5"),
    "plane": (lambda: npy(DEEP[:, :, 0]), 5, "it has 1 channel, not 5: --data.channels 1"),
    "four dimensions": (lambda: npy(DEEP[None]), 5, "an array of 4 dimensions is no image"),
    "empty": (lambda: npy(DEEP[:0]), 5, "it has no pixels"),
    "newer format": (
        lambda: npy(DEEP).replace(b"NUMPY\x01", b"NUMPY\x03"),
        5,
        r"NumPy's format \(3, 0\) is not read",
    ),
    "cut array": (lambda: npy(DEEP)[:-1], 5, "EOF: reading array data"),
    "huge": (lambda: HUGE, 1, "9000 x 9000 pixels, more than"),
    "cut and huge": (lambda: HUGE.replace(b"9000, 9000", b"7000, 7000"), 1, "it is truncated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_such_image_is_refused_in_a_line(name, tmp_path):
    file, channels, message = REFUSED[name]
    (tmp_path / "x.tif").write_bytes(file())
    with pytest.raises(BadImageError, match=f"x.tif': .*{message}") as error:
        read_image(tmp_path / "x.tif", channels, 16)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_named_and_no_image_is_skipped_for_it(tmp_path, monkeypatch):
    (tmp_path / "x.tif").write_bytes(b"II*\0" + bytes(99))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tifffile", None)
        with pytest.raises(UserError, match=re.escape(install_command("tifffile"))) as no_library:
            read_image(tmp_path / "x.tif", 5)
    monkeypatch.setattr(decode, "function", lambda *_: None)
    with pytest.raises(UserError, match=r"x\.tif': .* needs a tool: pretuned add tiff") as no_tool:
        read_image(tmp_path / "x.tif", 5)
    assert not {no_library.type, no_tool.type} & {BadImageError}


def test_a_compression_that_needs_a_library_is_told_with_what_installs_it(monkeypatch):
    pytest.importorskip("tifffile")
    file = io.BytesIO()
    Image.new("RGB", (9, 8)).save(file, "TIFF", compression="tiff_lzw")
    monkeypatch.setattr(decoder, "find_spec", lambda _: None)
    said = re.escape(f"needs a library: {install_command('imagecodecs')}")
    with pytest.raises(ValueError, match=said):
        decoder.read_tiff(file.getvalue(), lambda *_: None)


OME = """<?xml version="1.0" encoding="UTF-8"?>
<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:a">
<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint16"
SizeX="9" SizeY="12" SizeC="2" SizeZ="1" SizeT="1">
<TiffData FirstC="0" IFD="0"><UUID FileName="a.ome.tif">urn:uuid:a</UUID></TiffData>
<TiffData FirstC="1" IFD="0"><UUID FileName="b.ome.tif">urn:uuid:b</UUID></TiffData>
</Pixels></Image></OME>"""


def test_no_other_file_that_a_tiff_file_names_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ba":
        own = OME.replace('UUID="urn:uuid:a"', f'UUID="urn:uuid:{name}"')
        content = tiff(DEEP[:, :, 0], description=own, metadata=None)
        (tmp_path / f"{name}.ome.tif").write_bytes(content)
    found = decoder.read_tiff(content, lambda *_: None)
    assert np.array_equal(np.squeeze(found), DEEP[:, :, 0])


def test_files_are_the_images_that_arrays_are(config, satellite, tmp_path):
    library = pytest.importorskip("tifffile")
    save = partial(library.imwrite, planarconfig="contig", photometric="minisblack")
    tiffs = write_deep(tmp_path / "tiffs", 5, lambda path, pixels: save(f"{path}.tif", pixels))
    config = on_deep(config, satellite, 5)
    of_arrays = open_dataset(config.data, "val")
    of_tiffs = open_dataset(changed(config, data__root=str(tiffs)).data, "val")
    assert torch.equal(of_arrays.labels, of_tiffs.labels)
    for index in range(8):
        assert torch.equal(of_arrays.read(index), of_tiffs.read(index))


@pytest.mark.parametrize("kind", ["imagej", "ome"])
@pytest.mark.parametrize("bits", [8, 16])
def test_channels_that_are_pages_are_three_channels(kind, bits):
    library = pytest.importorskip("tifffile")
    pages = np.arange(1, 1 + 3 * 20 * 24).reshape(3, 20, 24).astype(f"uint{bits}")
    how = {kind: True, "metadata": {"axes": "CYX"}, "photometric": "minisblack"}
    file = io.BytesIO()
    library.imwrite(file, pages, **how)
    found = decode.decode_image(file.getvalue(), 3, bits)
    assert np.array_equal(found, pages.transpose(1, 2, 0))
