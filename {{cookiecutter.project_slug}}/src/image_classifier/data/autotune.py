"""Chooses where images are kept, and how many batches are decoded ahead.

Options decide, or else the memory of this machine.
"""

from contextlib import suppress
from typing import Literal

import torch

from ..config import DataConfig, RunConfig
from ..errors import UserError
from ..extensions import functions
from ..runtime.distributed import World
from ..runtime.machine import device_memory_bytes, host_memory_bytes
from .datasets.source import Source
from .decode import BadImageError
from .samples import Note, Samples
from .shared_memory import SharedMemoryLoader, part_sizes
from .worker_count import choose_workers

MEMORY_SHARE = 0.4  # of the free memory that resident images of a split may take
SLOTS_SHARE = 0.2  # of the free memory that the batches of a loader may take: a run has two
CPU = torch.device("cpu")


def choose_where(data: DataConfig, crop: str, source: Source, world: World) -> tuple[str, str]:
    """Where the training images are kept (device, host or stream), and why."""
    if data.where != "auto":
        return data.where, "as --data.where says"
    # Never by memory where it would change the pixels: the device cuts crops otherwise.
    if crop == "resized":
        return "stream", "crops are cut from the whole image"
    if common_side(source) is None:
        return "stream", "images differ in size, or each time that they are read"
    side = data.image_size
    needed = len(source) * side**2 * source.pixel_bytes
    megabytes = f"{len(source):,} images of {side} x {side} take {needed / 2**20:,.0f} MB"
    if world.all_true(fits_memory(needed, world.device, world)):
        return "device", megabytes
    if world.all_true(fits_memory(needed, CPU, world)):
        return "host", f"{megabytes}, too much for the device"
    return "stream", f"{megabytes}, too much for memory"


def who_crops(crop: str, where: str) -> Literal["workers", "device", "nobody"]:
    """Who cuts random resized crops: workers, if they decode the images for every batch.

    Raises:
        UserError: if it would be the device, for which there is no tool.
    """
    if crop != "resized":
        return "nobody"
    if where != "stream" and not functions("crops", "crop_on_device"):
        raise UserError(
            f"--augment.crop resized with --data.where {where} needs a tool that is not here: "
            "pretuned add device-crops; or --data.where stream"
        )
    return "workers" if where == "stream" else "device"


def open_loader(
    samples: Samples, data: DataConfig, world: World, note: Note, run: RunConfig | None = None
) -> tuple[SharedMemoryLoader, str]:
    """A loader with workers and prefetching as `data` says or this machine allows, and why so.

    Raises:
        UserError: if there is no memory for a single batch.
    """
    workers, why = choose_workers(data, samples, world)
    batch_size = max(1, data.batch_size // world.size)

    def needed(depth: int) -> int:
        _, _, slots = part_sizes(batch_size, workers, depth)
        return world.local_size * slots * batch_size * samples.source.pixel_bytes * samples.size**2

    free = host_memory_bytes()
    depth = data.prefetch_batches
    while depth > 1 and needed(depth) > SLOTS_SHARE * free:
        depth -= 1
    if needed(depth) > free:
        raise UserError(
            f"batches of {data.batch_size} images of {samples.size} x {samples.size} need "
            f"{needed(depth) / 2**20:,.0f} MB of memory, {free / 2**20:,.0f} MB are free: "
            "lower the batch size or the image size"
        )
    less = f"; prefetch-batches {depth}: memory is short" if depth < data.prefetch_batches else ""
    pin = world.device.type == "cuda"
    how = {"note": note, "timeout_seconds": (run or RunConfig()).timeout_seconds}
    loader = SharedMemoryLoader(samples, batch_size, workers, depth, pin, **how)
    return loader, f"; {workers} worker{'s' * (workers != 1)}: {why}{less}"


def fits_memory(needed_bytes: int, device: torch.device, world: World) -> bool:
    """Whether each process may keep so many bytes on `device`; they share the memory of a CPU."""
    sharers = world.local_size if device.type == "cpu" else 1
    return needed_bytes < MEMORY_SHARE * device_memory_bytes(device) / sharers


def common_side(source: Source, probes: int = 256) -> int | None:
    """The side in pixels if so many images of the dataset are all equal squares, else None."""
    if source.is_random or (source.pixels is None and source.paths is None):
        return None
    side = None
    for index in source.spread(probes).tolist():
        with suppress(BadImageError):  # loading says what is wrong
            height, width = source.read(index).shape[:2]
            if height != width or side not in (None, height):
                return None  # at once: each image is decoded for this
            side = height
    return side


def check_batch_size(batch_size: int, count: int, processes: int, accumulate: int) -> None:
    """Raise `UserError` unless `count` images fill a batch, and it divides into equal parts."""
    parts = processes * accumulate
    cure = f"take --data.batch-size {max(min(batch_size, count // 2) // parts, 1) * parts}"
    if batch_size > count:
        cure = cure if parts <= count else f"{parts} at least are needed"
        raise UserError(
            f"--data.batch-size {batch_size} is more than there are training images: {count}; "
            f"{cure}"
        )
    if batch_size % parts:
        raise UserError(
            f"--data.batch-size {batch_size} should be a multiple of {parts}: {processes} "
            f"processes x --optim.accumulate {accumulate}; {cure}"
        )
