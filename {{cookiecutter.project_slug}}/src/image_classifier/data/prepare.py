"""Images written once at the size that training needs; `datasets/prepared.py` reads them.

A file of images is a function of the settings and of the files that they are of, and carries a name
for both and a checksum. So what a kill left, what is damaged and what has changed since are one
case: each file that is not as it would be written is written, and the others are kept.
"""

import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import simplejpeg
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..config import DataConfig
from ..errors import UserError
from ..runtime.console import clock, gigabytes, say
from ..runtime.files import lock_file, remove_leftovers, write_json, write_whole
from ..runtime.machine import num_cores
from .crops import resize
from .datasets import open_files
from .datasets.paths import PathList
from .datasets.prepared import (
    INDEX,
    MANIFEST,
    VERSION,
    Recipe,
    cache_folder,
    read_index,
    read_manifest,
    shard_name,
)
from .decode import BadImageError, read_image

SHARD_BYTES = 2**28  # of a file of images, about: 1,000 files for a million of them
MIN_SHARDS = 64  # of a small dataset, so that many cores share in it
MIN_IMAGES = 16  # in a file, of which there are not as many then
HEAD_BYTES = 512  # at the start of a file, what is not used of them is blank
LIVE_SECONDS, LOG_SECONDS = 0.5, 10  # between lines of progress, on a terminal and in a log
SAMPLES = 16  # images that are prepared to learn how much space all need


def prepare_images(data: DataConfig, splits: Sequence[str], recipe: Recipe) -> None:
    """Write all images of `splits` as `recipe` says, or what is missing of them.

    Raises:
        UserError: if the dataset has no files, one can't be read, or these can't be written.
    """
    folder = cache_folder(data)
    for split in splits:
        paths = open_files(data, split).paths
        if paths is None:
            raise UserError(f"{data.name} needs no `prepare`: its images are in memory")
        try:
            with alone_in(folder / split):
                prepare_split(paths, folder / split, recipe)
        except OSError as error:
            raise UserError(
                f"cannot write prepared images to {str(folder)!a}: {error.strerror}; "
                "what is written is kept; --data.cache is another place"
            ) from error


class GivenUpError(Exception):
    """Another thread has failed, or the user wants no more."""


def prepare_split(paths: PathList, folder: Path, recipe: Recipe) -> None:
    """Write the images of one split, and last the manifest that makes them usable."""
    began, stop = time.monotonic(), Event()
    stats = paths.stats()  # before the files are read: a later change is found by training
    parts = torch.arange(len(paths)).split(images_per_shard(recipe, len(paths)))
    remove_others(folder, len(parts))
    check_space(paths, parts, folder, recipe)
    counts = [0] * len(parts)  # of images that are ready, by file
    written = [0] * len(parts)  # bytes

    def make(number: int) -> None:
        def tell(count: int, size: int) -> None:
            counts[number], written[number] = count, size
            if stop.is_set():
                raise GivenUpError

        path, files = folder / shard_name(number), paths.picked(parts[number])
        key = key_of(files, stats[parts[number]], recipe)
        if is_whole(path, key):
            counts[number] = len(files)
        else:
            (folder / MANIFEST).unlink(missing_ok=True)
            write_shard(path, files, recipe, key, tell)

    def progress() -> str:
        seconds, count = time.monotonic() - began, sum(counts)
        left = clock(seconds / count * (len(paths) - count)) if count else "?"
        return (
            f"{folder}: {count:,} of {len(paths):,} images, {count / seconds:,.0f} images/s, "
            f"{gigabytes(sum(written))}, left {left}"
        )

    work_in_threads(make, len(parts), stop, progress)
    total = write_index(paths, stats, folder, recipe, len(parts))
    done = "all checksums are right, nothing to do"
    if any(written):
        kept = f", {written.count(0)} of {len(parts)} files kept" if 0 in written else ""
        done = f"written in {clock(time.monotonic() - began)}{kept}"
    say(f"{folder}: {len(paths):,} images, {recipe}, {gigabytes(total)}: {done}")


