"""Images that `prepare` wrote once, at the size that training needs, read through a memory map.

    photos.cache/train/images-00000.safetensors     pixels or JPEGs, one image after the other
    photos.cache/train/index.safetensors            where each is, and the files that they are of
    photos.cache/train/manifest.json                how they were made; what has one is complete

The same images are used only as long as the files that they are of are the same.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import simplejpeg
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ...config import DataConfig
from ...errors import UserError
from ...runtime.files import read_object
from ...runtime.machine import is_in_memory, map_pages
from .paths import PathList
from .source import Source

VERSION = 1  # of what is written: another one is prepared again
MANIFEST, INDEX = "manifest.json", "index.safetensors"
OFF = "off"  # as `data.cache`: read the files


@dataclass(frozen=True)
class Recipe:
    """How images are prepared."""

    format: str  # raw or jpeg
    side: int  # of the shorter side in pixels, where an image is not smaller
    quality: int  # of jpeg, from 1 to 100

    def __str__(self) -> str:
        """As a person would say it."""
        form = "raw" if self.format == "raw" else f"JPEG of quality {self.quality}"
        return f"{form}, shorter side {self.side}"


class Prepared:
    """Images in memory-mapped files, by arrays that forked workers share.

    A file is mapped when it is first read from, by each process for itself if it was not before.
    """

    def __init__(
        self, folder: Path, recipe: Recipe, digests: list[str], places: Tensor, sizes: Tensor
    ) -> None:
        """Images at `places`, (count, 3) int64, of `sizes`, (count, 2) int32: height, width.

        A place is the number of a file in `folder`, and where an image begins and ends in it.
        """
        self.folder, self.recipe, self.digests = folder, recipe, digests
        self.places, self.sizes = places.numpy(), sizes.numpy()
        self.shards: list[np.ndarray | None] = [None] * len(digests)

    def __call__(self, index: int) -> Tensor:
        """Image `index`: (height, width, 3) uint8.

        Raw pixels are those in the memory map, and nothing is copied.

        Raises:
            UserError: if the file that it is in is damaged, or another than it was.
        """
        number, start, stop = self.places[index].tolist()
        shard = self.shards[number]
        if shard is None:
            shard = self.shards[number] = self.open_shard(number)
        content = shard[start:stop]
        height, width = self.sizes[index].tolist()
        if self.recipe.format == "raw":
            return torch.from_numpy(content.reshape(height, width, 3))
        try:
            return torch.from_numpy(simplejpeg.decode_jpeg(content, "RGB"))
        except ValueError as error:
            raise damage(self.folder / shard_name(number), str(error)) from error

    def open_shard(self, number: int) -> np.ndarray:
        """The bytes of a file of images: (count,) uint8, mapped copy-on-write."""
        path = self.folder / shard_name(number)
        try:
            with safe_open(path, "pt") as shard:
                images = shard.get_tensor("images").numpy()
                digest = (shard.metadata() or {}).get("blake2b")
        except (OSError, SafetensorError) as error:
            raise damage(path, str(error)) from error
        if digest != self.digests[number]:
            raise UserError(f"{str(path)!a} was prepared anew since this run has begun")
        if is_in_memory(path):
            map_pages(images)
        return images

    def __getstate__(self) -> dict[str, Any]:
        """All but the maps, for a process that was not forked from this one."""
        return self.__dict__ | {"shards": [None] * len(self.shards)}


def cache_folder(data: DataConfig) -> Path:
    """The folder for prepared images and for the list of `check`: `data.cache`, or ROOT.cache."""
    if data.cache not in ("", OFF):
        return Path(data.cache)
    root = Path(data.root)
    if root.name in ("", ".."):
        root = root.resolve()
    return root.with_name(f"{root.name}.cache")


def shard_name(number: int) -> str:
    """The name of a file of images."""
    return f"images-{number:05}.safetensors"


def with_prepared(source: Source, data: DataConfig, split: str) -> Source:
    """`source` with a reader of what was prepared of its files, if that can be used.

    A note says so, or why not.

    Raises:
        UserError: if it is damaged: to ignore that would make training slow for no reason.
    """
    folder = cache_folder(data) / split
    if data.cache == OFF or source.paths is None or not folder.is_dir():
        return source
    manifest = read_manifest(folder)
    reason = "it is not complete"
    if manifest is not None:
        recipe = Recipe(**manifest["recipe"])
        index = read_index(folder, manifest)
        reason = changes(source.paths, index)
        if recipe.side < data.image_size:
            reason = f"its shorter sides, {recipe.side}, are less than --data.image-size"
        if not reason:
            check_lengths(folder, manifest)
            digests = [shard["blake2b"] for shard in manifest["shards"]]
            return replace(
                source,
                reader=Prepared(folder, recipe, digests, index["places"], index["sizes"]),
                sizes=index["sizes"],
                recipe=str(recipe),
                notes=(*source.notes, f"prepared images: {folder}, {recipe}"),
            )
    note = f"not {str(folder)!a} but the files are read: {reason}; `prepare` again"
    return replace(source, notes=(*source.notes, note))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What `prepare` wrote last, or None if it is not through, or was of another version."""
    try:
        manifest = read_object(folder / MANIFEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damage(folder / MANIFEST, str(error)) from error
    if manifest and manifest.get("version") != VERSION:
        return None
    if not is_manifest(manifest):
        raise damage(folder / MANIFEST, "it is not what `prepare` writes")
    return manifest


def is_manifest(found: dict[str, Any]) -> bool:
    """Whether all that is read of a manifest is there, and of the right type."""
    recipe, shards = found.get("recipe"), found.get("shards")
    kinds = {"bytes": int, "blake2b": str}
    return (
        isinstance(found.get("index"), str)
        and isinstance(recipe, dict)
        and {name: type(value) for name, value in recipe.items()} == get_type_hints(Recipe)
        and isinstance(shards, list)
        and all(isinstance(shard, dict) for shard in shards)
        and all({n: type(shard.get(n)) for n in kinds} == kinds for shard in shards)
    )


def read_index(folder: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    """The arrays in `INDEX`, mapped."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
        if digest != manifest["index"]:
            raise damage(path, "wrong checksum")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise damage(path, str(error)) from error


def check_lengths(folder: Path, manifest: dict[str, Any]) -> None:
    """Find files that are missing or cut short before training does."""
    for number, shard in enumerate(manifest["shards"]):
        path = folder / shard_name(number)
        length = path.stat().st_size if path.exists() else 0
        if length != shard["bytes"]:
            raise damage(path, f"it has {length:,} of {shard['bytes']:,} bytes")


def changes(paths: PathList, index: dict[str, Tensor]) -> str:
    """How the files differ from those that were prepared; nothing if they don't."""
    stats, old_stats = paths.stats(), index["stats"]
    if torch.equal(paths.bytes, index["paths"]) and torch.equal(paths.ends, index["path_ends"]):
        changed, new, gone = int((stats != old_stats).any(1).sum()), 0, 0
    else:
        now = by_path(paths.bytes, paths.ends, stats)
        old = by_path(index["paths"], index["path_ends"], old_stats)
        changed = sum(now[path] != old[path] for path in now.keys() & old.keys())
        new, gone = len(now.keys() - old.keys()), len(old.keys() - now.keys())
    if changed or new or gone:
        return f"it is of other images, {changed} changed, {new} new, {gone} gone"
    return ""


def by_path(text: Tensor, ends: Tensor, stats: Tensor) -> dict[bytes, list[int]]:
    """What is known of each file."""
    whole, ends = text.numpy().tobytes(), [0, *ends.tolist()]
    paths = (whole[start:end] for start, end in pairwise(ends))
    return dict(zip(paths, stats.tolist(), strict=True))


def damage(path: Path, reason: str) -> UserError:
    """What to raise for a file that is not as it was written."""
    return UserError(
        f"prepared images {str(path)!a} are damaged: {reason}; "
        "`prepare` mends them, --data.cache off reads the files instead"
    )
