"""`prepare --format tar`: images as they are in tar shards, which `--data.name tar` reads.

    photos.cache/tar/train-000000.tar    00000000-1.jpg, 00000000-1.cls, ...
    photos.cache/tar/classes.txt         the names of the classes, whose numbers are in `.cls`

A shard begins with a comment: its key, a digest of the state of its images' files and their labels,
and a checksum.
"""

import hashlib
import io
import json
import os
import re
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ...data import FORMATS, NPY, Source
from ...errors import UserError
from ...runtime.console import Progress, clock, say
from ...runtime.files import write_text, write_whole
from ...runtime.machine import num_cores
from .index import UNFINISHED

SHARD_BYTES = 2**27  # about; each thread holds one in memory
# By format, where they are not the same; MPO is a JPEG with others behind it.
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif"}
HEAD = 2 * tarfile.BLOCKSIZE  # the comment


def write_shards(source: Source, splits: tuple[str, ...], folder: Path) -> None:
    """Write the images of `source`, the first of `splits`, or what is missing, `train-000000.tar`.

    Bytes of files and encoded images stay; others become PNG. A split is read once it is whole.

    Raises:
        UserError: if an image can't be read, or labels are unknown or images have weights.
    """
    if source.weights is not None or (source.labels < 0).any():
        raise UserError("images with weights or unknown labels cannot be kept in tar shards")
    began = time.monotonic()
    progress = Progress(len(source))
    stats = None if source.paths is None else source.paths.stats()
    parts = torch.arange(len(source)).split(images_per_shard(source, stats))
    names = [f"{splits[0]}-{number:06}.tar" for number in range(len(parts))]
    classes = "".join(f"{name}\n" for name in source.classes)
    known = folder / "classes.txt"
    if not known.exists() or known.read_text("utf-8", "replace") != classes:  # labels are numbers
        splits += tuple(path.name.rpartition("-")[0] for path in folder.glob("*-*.tar"))
    markers = [folder / f"{split}-unfinished.tar" for split in splits]
    for marker in markers:
        marker.write_bytes(UNFINISHED)
    for path in folder.glob(f"{splits[0]}-*.tar"):
        if path.name not in (*names, markers[0].name):
            path.unlink()

    def make(name: str, part: Tensor) -> bool:
        """Write a shard, unless it is there; whether it was written."""
        key = ""
        if stats is not None:
            files = source.paths.picked(part)
            state = files.ends, source.labels[part], files.bytes, stats[part]
            content = b"".join(numbers.numpy().tobytes() for numbers in state)
            key = hashlib.blake2b(b"tar 1" + content).hexdigest()
            if is_whole(folder / name, key):
                return False
        body = tar_of(source, part)
        comment = {"comment": f"{key} {digest_of(body)}"}
        head = tarfile.TarInfo.create_pax_global_header(comment)
        write_whole(folder / name, lambda file: (file.write(head), file.write(body)))
        return True

    num_written = 0
    with ThreadPoolExecutor(1 if source.is_random else num_cores()) as pool:
        for part, is_new in zip(parts, pool.map(make, names, parts), strict=True):
            num_written += is_new
            progress.show(int(part[-1]) + 1)
    write_text(known, classes)
    markers[0].unlink()
    done = f"{num_written} of {len(parts)} shards written in {clock(time.monotonic() - began)}"
    say(f"{len(source):,} images for {splits[0]}: {done}: --data.name tar --data.root {folder}")


def images_per_shard(source: Source, stats: Tensor | None) -> int:
    """The number of images in a shard: a power of 2, so that a few more images do not change it."""
    image_bytes = source.read(0).numel() if stats is None else int(stats[:, 0].sum()) // len(source)
    return 1 << (max(1, SHARD_BYTES // max(1, image_bytes)).bit_length() - 1)


def is_whole(path: Path, key: str) -> bool:
    """Whether a shard has this key, and every byte is as it was written."""
    try:
        with path.open("rb") as file:
            with tarfile.open(fileobj=file) as shard:
                comment = shard.pax_headers.get("comment")
            file.seek(HEAD)
            return comment == f"{key} {digest_of(file.read())}"
    except (OSError, tarfile.TarError):
        return False


def digest_of(content: bytes) -> str:
    """A checksum."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def tar_of(source: Source, part: Tensor) -> bytes:
    """A tar file with the images of `source` at `part`, and their labels."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as shard:
        for index in part.tolist():
            name, image = encoded(source, index)
            suffix, label = label_of(source, index)
            for member, found in ((name, image), (f"{name.partition('.')[0]}.{suffix}", label)):
                entry = tarfile.TarInfo(member)
                entry.size = len(found)
                shard.addfile(entry, io.BytesIO(found))
    return content.getvalue()


def encoded(source: Source, index: int) -> tuple[str, bytes]:
    """The name of an image in its shard, and the image as it is stored.

    Raises:
        UserError: if it can't be read.
    """
    if source.paths is None or source.reader is not None:
        kind = source.channels, source.bits
        if kind not in ((1, 8), (1, 16), (3, 8)):
            raise UserError(f"--format tar has gray or 8-bit RGB, not {kind[0]} x {kind[1]} bits")
        file = io.BytesIO()
        Image.fromarray(source.read(index).squeeze(2).numpy()).save(file, "PNG")
        return f"{index:08}.png", file.getvalue()
    content = b""
    try:
        content = source.paths.read(index)
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            suffix = SUFFIXES.get(image.format, image.format.lower())
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = f"{error}; `check --quarantine` leaves out all such files"
        if content.startswith(NPY):
            reason = "--format tar takes no .npy files, --format raw does"
        raise UserError(f"cannot read image {source.name(index)!a}: {reason}") from error
    stem = os.fsdecode(source.paths.relative(index)).rpartition("/")[2].partition(".")[0]
    return f"{index:08}-{re.sub('[^A-Za-z0-9_-]', '_', stem)}.{suffix}", content


def label_of(source: Source, index: int) -> tuple[str, bytes]:
    """The label of an image: the suffix of its member, and what is in that."""
    label = source.labels[index]
    if label.ndim == 0:
        return "cls", b"%d" % int(label)
    return "json", json.dumps({"labels": label.eq(1).nonzero()[:, 0].tolist()}).encode()