def work_in_threads(
    work: Callable[[int], None], count: int, stop: Event, progress: Callable[[], str]
) -> None:
    """Do `work` for each number below `count`, and say every while how it goes.

    Decoders, encoders, checksums and files all let other threads run, so processes, which would
    outlive a kill, are not needed.
    """
    is_live, threads = sys.stdout.isatty(), torch.get_num_threads()
    torch.set_num_threads(1)  # those that share in one operation wait for each other
    try:
        with ThreadPoolExecutor(num_cores()) as pool:
            running = {pool.submit(work, number) for number in range(count)}
            try:
                while running:
                    seconds = LIVE_SECONDS if is_live else LOG_SECONDS
                    done, running = wait(running, seconds, return_when=FIRST_EXCEPTION)
                    for job in done:
                        job.result()
                    if running:
                        say(progress(), is_last=not is_live)
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        torch.set_num_threads(threads)


def write_shard(
    path: Path, files: PathList, recipe: Recipe, key: str, tell: Callable[[int, int], None]
) -> None:
    """Write the images of `files` to one file of safetensors: `ends`, `sizes` and `images`.

    They go there one by one, and what stands before them last: `safetensors.save` wants all of
    them in memory, and twice.
    """
    ends = torch.zeros(len(files), dtype=torch.int64)
    sizes = torch.zeros((len(files), 2), dtype=torch.int32)  # height, width
    digest = hashlib.blake2b()

    def write(file: BinaryIO) -> None:
        file.seek(len(head(ends, sizes, key, "")))
        end = 0
        for number in range(len(files)):
            content, height, width = prepared(files[number], recipe)
            digest.update(content)
            end += file.write(content)
            ends[number], sizes[number] = end, torch.tensor((height, width))
            tell(number + 1, end)
        digest.update(ends.numpy().data)
        digest.update(sizes.numpy().data)
        file.seek(0)
        file.write(head(ends, sizes, key, digest.hexdigest()))

    write_whole(path, write)


def is_whole(path: Path, key: str) -> bool:
    """Whether a file of images is the one of `key`, and every byte as it was written."""
    try:
        with safe_open(path, "pt") as shard:
            if (shard.metadata() or {}).get("key") != key:
                return False
            ends, sizes, images = map(shard.get_tensor, ("ends", "sizes", "images"))
        digest = hashlib.blake2b(images.numpy().data)
        digest.update(ends.numpy().data)
        digest.update(sizes.numpy().data)
        expected = head(ends, sizes, key, digest.hexdigest())
        with path.open("rb") as file:
            return file.read(len(expected)) == expected
    except (OSError, SafetensorError):
        return False


def head(ends: Tensor, sizes: Tensor, key: str, digest: str) -> bytes:
    """What stands before the images: https://github.com/huggingface/safetensors#format."""
    fields: dict[str, Any] = {"__metadata__": {"key": key, "blake2b": digest}}
    start = 0
    for name, kind, shape, size in (
        ("ends", "I64", list(ends.shape), ends.nbytes),
        ("sizes", "I32", list(sizes.shape), sizes.nbytes),
        ("images", "U8", [int(ends[-1])], int(ends[-1])),
    ):
        fields[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    # Blanks at the end make it as long before the images are written as after.
    text = json.dumps(fields).encode().ljust(HEAD_BYTES - 8)
    arrays = ends.numpy().tobytes() + sizes.numpy().tobytes()
    return len(text).to_bytes(8, "little") + text + arrays


def write_index(paths: PathList, stats: Tensor, folder: Path, recipe: Recipe, count: int) -> int:
    """Write the index of all images, and the manifest, if they are others; bytes of all files."""
    places, sizes, shards = [], [], []
    for number in range(count):
        with safe_open(folder / shard_name(number), "pt") as shard:
            ends = shard.get_tensor("ends")
            sizes.append(shard.get_tensor("sizes"))
            digest = shard.metadata()["blake2b"]
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends[:-1]))
        places.append(torch.stack((torch.full_like(ends, number), starts, ends), dim=1))
        length = (folder / shard_name(number)).stat().st_size
        shards.append({"bytes": length, "blake2b": digest})
    index = {"places": torch.cat(places), "sizes": torch.cat(sizes), "stats": stats}
    content = save(index | {"paths": paths.bytes, "path_ends": paths.ends})
    manifest = {
        "version": VERSION,
        "recipe": asdict(recipe),
        "images": len(paths),
        "index": hashlib.blake2b(content).hexdigest(),
        "shards": shards,
    }
    with contextlib.suppress(UserError):  # damaged: written anew
        if read_manifest(folder) == manifest and read_index(folder, manifest):
            return sum(shard["bytes"] for shard in shards)
    (folder / MANIFEST).unlink(missing_ok=True)
    write_whole(folder / INDEX, lambda file: file.write(content))
    write_json(folder / MANIFEST, manifest)
    return sum(shard["bytes"] for shard in shards)


