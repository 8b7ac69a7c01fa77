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

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...config import DataConfig
from ...data import cache_folder, has_suffix, is_junk
from ...errors import UserError
from ...runtime.console import say
from ...runtime.files import write_whole
from ..dataset_parts import Label, distinct
from .storage import Storage

VERSION = 1
SHARDS_TOGETHER = 16
READ_AHEAD = 2**15  # bytes of a shard elsewhere that are read at once: headers, and small images
BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Index:
    """The images in some shards."""

    shards: list[tuple[str, int, str]]  # name, size in bytes, and what changes when it does
    labels: list[Label]  # the distinct ones
    arrays: dict[str, Tensor]  # of each image: shard, start, size, end of its name, label; names
    notes: tuple[str, ...] = ()

    @property
    def which(self) -> np.ndarray:
        """The place in `labels` of each image's label: (count,) int32."""
        return self.arrays["label"].numpy()

    def names(self, numbers: Tensor) -> Iterator[bytes]:
        """The names in their shards of the images at `numbers`, (count,) int64."""
        content, ends = self.arrays["names"].numpy().tobytes(), self.arrays["end"]
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        for start, end in zip(starts[numbers].tolist(), ends[numbers].tolist(), strict=True):
            yield content[start:end]


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
    with suppress(OSError, SafetensorError, ValueError):
        with safe_open(path, "pt") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            digest, _, labels = file.metadata()["about"].partition(" ")
        if digest == digest_of(labels, arrays):
            return Index(shards, json.loads(labels), arrays)
    labels, arrays = make_index(storage, shards)
    text, notes = json.dumps(labels), ()
    content = save(arrays, {"about": f"{digest_of(text, arrays)} {text}"})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(content))
    except OSError as error:
        notes = (f"the index of the shards is not kept in {str(path.parent)!a}: {error.strerror}",)
    return Index(shards, labels, arrays, notes)


def digest_of(labels: str, arrays: dict[str, Tensor]) -> str:
    """A checksum of an index."""
    digest = hashlib.blake2b(labels.encode(), digest_size=16)
    for name in sorted(arrays):
        digest.update(arrays[name].numpy().data)
    return digest.hexdigest()


def make_index(
    storage: Storage, shards: list[tuple[str, int, str]]
) -> tuple[list[Label], dict[str, Tensor]]:
    """The distinct labels, and the arrays of an index."""
    say(f"reading the names in {len(shards)} tar files of {storage.root}")
    labels: list[Label] = []
    columns = {name: array("q") for name in ("shard", "start", "size", "end")}
    content = bytearray()

    def scanned(shard: tuple[str, int, str]) -> list[tuple[bytes, int, int, Label]]:
        return storage.opened(shard[0], lambda: list(scan(storage, shard[0])))

    with ThreadPoolExecutor(SHARDS_TOGETHER) as threads:
        for number, found in enumerate(threads.map(scanned, shards)):
            for name, start, size, label in found:
                content += name
                labels.append(label)
                for column, value in zip(
                    columns.values(), (number, start, size, len(content)), strict=True
                ):
                    column.append(value)
    if not labels:
        raise UserError(f"there is no image in {storage.show(shards[0][0])}")
    some, which = distinct(labels)
    arrays = {name: torch.frombuffer(column, dtype=torch.int64) for name, column in columns.items()}
    arrays |= {"names": torch.frombuffer(content, dtype=torch.uint8)}
    return some, arrays | {"label": torch.from_numpy(which)}


def scan(storage: Storage, name: str) -> Iterator[tuple[bytes, int, int, Label]]:
    """The images in a shard: name, where it begins, its size in bytes, and its label.

    Raises:
        UserError: if the shard is damaged, or an image has no label.
    """
    place, shown = storage.place(name), storage.show(name)
    labels: dict[str, Label] = {}
    images: list[tuple[str, int, int]] = []
    blocks = {"block_size": READ_AHEAD, "cache_type": "readahead"}
    try:
        with storage.fs.open(place, "rb", **blocks) as file, tarfile.open(fileobj=file) as members:
            while (member := members.next()) is not None:
                members.members.clear()  # it keeps what it has read
                key, suffix = split_name(member.name)
                if not member.isreg() or is_junk(os.fsencode(member.name.rpartition("/")[2])):
                    continue
                if has_suffix(os.fsencode(member.name)):
                    images.append((member.name, member.offset_data, member.size))
                elif suffix in ("cls", "json"):
                    content = members.extractfile(member).read()
                    if (label := read_label(content, suffix)) is not None:
                        labels[key] = label
            file.seek(members.offset)
            end = file.read(BLOCK)
    except (tarfile.TarError, ValueError) as error:
        raise UserError(f"tar file {shown} cannot be read: {error}") from error
    if end != bytes(BLOCK):
        what = "a member is damaged" if end else "it is cut: its last blocks are missing"
        raise UserError(f"tar file {shown} is damaged after {members.offset:,} bytes: {what}")
    for image, start, length in images:
        key, _ = split_name(image)
        label = labels.get(key, key.rpartition("/")[0].rpartition("/")[2])
        if label in ("", "."):
            raise UserError(
                f"image {image!a} of {shown} has no label: add {key + '.cls'!a}, or put it into a "
                "folder called as its class"
            )
        yield os.fsencode(image), start, length, label


def split_name(name: str) -> tuple[str, str]:
    """The key of a member, which all members of a sample have, and what follows its dot."""
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return folder + slash + stem, suffix


def read_label(content: bytes, suffix: str) -> Label | None:
    """The label in a member `.cls` or `.json`; None if it has none."""
    if suffix == "cls":
        text = content.decode().strip()
        return int(text) if text.isdecimal() else text
    found: Any = json.loads(content)
    label = found.get("labels", found.get("label")) if isinstance(found, dict) else None
    some = label if isinstance(label, list) else [label]
    if label is not None and not all(type(one) in (int, str) for one in some):
        raise ValueError(f"a label should be a number or a name, not {label!a}")
    return label
