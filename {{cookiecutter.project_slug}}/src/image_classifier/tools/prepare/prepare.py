"""Images written once at the size that training needs; `source.py` reads them.

A file of images has a key, a digest of the settings and of the state of the images' own files, and
a checksum. Each file that is damaged, missing or has another key is written, the others are kept:
so a second call finishes what a kill interrupted and what changes made necessary.
"""

import contextlib
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from ...config import DataConfig
from ...data import BadImageError, PathList, cache_folder, open_files, resize, simplejpeg
from ...errors import UserError
from ...extensions import need_tool
from ...runtime.console import Progress, clock, say
from ...runtime.files import lock_file, open_tensors, remove_leftovers, write_whole
from ...runtime.machine import num_cores, one_thread
from . import source as prepared
from .recipe import Recipe

SHARD_BYTES = 2**26  # of a file of images, about; each thread holds one in memory, several times
MIN_SHARDS = 64  # of a small dataset, so that many cores share in it
MIN_IMAGES = 16  # in a file, of which there are fewer then


def prepare_images(data: DataConfig, splits: tuple[str, ...], recipe: Recipe) -> None:
    """Write all images of `splits` as `recipe` says, or what is missing of them.

    Raises:
        UserError: if the dataset has no files, one can't be read, or these can't be written.
    """
    if recipe.format == "jpeg" and (recipe.channels, recipe.bits) != (3, 8):
        raise UserError(
            f"--format jpeg has 3 channels of 8 bits, not {recipe.channels} of {recipe.bits}: "
            "--format raw has any"
        )
    if recipe.format == "raw" and recipe.quality != Recipe.quality:
        raise UserError("--quality is that of --format jpeg; raw keeps pixels: leave it out")
    if recipe.format == "tar" and (recipe.side, recipe.quality) != (Recipe.side, Recipe.quality):
        raise UserError("--format tar keeps images as they are: leave out --side and --quality")
    tar = need_tool("shards", "tar", "--format tar") if recipe.format == "tar" else None
    sources = [open_files(data, split) for split in splits]
    for number, (split, source) in enumerate(zip(splits, sources, strict=True)):
        folder = cache_folder(data) / ("tar" if tar else split)
        if not tar and (source.paths is None or source.reader is not None):
            where = "in memory" if source.paths is None else "read by a function of its own"
            raise UserError(f"{data.name} needs no `prepare`: its images are {where}")
        try:
            with alone_in(folder):
                if tar:
                    tar.write_shards(source, splits[number:], folder)
                else:
                    prepare_split(source.paths, folder, recipe)
        except OSError as error:
            raise UserError(
                f"cannot write prepared images to {str(folder)!a}: {error.strerror}; "
                "what is written is kept; --data.cache is another place"
            ) from error


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A block in which no other process prepares `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if lock_file(file, f"{str(folder)!a} is being prepared by another process"):
            remove_leftovers(folder)
        yield


def prepare_split(paths: PathList, folder: Path, recipe: Recipe) -> None:
    """Write the images of one split, and last the index that makes them usable."""
    began = time.monotonic()
    progress = Progress(len(paths))
    state = prepared.state_of(paths)  # before the files are read: training finds a later change
    parts = torch.arange(len(paths)).split(images_per_shard(recipe, len(paths)))
    names = [prepared.shard_name(number) for number in range(len(parts))]
    for path in folder.glob("images-*"):
        if path.name not in names:
            path.unlink()

    def make(name: str, part: Tensor) -> bool:
        """Write a file of images, unless it is there; whether it was written."""
        files = paths.picked(part)
        path = folder / name
        files_state = {"ends": files.ends, "paths": files.bytes, "stats": state["stats"][part]}
        key = prepared.digest_of(f"{prepared.VERSION} {recipe}", files_state)
        if is_whole(path, key):
            return False
        (folder / prepared.INDEX).unlink(missing_ok=True)
        write_shard(path, files, recipe, key)
        return True

    # Threads suffice: decoders, encoders and checksums do not hold Python's lock.
    num_written = 0
    with one_thread(), ThreadPoolExecutor(num_cores()) as pool:
        for part, is_new in zip(parts, pool.map(make, names, parts), strict=True):
            num_written += is_new
            progress.show(int(part[-1]) + 1)
    write_index(folder, names, state, recipe)
    done = "all checksums are right, nothing to do"
    if num_written:
        kept = f", {n} of {len(parts)} files kept" if (n := len(parts) - num_written) else ""
        done = f"written in {clock(time.monotonic() - began)}{kept}"
    say(f"{folder}: {len(paths):,} images, {recipe}: {done}")


def images_per_shard(recipe: Recipe, count: int) -> int:
    """The number of images in a file: a power of 2, so that a few more images do not change it."""
    image_bytes = 4 * recipe.side**2 * recipe.channels * recipe.bits // 24  # of 4:3, about
    image_bytes //= 1 if recipe.format == "raw" else 8
    most = max(1, min(SHARD_BYTES // image_bytes, max(MIN_IMAGES, count // MIN_SHARDS)))
    return 1 << (most.bit_length() - 1)


def is_whole(path: Path, key: str) -> bool:
    """Whether a file of images has this key, and every byte is as it was written."""
    try:
        with open_tensors(path) as shard:
            about = (shard.metadata() or {}).get("about")
            arrays = {name: shard.get_tensor(name) for name in ("ends", "sizes", "images")}
    except (OSError, SafetensorError):
        return False
    return about == f"{key} {prepared.digest_of(key, arrays)}"


def write_shard(path: Path, files: PathList, recipe: Recipe, key: str) -> None:
    """Write the images of `files` to one file: `images`, where each ends, and their sizes."""
    content = bytearray()
    ends = []
    sizes = []
    for number in range(len(files)):
        image, size = encode(files, number, recipe)
        content += image
        ends.append(len(content))
        sizes.append(size)
    arrays = {
        "ends": torch.tensor(ends),
        "sizes": torch.tensor(sizes, dtype=torch.int32),  # height, width
        "images": torch.frombuffer(content, dtype=torch.uint8),
    }
    about = f"{key} {prepared.digest_of(key, arrays)}"
    write_whole(path, lambda file: file.write(save(arrays, {"about": about})))


def encode(
    files: PathList, number: int, recipe: Recipe
) -> tuple[bytes | memoryview, tuple[int, int]]:
    """One of `files` as it is stored, and its height and width.

    Raises:
        UserError: if its file can't be read.
    """
    try:
        pixels = files.image(number, recipe.channels, recipe.bits)
    except BadImageError as error:
        raise UserError(f"{error}; `check --quarantine` leaves out all such files") from error
    scale = min(1, recipe.side / min(pixels.shape[:2]))
    height, width = [round(scale * side) for side in pixels.shape[:2]]
    rows = resize(pixels, height, width).contiguous().numpy()
    if recipe.format == "raw":
        return rows.reshape(-1).view(np.uint8).data, (height, width)
    return encode_jpeg(rows, recipe.quality), (height, width)


def encode_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """(height, width, 3) uint8 as a JPEG whose colors have half of the height and width."""
    if simplejpeg is None:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling="4:2:0")
        return file.getvalue()
    return simplejpeg.encode_jpeg(pixels, quality, colorsubsampling="420", fastdct=False)


def write_index(folder: Path, names: list[str], state: dict[str, Tensor], recipe: Recipe) -> None:
    """Write where each image is, and of which files and how it was made."""
    places = []
    sizes = []
    digests = []
    for number, name in enumerate(names):
        with open_tensors(folder / name) as shard:
            ends = shard.get_tensor("ends")
            sizes.append(shard.get_tensor("sizes"))
            digests.append(shard.metadata()["about"])
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends[:-1]))
        places.append(torch.stack((torch.full_like(ends, number), starts, ends), dim=1))
    found = {"version": prepared.VERSION, "recipe": asdict(recipe), "digests": digests}
    about = json.dumps(found)
    index = {"places": torch.cat(places), "sizes": torch.cat(sizes), **state}
    content = save(index, {"about": f"{prepared.digest_of(about, index)} {about}"})
    write_whole(folder / prepared.INDEX, lambda file: file.write(content))