def prepared(path: Path, recipe: Recipe) -> tuple[bytes | memoryview, int, int]:
    """An image as it is kept, and its height and width.

    Raises:
        UserError: if its file can't be read, naming it.
    """
    try:
        pixels = read_image(path)
    except BadImageError as error:
        # None may stand in: what is prepared is of the files that there are, whatever the run.
        raise UserError(
            f"{error}; mend it or remove it: `check --quarantine` finds all such files and leaves "
            "them out"
        ) from error
    height, width = pixels.shape[:2]
    scale = min(1, recipe.side / min(height, width))
    height, width = round(height * scale), round(width * scale)
    rows = resize(pixels, height, width).contiguous().numpy()
    if recipe.format == "raw":
        return rows.reshape(-1).data, height, width
    jpeg = simplejpeg.encode_jpeg(
        rows, recipe.quality, colorspace="RGB", colorsubsampling="420", fastdct=False
    )
    return jpeg, height, width


def images_per_shard(recipe: Recipe, count: int) -> int:
    """How many images go into one file: a power of 2, so that a few more change nothing."""
    image_bytes = 4 * recipe.side**2 // (1 if recipe.format == "raw" else 8)  # of 4:3, about
    most = max(1, min(SHARD_BYTES // image_bytes, max(MIN_IMAGES, count // MIN_SHARDS)))
    return 1 << (most.bit_length() - 1)


def key_of(files: PathList, stats: Tensor, recipe: Recipe) -> str:
    """A name for what is in a file of images: the settings, and the state of the images' files."""
    digest = hashlib.blake2b(f"{VERSION} {recipe}".encode(), digest_size=16)
    for array in (files.ends, files.bytes, stats):
        digest.update(array.numpy().data)
    return digest.hexdigest()


def check_space(paths: PathList, parts: Sequence[Tensor], folder: Path, recipe: Recipe) -> None:
    """Refuse what the disk has no space for, judged by a few of the images."""
    names = (folder / shard_name(number) for number in range(len(parts)))
    missing = sum(len(part) for part, name in zip(parts, names, strict=True) if not name.exists())
    if not missing:
        return
    picked = (torch.arange(SAMPLES) * len(paths) // SAMPLES).unique()
    sizes = [len(prepared(paths[number], recipe)[0]) for number in picked.tolist()]
    size = sum(sizes) / len(sizes)
    free = shutil.disk_usage(folder).free
    if size * missing > free:
        raise UserError(
            f"{str(folder)!a}: about {gigabytes(size * missing)} are needed, {gigabytes(free)} "
            "are free; --format jpeg and a smaller --side need less, --data.cache is another place"
        )


def remove_others(folder: Path, count: int) -> None:
    """Remove what a kill left half written, and files of images beyond `count`."""
    names = {shard_name(number) for number in range(count)}
    for path in folder.iterdir():
        if path.name.lstrip(".").startswith("images-") and path.name not in names:
            (folder / MANIFEST).unlink(missing_ok=True)
            path.unlink()


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, and let no other process prepare it: both would write to the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if lock_file(file, f"{str(folder)!a} is being prepared by another process"):
            remove_leftovers(folder)
        yield
