"""Images that `prepare` wrote once, at the size that training needs, read through a memory map.

    photos.cache/train/images-00000.safetensors     pixels or JPEGs, one image after the other
    photos.cache/train/index.safetensors            where each is, and the files they were made of

The index is written last. The images are used only while those files are the same.
"""

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ...config import DataConfig
from ...data import NO_CACHE, PathList, Source, cache_folder, decode_image, simplejpeg
from ...errors import UserError
from ...runtime.files import open_tensors
from ...runtime.platform import call_libc
from .recipe import Recipe

VERSION = 3  # of the index, and of decoding; images with another are prepared again
INDEX = "index.safetensors"
MADV_POPULATE_READ = 22  # of madvise(2), since Linux 5.14; Python's mmap has no name for it


class Prepared:
    """Images in memory-mapped files; a process maps a file when it first reads from it."""

    def __init__(
        self, files: list[tuple[Path, str]], recipe: Recipe, places: Tensor, sizes: Tensor
    ) -> None:
        """Images at `places`, (count, 3) int64, of `sizes`, (count, 2) int32: height, width.

        A place is the number of one of `files`, each with its digest, and where an image begins and
        ends in it.
        """
        self.files = files
        self.recipe = recipe
        self.places = places.numpy()
        self.sizes = sizes.numpy()
        self.shards: list[np.ndarray | None] = [None] * len(files)

    def __call__(self, index: int) -> Tensor:
        """Image `index`: (height, width, channels); raw pixels are not copied."""
        number, start, stop = self.places[index].tolist()
        shard = self.shards[number]
        if shard is None:
            shard = self.shards[number] = self.open_shard(number)
        content = shard[start:stop]
        height, width = self.sizes[index].tolist()
        if self.recipe.format == "raw":
            content = content if self.recipe.bits == 8 else content.view(np.uint16)
            return torch.from_numpy(content.reshape(height, width, self.recipe.channels))
        try:
            if simplejpeg is None:
                return decode_image(content.tobytes())
            return torch.from_numpy(simplejpeg.decode_jpeg(content, "RGB"))
        except (ValueError, OSError) as error:
            raise damage(self.files[number][0], error) from error

    def open_shard(self, number: int) -> np.ndarray:
        """The bytes of a file of images: (count,) uint8, mapped copy-on-write."""
        path, digest = self.files[number]
        try:
            with open_tensors(path) as shard:
                images = shard.get_tensor("images").numpy()
                about = (shard.metadata() or {}).get("about")
        except (OSError, SafetensorError) as error:
            raise damage(path, error) from error
        if about != digest:
            raise UserError(f"{str(path)!a} was prepared anew since this run has begun")
        if is_in_memory(path):
            map_pages(images)
        return images

    def __getstate__(self) -> dict[str, Any]:
        """All but the maps, for a process that was not forked from this one."""
        return self.__dict__ | {"shards": [None] * len(self.shards)}


def shard_name(number: int) -> str:
    """The name of a file of images."""
    return f"images-{number:05}.safetensors"


def with_prepared(source: Source, data: DataConfig, split: str) -> Source:
    """`source` read from its prepared images, if they can be used; a note says so, or why not.

    The images of another `data.fold` or `data.val_fraction` are found in both splits.

    Raises:
        UserError: if they are damaged, as training from the files would be slow without a reason.
    """
    folder = cache_folder(data) / split
    if data.cache == NO_CACHE or source.paths is None or not folder.is_dir() or source.reader:
        return source
    recipe, digests, index = read_index(folder / INDEX)
    if recipe is None:
        reason = "`prepare` did not finish, or it is of another version"
    elif (recipe.channels, recipe.bits) != (source.channels, source.bits):
        reason = f"its images have {recipe.channels} channels of {recipe.bits} bits"
    elif recipe.side < data.image_size:
        reason = f"its shorter sides, {recipe.side}, are less than {data.image_size}"
    else:
        files = files_of(folder, digests)
        state = state_of(source.paths)
        places = index["places"]
        sizes = index["sizes"]
        if any(not torch.equal(now, index[name]) for name, now in state.items()):
            files, places, sizes = find_in_splits(state, folder, recipe)
        if len(places) == len(source):
            return replace(
                source,
                reader=Prepared(files, recipe, places, sizes),
                recipe=str(recipe),
                notes=(*source.notes, f"prepared images: {folder}, {recipe}"),
            )
        reason = "its images were prepared from other files"
    note = f"not {str(folder)!a} but the files are read: {reason}; `prepare` again"
    return replace(source, notes=(*source.notes, note))


