"""Where each image is in its shard, and its label: found once, by the headers of all members.

It is kept in `photos.cache/tar-<key>.safetensors`; the key is a digest of the shards' names, sizes
and times of change, so another index is made when one changes.
"""

import hashlib
import json
import os
import tarfile
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from ...config import DataConfig
from ...data import cache_folder, find_parts, has_suffix
from ...errors import UserError
from ...runtime.console import say
from ...runtime.files import open_tensors, write_whole
from ..dataset_formats.labels import Label
from .storage import Storage

VERSION = 3
SHARDS_TOGETHER = 16
READ_AHEAD = 2**15  # bytes of a shard elsewhere that are read at once: headers, and small images
BLOCK = tarfile.BLOCKSIZE
TAIL = 2**20  # bytes after the last member in which there should be zeros, if anything
MOST_LABEL = 2**20  # bytes of a member with a label; what is sparse may unpack to any size
PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
UNFINISHED = b"unfinished"  # in `train-unfinished.tar`, until `prepare` has written all shards

Shard = tuple[str, int, str]  # name, size in bytes, and what changes when it does


@dataclass(frozen=True)
class Index:
    """The images in some shards."""

    shards: list[Shard]
    labels: list[Label]  # the different ones
    arrays: dict[str, Tensor]  # of each image: shard, start, size, end of its name, label; names
    notes: tuple[str, ...] = ()

    def names(self, numbers: Tensor) -> Iterator[bytes]:
        """The names in their shards of the images at `numbers`, (count,) int64."""
        content = memoryview(self.arrays["names"].numpy())
        ends = self.arrays["end"]
        starts = ends[numbers - 1].where(numbers > 0, 0)
        for start, end in zip(starts.tolist(), ends[numbers].tolist(), strict=True):
            yield content[start:end].tobytes()


def open_index(storage: Storage, names: list[str], data: DataConfig) -> Index:
    """The index of the shards `names`: from the cache, or made and kept there.

    Raises:
        UserError: if a shard is damaged, or an image has no label.
    """
    with ThreadPoolExecutor(SHARDS_TOGETHER) as threads:
        described = threads.map(storage.describe, names)
        shards = [(name, *found) for name, found in zip(names, described, strict=True)]
    about = json.dumps([VERSION, storage.root, shards])
    key = hashlib.blake2b(about.encode(), digest_size=8).hexdigest()
    path = cache_folder(data) / f"tar-{key}.safetensors"
    with suppress(OSError, SafetensorError, ValueError, TypeError, KeyError):
        with open_tensors(path) as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            digest, _, labels = file.metadata()["about"].partition(" ")
        if digest == digest_of(labels, arrays):
            return Index(shards, json.loads(labels), arrays, empty_shards(shards, arrays))
    labels, arrays = make_index(storage, shards)
    text = json.dumps(labels)
    notes = empty_shards(shards, arrays)
    content = save(arrays, {"about": f"{digest_of(text, arrays)} {text}"})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(content))
    except OSError as error:
        said = f"the index of the shards is not kept in {str(path.parent)!a}: {error.strerror}"
        notes = (*notes, said)
    return Index(shards, labels, arrays, notes)


def empty_shards(shards: list[Shard], arrays: dict[str, Tensor]) -> tuple[str, ...]:
    """A note on shards without an image, if there are any: one may be a failed download."""
    counts = arrays["shard"].bincount(minlength=len(shards)).tolist()
    empty = [ascii(shards[number][0]) for number, count in enumerate(counts) if not count]
    more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
    return (f"no image in {', '.join(empty[:3])}{more}",) if empty else ()


def digest_of(labels: str, arrays: dict[str, Tensor]) -> str:
    """A checksum of an index."""
    digest = hashlib.blake2b(labels.encode(), digest_size=16)
    for name in sorted(arrays):
        digest.update(arrays[name].numpy().data)
    return digest.hexdigest()


def make_index(storage: Storage, shards: list[Shard]) -> tuple[list[Label], dict[str, Tensor]]:
    """The different labels, and the arrays of an index."""
    say(f"reading the names in {len(shards)} tar files of {storage.root}")
    labels: list[Label] = []
    columns = {name: array("q") for name in ("shard", "start", "size", "end")}
    content = bytearray()

    def scanned(shard: Shard) -> list[tuple[bytes, int, int, Label]]:
        return storage.opened(shard[0], lambda: list(scan(storage, shard[0])))

    with ThreadPoolExecutor(SHARDS_TOGETHER) as threads:
        for number, found in enumerate(threads.map(scanned, shards)):
            for name, start, size, label in found:
                content += name
                labels.append(label)
                values = number, start, size, len(content)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    if not labels:
        raise UserError(f"there is no image in {storage.show(shards[0][0])}")
    places: dict[str, int] = {}
    which = [places.setdefault(repr(label), len(places)) for label in labels]
    different = dict(zip(which, labels, strict=True))  # in their order
    arrays = {name: torch.frombuffer(column, dtype=torch.int64) for name, column in columns.items()}
    arrays |= {"names": torch.frombuffer(content, dtype=torch.uint8)}
    return [*different.values()], arrays | {"label": torch.tensor(which, dtype=torch.int32)}


