"""How many workers decode images: as asked for, or as measured on this machine.

The measurement takes a few seconds, once for a dataset on a machine; it is kept in `workers.json`
in the folder of the dataset's cache.
"""

import contextlib
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import DataConfig
from ..runtime.distributed import World
from ..runtime.files import read_object, write_json
from ..runtime.machine import device_name, num_cores
from .datasets.prepared import cache_folder
from .samples import Samples
from .stream import FORKS, Stream

PROBE_SECONDS = 0.5  # for each number of workers that is tried
WORTH_SECONDS = 5.0  # of decoding in an epoch, below which any number of workers will do
PROBED_TOGETHER = 64  # images of a batch while probing
GOOD_ENOUGH = 0.95  # of the highest rate: more workers than that takes cost memory for nothing


def choose_workers(
    data: DataConfig, samples: Samples, world: World, remembers: bool = True
) -> tuple[int, str]:
    """Workers of this process, and why so many; what is measured for it is kept, by default."""
    if samples.policy is not None and not FORKS:
        return 0, "a policy draws random numbers, and threads would take each other's"
    if data.workers != "auto":
        return data.workers, "as --data.workers says"
    cores = max(1, num_cores() // world.local_size)
    # On a CPU the model needs cores too.
    most = max(1, cores // 2) if world.device.type == "cpu" else cores
    seconds = seconds_per_image(samples) * len(samples.source) / world.size
    if seconds < WORTH_SECONDS:
        return most, f"{seconds:.1f} s of decoding in an epoch are not worth measuring"
    memory = cache_folder(data) / "workers.json"
    key = machine_key(data, samples, world)
    known = recall(memory) if remembers else {}
    tried = candidates(most, cores, world)
    rates = rates_in(known.get(key))
    if [*rates] != tried:
        rates = {count: round(rate(samples, count)) for count in tried}
        known[key] = {str(count): images for count, images in rates.items()}
        if world.is_main and remembers:
            remember(memory, known)
    allowed = {count: images for count, images in rates.items() if count <= most}
    highest = max(allowed.values())
    chosen = min(n for n, images in allowed.items() if images >= GOOD_ENOUGH * highest)
    table = ", ".join(
        f"{count}{' (4 x GPUs)' * (count == 4 and world.device.type == 'cuda')}: {images:,}"
        for count, images in rates.items()
    )
    half = "; at most half of the cores, as the model needs them" * (most < cores)
    return chosen, f"the fewest that are near the best of images/s measured: {table}{half}"


def candidates(most: int, cores: int, world: World) -> list[int]:
    """Numbers of workers to try: powers of two up to all cores, and the rule of 4 for each GPU."""
    powers = {2**power for power in range(10) if 2**power <= cores}
    rule = {4} if world.device.type == "cuda" else set()
    return sorted(powers | {most, cores} | rule)


def seconds_per_image(samples: Samples) -> float:
    """What one core takes for an image, from a handful spread over the dataset."""
    picked = torch.linspace(0, len(samples.source) - 1, 8).long().numpy()
    out = torch.empty((len(picked), samples.size, samples.size, 3), dtype=torch.uint8)
    samples.fill(out[:1], 0, picked[:1])  # imports what decoding needs
    began = time.perf_counter()
    samples.fill(out, 0, picked)
    return (time.perf_counter() - began) / len(picked)


def rate(samples: Samples, workers: int) -> float:
    """Images per second that so many workers make, once they are under way."""
    stream = Stream(samples, PROBED_TOGETHER, workers, prefetch_batches=4, pin=False)
    order = torch.randperm(len(samples.source), generator=torch.Generator().manual_seed(0))
    batches = order.split(PROBED_TOGETHER)
    end: list[float] = []

    def places() -> Iterator[tuple[int, Tensor]]:
        number = 0
        while not end or time.perf_counter() < end[0]:
            yield 0, batches[number % len(batches)]
            number += 1

    ready = stream.batches(places())
    next(ready)
    began, filled = time.perf_counter(), stream.num_filled
    end.append(began + PROBE_SECONDS)
    for _ in ready:
        pass
    seconds = time.perf_counter() - began
    stream.close()
    return (stream.num_filled - filled) / seconds


def machine_key(data: DataConfig, samples: Samples, world: World) -> str:
    """What the measurement depends on."""
    return ", ".join(
        (
            platform.node(),
            device_name(world.device),
            f"{num_cores()} cores for {world.local_size} processes",
            f"{samples.source.fingerprint()} at {data.image_size} pixels",
            data.decode,
        )
    )


def recall(memory: Path) -> dict[str, Any]:
    """What was measured before."""
    with contextlib.suppress(OSError):
        return read_object(memory)
    return {}


def rates_in(found: Any) -> dict[int, int]:  # noqa: ANN401 - whatever a file may hold
    """Images per second by number of workers, if that is what was found; else nothing."""
    with contextlib.suppress(AttributeError, ValueError, TypeError, OverflowError):
        rates = {int(count): int(images) for count, images in found.items()}
        return rates if min(rates.values(), default=0) > 0 else {}
    return {}


def remember(memory: Path, known: dict[str, Any]) -> None:
    """Keep what was measured, where that is possible."""
    with contextlib.suppress(OSError):  # a folder that can't be written: it is measured again
        memory.parent.mkdir(exist_ok=True)
        write_json(memory, known)