def state_of(paths: PathList) -> dict[str, Tensor]:
    """All that shows whether files were added, removed or changed."""
    return {"paths": paths.bytes, "path_ends": paths.ends, "stats": paths.stats()}


def files_of(folder: Path, digests: list[str]) -> list[tuple[Path, str]]:
    """The files of images in `folder`, with their digests."""
    return [(folder / shard_name(number), digest) for number, digest in enumerate(digests)]


def find_in_splits(
    state: dict[str, Tensor], folder: Path, recipe: Recipe
) -> tuple[list[tuple[Path, str]], Tensor, Tensor]:
    """The files of both splits, and where in them images of `state` are: first in `folder`."""
    files: list[tuple[Path, str]] = []
    known: dict[tuple[bytes, int, int], tuple[list[int], list[int]]] = {}
    for split in sorted(("train", "val"), key=lambda name: name == folder.name):  # own: the last
        place = folder.with_name(split)
        own_recipe, digests, index = read_index(place / INDEX)
        if own_recipe != recipe:
            continue
        index["places"][:, 0] += len(files)
        files += files_of(place, digests)
        rows = zip(index["places"].tolist(), index["sizes"].tolist(), strict=True)
        known |= zip(keys_of(index), rows, strict=True)
    found = [known[key] for key in keys_of(state) if key in known]
    places, sizes = zip(*found, strict=True) if found else ((), ())
    return files, torch.tensor(places), torch.tensor(sizes, dtype=torch.int32)


def keys_of(state: dict[str, Tensor]) -> Iterator[tuple[bytes, int, int]]:
    """The path, size and time of change of each file of a `PathList.state`."""
    content = state["paths"].numpy().tobytes()
    start = 0
    for end, (size, time) in zip(state["path_ends"].tolist(), state["stats"].tolist(), strict=True):
        yield content[start:end], size, time
        start = end


def read_index(path: Path) -> tuple[Recipe | None, list[str], dict[str, Tensor]]:
    """Recipe, digests of the files of images, arrays; no recipe if `prepare` must run first."""
    try:
        with open_tensors(path) as file:
            metadata = file.metadata()
            index = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None, [], {}
    except (OSError, SafetensorError) as error:
        raise damage(path, error) from error
    if metadata is None:  # version 1
        return None, [], {}
    digest, _, about = metadata.get("about", "").partition(" ")
    if digest_of(about, index) != digest:
        raise damage(path, "wrong checksum")
    found = json.loads(about)
    if found["version"] != VERSION:
        return None, [], {}
    return Recipe(**found["recipe"]), found["digests"], index


def digest_of(text: str, arrays: dict[str, Tensor]) -> str:
    """A checksum of `text` and `arrays`."""
    digest = hashlib.blake2b(text.encode())
    for name in sorted(arrays):
        digest.update(arrays[name].contiguous().numpy().data)
    return digest.hexdigest()


def damage(path: Path, reason: object) -> UserError:
    """The error for a damaged file."""
    return UserError(
        f"prepared images {str(path)!a} are damaged: {reason}; "
        "`prepare` mends them, --data.cache off reads the files instead"
    )


def map_pages(array: np.ndarray) -> None:
    """Map all pages of a memory-mapped array at once: page faults one by one cost more than a copy.

    For files that `is_in_memory`: other pages would be read from the disk first. Does nothing where
    the system cannot.
    """
    before = array.ctypes.data % mmap.PAGESIZE
    first = array.ctypes.data - before
    size = array.nbytes + before
    call_libc("madvise", ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_POPULATE_READ)


def is_in_memory(path: Path) -> bool:
    """Whether a file is in the page cache, judged by a few places that are read without waiting."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for place in range(0, size, size // 8 + 1):
                os.preadv(file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
    except (OSError, AttributeError):  # the read would wait, or this is not Linux
        return False
    return True