def scan(storage: Storage, name: str) -> Iterator[tuple[bytes, int, int, Label]]:
    """The images in a shard: name, where it begins, its size in bytes, and its label.

    Raises:
        UserError: if the shard is damaged or holds several parts, or an image has no label.
    """
    place = storage.place(name)
    shown = storage.show(name)
    labels: dict[str, Label | UserError | None] = {}  # by the names of their members
    images: list[tuple[str, int, int]] = []
    folders: set[str] = set()  # that are no labels
    with storage.fs.open(place, "rb", block_size=READ_AHEAD, cache_type="readahead") as file:
        try:
            # Whatever the system's encoding, a name is its bytes; what is compressed is refused.
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as members:
                for member in files_of(members):
                    if has_suffix(os.fsencode(member.name)):
                        images.append((member.name, member.offset_data, member.size))
                        if member.issparse():
                            raise ValueError(f"{member.name!a} is sparse: pack without --sparse")
                    else:
                        stem, _, suffix = member.name.rpartition(".")
                        labels[f"{stem}.{suffix.lower()}"] = read_label(members, member, shown)
        except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:
            file.seek(0)
            reason = why_not(file.read(BLOCK), error)
            raise UserError(f"tar file {shown} cannot be read: {reason}") from error
        file.seek(members.offset)
        rest = file.read(TAIL)
    if rest[:BLOCK] != bytes(BLOCK):
        what = "a member is damaged" if rest else "it is cut: its last blocks are missing"
        raise UserError(f"tar file {shown} is damaged after {members.offset:,} bytes: {what}")
    if rest.strip(b"\0"):
        raise UserError(f"tar file {shown} goes on after its end at {members.offset:,}: pack anew")
    for image, start, length in images:
        label = label_of(image, labels, shown)
        folders.update(name for name in image.split("/")[:-1] if name != label)
        yield os.fsencode(image), start, length, label
    if len(parts := find_parts(folders)) > 1:
        raise UserError(
            f"tar file {shown} holds {' and '.join(parts)}: pack each into a tar file of its own, "
            "or unpack it and use --data.name folder"
        )


def files_of(members: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The images and labels in a tar file; then its `offset` is where it ends.

    Raises:
        ValueError: if one is a link or there twice, or a size is negative: it leads backwards.
        TarError: if it is damaged.
    """
    names: set[str] = set()
    while (member := members.next()) is not None:
        if member.size < 0:
            raise ValueError(f"{member.name!a} has a size of {member.size}")
        members.members.clear()  # it keeps what it has read
        last = os.fsencode(member.name.rpartition("/")[2])
        is_wanted = has_suffix(last) or last.lower().endswith((b".cls", b".json"))
        if not is_wanted or last.startswith(b".") or member.isdir() or member.isdev():
            continue
        if not member.isreg():
            raise ValueError(f"{member.name!a} is a link: pack with `tar -h --hard-dereference`")
        if member.name in names:
            raise ValueError(f"{member.name!a} is there twice: pack anew, with a name for each")
        names.add(member.name)
        yield member


def why_not(start: bytes, error: Exception) -> str:
    """Why a file that begins with `start` is not read."""
    if start.startswith(PACKED):
        return "it is compressed, and can't be read in part: unpack it"
    if not start:
        return "it is empty"
    if start == UNFINISHED:
        return "`prepare --format tar` did not finish: run it again"
    if start[257:262] != b"ustar" and isinstance(error, tarfile.ReadError):
        return f"it is no tar file, it begins with {start[:24]!a}"
    return " ".join(str(error).split()) or type(error).__name__


def label_of(image: str, labels: dict[str, Label | UserError | None], shown: str) -> Label:
    """The label of an image: in the member whose name is the longest beginning of its own.

    Or else its folder. Raises `UserError` if there is neither, or it can't be read.
    """
    folder, _, last = image.rpartition("/")
    stem = image
    while "." in last:
        last = last.rpartition(".")[0]
        stem = stem.rpartition(".")[0]
        label = labels.get(f"{stem}.cls", labels.get(f"{stem}.json"))
        if isinstance(label, UserError):
            raise label
        if label is not None:
            return label
    label = folder.rpartition("/")[2]
    if label in ("", "."):
        name = image.rpartition(".")[0] + ".cls"
        raise UserError(f"image {image!a} of {shown} has no label: add {name!a}, or class folders")
    # As `folder` writes names that are no UTF-8.
    return os.fsencode(label).decode("utf-8", "backslashreplace")


def read_label(
    members: tarfile.TarFile, member: tarfile.TarInfo, shown: str
) -> Label | UserError | None:
    """The label in a member `.cls` or `.json` of the shard `shown`; None if it has none.

    An error is returned, as the label may be that of no image.
    """
    try:
        if member.size > MOST_LABEL:
            raise ValueError(f"it has {member.size:,} bytes, more than {MOST_LABEL:,}")
        content = members.extractfile(member).read()
        return (read_cls if member.name.lower().endswith(".cls") else read_json)(content)
    except (ValueError, RecursionError) as error:
        return UserError(f"label {member.name!a} of {shown} cannot be read: {error}")


def read_cls(content: bytes) -> Label:
    """The label that is all of a text."""
    if not (text := content.decode("utf-8-sig").strip()):
        raise ValueError("it is empty")
    return int(text) if text.isdecimal() else text


def read_json(content: bytes) -> Label | None:
    """The label in JSON; None if it has none."""
    found: Any = json.loads(content)
    label = found.get("labels", found.get("label")) if isinstance(found, dict) else None
    some = label if isinstance(label, list) else [label]
    if label is not None and ("" in some or not all(type(one) in (int, str) for one in some)):
        raise ValueError(f"a label should be a number or a name, not {label!a:.60}")
    return label
