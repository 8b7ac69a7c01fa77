"""Chooses how many workers decode: as the option says, or by the cores and a measurement."""

import itertools
import time
from contextlib import closing

import torch

from ..config import DataConfig
from ..runtime.distributed import World
from ..runtime.machine import num_cores
from .samples import Samples
from .shared_memory import PART_SIZES, SharedMemoryLoader

PROBE_SECONDS = 0.5  # for each number of workers that is tried
WORTH_SECONDS = 5.0  # decoding time of an epoch that makes a measurement worthwhile
PROBED_TOGETHER = 64  # images of a batch while probing
GOOD_ENOUGH = 0.95  # of the highest rate: more workers cost memory for nothing


def choose_workers(data: DataConfig, samples: Samples, world: World) -> tuple[int, str]:
    """The number of worker processes of this process, and why.

    Unless `data` says it, the fewest that decode about as fast as more do.
    """
    if data.workers != "auto":
        return data.workers, "as --data.workers says"
    cores = max(1, num_cores() // world.local_size)
    # On a CPU the model needs cores too. A worker gets at least one part of a batch.
    most = max(1, cores // 2) if world.device.type == "cpu" else cores
    most = min(most, len(samples.source) // PART_SIZES[0])
    if most <= 1:
        return most, "the most that the cores and the number of images allow"
    seconds = seconds_per_image(samples) * len(samples.source) / world.size
    if seconds < WORTH_SECONDS:
        return most, f"decoding takes only {seconds:.1f} s per epoch"
    rates = {count: round(rate(samples, count)) for count in worker_counts(most)}
    chosen = min(n for n in rates if rates[n] >= GOOD_ENOUGH * max(rates.values()))
    table = ", ".join(f"{count}: {images:,}" for count, images in rates.items())
    return chosen, f"the fewest near the best of images/s measured: {table}"


def worker_counts(most: int) -> list[int]:
    """The numbers of workers to try: `most`, and the powers of two below it."""
    return [2**power for power in range(10) if 2**power < most] + [most]


def seconds_per_image(samples: Samples) -> float:
    """Decoding time on one core, measured on 8 images spread over the dataset."""
    picked = samples.source.spread(8).numpy()
    out = samples.source.empty(len(picked), samples.size)
    samples.fill(out[:1], 0, picked[:1])  # imports what decoding needs
    began = time.perf_counter()
    samples.fill(out, 0, picked)
    return (time.perf_counter() - began) / len(picked)


def rate(samples: Samples, workers: int) -> float:
    """Images per second that this many workers decode, without their start."""
    size = min(PROBED_TOGETHER, len(samples.source))
    order = torch.randperm(len(samples.source), generator=torch.Generator().manual_seed(0))
    # Only the last batch of a pass may be smaller than the others.
    batches = itertools.cycle((0, part) for part in order.unfold(0, size, size))
    with closing(SharedMemoryLoader(samples, size, workers, 4, pin=False)) as loader:
        decoded = loader.begin(batches)
        next(decoded)
        began = time.perf_counter()
        filled = loader.num_filled
        seconds = 0.0
        while seconds < PROBE_SECONDS:
            next(decoded)
            seconds = time.perf_counter() - began
        return (loader.num_filled - filled) / seconds
