"""Chooses where images are kept, and how many workers decode how many batches ahead.

Options decide, or else the memory of this machine and a short measurement.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..config import AugmentConfig, DataConfig, RunConfig
from ..errors import UserError
from ..runtime.distributed import World
from ..runtime.machine import device_memory_bytes, host_memory_bytes, num_cores
from .datasets.source import Source
from .decode import image_size
from .samples import Samples
from .shared_memory import PART_SIZES, SharedMemoryLoader, slots_bytes

MEMORY_SHARE = 0.4  # of the free memory that resident images may take
PROBE_SECONDS = 0.5  # for each number of workers that is tried
WORTH_SECONDS = 5.0  # decoding time of an epoch that makes a measurement worthwhile
PROBED_TOGETHER = 64  # images of a batch while probing
GOOD_ENOUGH = 0.95  # of the highest rate: more workers cost memory for nothing


def choose_where(
    data: DataConfig, augment: AugmentConfig, source: Source, side: int | None, world: World
) -> tuple[str, str]:
    """Where the training images are kept (device, host or stream), and why."""
    if data.where != "auto":
        return data.where, "as --data.where says"
    if augment.policy != "none":
        return "stream", f"{augment.policy} works on single images"
    # Never by memory where it would change the pixels: the device cuts crops otherwise.
    if augment.crop == "resized" or side is None:
        return "stream", "crops are cut from the whole image"
    needed = len(source) * side**2 * 3
    megabytes = f"{len(source):,} images of {side} x {side} take {needed / 2**20:,.0f} MB"
    if world.all_true(fits_device(needed, world)):
        return "device", megabytes
    if world.all_true(fits_host(needed, world)):
        return "host", f"{megabytes}, too much for the device"
    return "stream", f"{megabytes}, too much for memory"


def open_loader(
    samples: Samples,
    data: DataConfig,
    world: World,
    note: Callable[[int, str], object],
    *,
    timeout_seconds: float = RunConfig.timeout_seconds,
    batch_size: int = 0,
) -> tuple[SharedMemoryLoader, str]:
    """A loader with workers and prefetching as `data` says or this machine allows, and why so.

    Args:
        samples: Decodes the images.
        data: Its `workers`, `prefetch_batches`, `batch_size`, and sizes of images.
        world: The processes that share the batches and this machine.
        note: Called with the index of an unreadable image and the reason; it may raise.
        timeout_seconds: How long to wait for workers that show no sign of life.
        batch_size: Images per batch; by default this rank's share of `data.batch_size`.

    Raises:
        UserError: if there is no memory for a single batch.
    """
    workers, why = choose_workers(data, samples, world)
    depth, less = choose_depth(data, workers, world)
    size = batch_size or max(1, data.batch_size // world.size)
    pin = world.device.type == "cuda"
    loader = SharedMemoryLoader(
        samples, size, workers, depth, pin, note=note, timeout_seconds=timeout_seconds
    )
    return loader, f"; {workers} worker{'s' * (workers != 1)}: {why}{less}"


def choose_workers(data: DataConfig, samples: Samples, world: World) -> tuple[int, str]:
    """The number of worker processes of this process, and why: as asked for, or as measured."""
    if data.workers != "auto":
        return data.workers, "as --data.workers says"
    cores = max(1, num_cores() // world.local_size)
    # On a CPU the model needs cores too. A worker gets at least one part of a batch.
    most = max(1, cores // 2) if world.device.type == "cpu" else cores
    most = min(most, len(samples.source) // PART_SIZES[0])
    seconds = seconds_per_image(samples) * len(samples.source) / world.size
    if seconds < WORTH_SECONDS:
        return most, f"decoding takes only {seconds:.1f} s per epoch"
    rates = {count: round(rate(samples, count)) for count in worker_counts(most)}
    highest = max(rates.values())
    chosen = min(count for count, images in rates.items() if images >= GOOD_ENOUGH * highest)
    table = ", ".join(f"{count}: {images:,}" for count, images in rates.items())
    half = "; at most half of the cores, as the model needs them" * (most < cores)
    return chosen, f"the fewest near the best of images/s measured: {table}{half}"


def worker_counts(most: int) -> list[int]:
    """The numbers of workers to try: `most`, and the powers of two below it."""
    return [2**power for power in range(10) if 2**power < most] + [most]


def seconds_per_image(samples: Samples) -> float:
    """Decoding time on one core, measured on 8 images spread over the dataset."""
    picked = torch.linspace(0, len(samples.source) - 1, 8).long().numpy()
    out = torch.empty((len(picked), samples.size, samples.size, 3), dtype=torch.uint8)
    samples.fill(out[:1], 0, picked[:1])  # imports what decoding needs
    began = time.perf_counter()
    samples.fill(out, 0, picked)
    return (time.perf_counter() - began) / len(picked)


def rate(samples: Samples, workers: int) -> float:
    """Images per second that this many workers decode, without their start."""
    loader = SharedMemoryLoader(samples, PROBED_TOGETHER, workers, prefetch_batches=4, pin=False)
    order = torch.randperm(len(samples.source), generator=torch.Generator().manual_seed(0))
    batches = order.split(PROBED_TOGETHER)
    end: list[float] = []

    def places() -> Iterator[tuple[int, Tensor]]:
        number = 0
        while not end or time.perf_counter() < end[0]:
            yield 0, batches[number % len(batches)]
            number += 1

    ready = loader.batches(places())
    next(ready)
    began, filled = time.perf_counter(), loader.num_filled
    end.append(began + PROBE_SECONDS)
    for _ in ready:
        pass
    seconds = time.perf_counter() - began
    loader.close()
    return (loader.num_filled - filled) / seconds


def fits_device(needed_bytes: int, world: World) -> bool:
    """Whether so many bytes may stay on the device; processes share the memory of a CPU."""
    sharers = world.local_size if world.device.type == "cpu" else 1
    return needed_bytes < MEMORY_SHARE * device_memory_bytes(world.device) / sharers


def fits_host(needed_bytes: int, world: World) -> bool:
    """Whether each process of this machine may keep so many bytes in host memory."""
    return needed_bytes < MEMORY_SHARE * host_memory_bytes() / world.local_size


def choose_depth(data: DataConfig, workers: int, world: World) -> tuple[int, str]:
    """The number of batches to decode ahead, and why, if memory holds fewer than asked for.

    Training and evaluation each have their own slots.

    Raises:
        UserError: if there is no memory for a single one.
    """
    share = max(1, data.batch_size // world.size)

    def needed(depth: int) -> int:
        sizes = data.image_size, data.eval_size
        return world.local_size * sum(slots_bytes(share, size, workers, depth) for size in sizes)

    free, depth = host_memory_bytes(), data.prefetch_batches
    while depth > 1 and needed(depth) > MEMORY_SHARE * free:
        depth -= 1
    if needed(depth) > free:
        raise UserError(
            f"batches of {data.batch_size} images of {data.image_size} x {data.image_size} need "
            f"{needed(depth) / 2**20:,.0f} MB of memory, {free / 2**20:,.0f} MB are free: "
            "lower --data.batch-size or --data.image-size"
        )
    if depth == data.prefetch_batches:
        return depth, ""
    wanted = f"{needed(data.prefetch_batches) / 2**20:,.0f} MB for {data.prefetch_batches}"
    batches = "1 batch" if depth == 1 else f"{depth} batches"
    return depth, f"; {batches} ahead: {wanted} are too many of {free / 2**20:,.0f} MB"


def common_side(source: Source, probes: int = 256) -> int | None:
    """The side in pixels if all images (or all probed files) are equal squares, else None."""
    if source.pixels is not None:
        height, width = source.pixels.shape[1:3]
        return height if height == width else None
    if source.sizes is not None:
        height, width = source.sizes[0].tolist()
        return height if (source.sizes == height).all() else None
    if source.paths is None:
        return None
    count = len(source)
    picked = {count * probe // probes for probe in range(probes)}
    sizes = {image_size(source.paths[index]) for index in sorted(picked)} - {None}
    if len(sizes) != 1:
        return None
    height, width = sizes.pop()  # type: ignore[misc]
    return height if height == width else None


def check_batch_size(batch_size: int, count: int, processes: int, accumulate: int) -> None:
    """Check that `count` images fill a batch, and that it divides into equal parts.

    Raises:
        UserError: if not.
    """
    if batch_size > count:
        raise UserError(
            f"--data.batch-size {batch_size} is more than there are training images: {count}"
        )
    parts = processes * accumulate
    if batch_size % parts:
        below = batch_size // parts * parts
        near = " or ".join(str(size) for size in (below, below + parts) if size)
        raise UserError(
            f"--data.batch-size {batch_size} can't be divided into {parts} equal parts "
            f"({processes} processes x --optim.accumulate {accumulate}); take {near}"
        )
