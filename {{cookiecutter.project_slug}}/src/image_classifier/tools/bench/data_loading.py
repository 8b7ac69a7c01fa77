"""Tips on how images reach the device."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...augment import build_augment
from ...config import Config
from ...data import DATASETS, Batch, Samples, fits_memory, prefetched, worker_counts
from ...extensions import find_tool, of_tools
from ...runtime import platform
from ...runtime.machine import num_cores
from .timed_run import Setup, TimedRun, Variant, Variants, by_knob, with_knobs

SAMPLE = "bench_sample"  # dataset of some of the images, and the folder of its prepared ones
PREPARED_IMAGES = 512  # that are prepared to measure it; at least two batches
RESIDENT_IMAGES = 2048  # that are decoded to measure it, where the preset streams them


def num_workers(setup: Setup) -> Variants:
    """Decode images in worker processes, and in enough of them."""
    config = streamed(setup.config)
    counts = {0, int(config.data.workers), *worker_counts(num_cores())}
    # This process has one of the GPUs.
    rule = {4: " (4 x GPUs)"} if setup.world.device.type == "cuda" else {}
    names = {f"{count}{rule.get(count, '')}": count for count in sorted(counts | {*rule})}
    return by_knob(config, "data.workers", names)


def prefetch(setup: Setup) -> Variants:
    """Decode several batches ahead of the one in use."""
    config = streamed(setup.config)
    depths = sorted({1, 4, 16, config.data.prefetch_batches})
    return by_knob(config, "data.prefetch_batches", {f"{n} ahead": n for n in depths})


def persistent_workers(setup: Setup) -> Variants:
    """Keep the workers, instead of starting new ones for each epoch."""
    ways = {"new in each epoch": {"persistent_workers": False}, "kept": {}}
    return compare_loaders(setup, ways)


def pin_memory(setup: Setup) -> Variants:
    """Copy to the GPU from page-locked memory."""
    return compare_loaders(setup, {"pageable": {"pin_memory": False}, "pinned": {}})


def non_blocking(setup: Setup) -> Variants:
    """Copy the next batch in a side stream while the model computes."""
    return compare_loaders(setup, {n: {"copy": n} for n in ("blocking", "side stream")})


def uint8(setup: Setup) -> Variants:
    """Hand over batches as bytes, and normalize on the device."""
    # Those of tools, such as policies, change pixels, which normalized images no longer are.
    without = {name: usual for name, usual in of_tools().items() if name.startswith("augment.")}
    setup = replace(setup, config=with_knobs(setup.config, without))
    return compare_loaders(setup, {"float32 from workers": {"as_float": True}, "uint8": {}})


def shared_batches(setup: Setup) -> Variants:
    """Let workers write into the batch itself, instead of collating images."""
    config = streamed(setup.config)
    return {"collated": Variant(config, use_dataloader), "shared": Variant(config)}


def streamed(config: Config) -> Config:
    """`config`, with images that workers decode for every batch."""
    workers = max(1, int(config.data.workers))
    return with_knobs(config, {"data.where": "stream", "data.workers": workers})


def compare_loaders(setup: Setup, ways: dict[str, dict[str, Any]]) -> Variants:
    """A variant for each named way to call `use_dataloader`."""
    config = streamed(setup.config)
    return {n: Variant(config, partial(use_dataloader, **way)) for n, way in ways.items()}


class PlainDataset(Dataset):
    """The same images, one by one."""

    def __init__(self, samples: Samples, as_float: bool) -> None:
        """As they are, or as normalized float32."""
        self.samples = samples
        self.as_float = as_float
        largest = torch.iinfo(samples.source.dtype).max
        source = samples.source
        self.mean = largest * torch.tensor(source.mean)
        self.std = largest * torch.tensor(source.std)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        """Image, label and index, by epoch and index."""
        epoch, index = key
        pixels = self.samples.empty(1)
        self.samples.fill(pixels, epoch, np.array([index]))
        image = (pixels[0].float() - self.mean) / self.std if self.as_float else pixels[0]
        return image, self.samples.source.labels[index], index


def use_dataloader(
    run: TimedRun, *, as_float: bool = False, copy: str = "non-blocking", **options: bool
) -> None:
    """Load batches by a standard DataLoader with `options`; `copy` is how they reach the device."""
    data = run.data
    device = run.world.device
    batch_sampler: list[list[tuple[int, int]]] = []
    usual = {"persistent_workers": True, "pin_memory": device.type == "cuda"}
    loader = DataLoader(
        PlainDataset(data.loader.samples, as_float),
        batch_sampler=batch_sampler,
        num_workers=data.workers,
        multiprocessing_context=platform.START_METHOD,
        **(usual | options),
    )

    def batches(start: int, stop: int) -> Iterator[Batch]:
        batch_sampler[:] = [
            [(epoch, index) for index in indices.tolist()]
            for epoch, indices in data.places(start, stop)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about forks and numbers of workers
            host_batches = iter(loader)
        if copy == "side stream":
            yield from prefetched(host_batches, run.world)
        for host in host_batches:
            yield Batch(*(part.to(device, non_blocking=copy == "non-blocking") for part in host))

    run.batches = batches
    run.restarts_workers = not loader.persistent_workers
    if as_float:
        plain = partial(Tensor.contiguous, memory_format=run.normalize.memory_format)
        config = run.config
        run.augment = build_augment(config.augment, data, plain, config.seed)


def resident(setup: Setup) -> Variants | str:
    """Keep all images in memory, on the device if they fit."""
    config = setup.config
    source = setup.data.source
    count = len(source)
    is_same = config.augment.crop != "resized"  # else the pixels change
    if not is_same and find_tool("crops", "device-crops") is None:
        return "needs a tool that is not here: pretuned add device-crops"
    if config.data.where == "stream" and source.pixels is None and count > RESIDENT_IMAGES:
        count = max(RESIDENT_IMAGES, config.data.batch_size)
        config = with_knobs(config, {"data.limit": count})
    needed_bytes = count * config.data.image_size**2 * source.pixel_bytes
    homes = {"host": torch.device("cpu"), "device": setup.world.device}
    fitting = {
        where: where
        for where, device in homes.items()
        if where == config.data.where or fits_memory(needed_bytes, device, setup.world)
    }
    if not fitting:
        return f"{needed_bytes / 2**30:,.0f} GB of images, too much for memory"
    stays = by_knob(config, "data.where", fitting, is_choice=is_same)
    return {"stream": Variant(streamed(config), is_choice=is_same)} | stays


def prepared(setup: Setup) -> Variants | str:
    """Write photographs once at the size that training needs, and read those."""
    source = setup.data.source
    data = setup.config.data
    config = streamed(setup.config)
    if source.paths is None:
        return "needs photographs in files; these images are in memory"
    if source.recipe:
        caches = {"files": "off", f"prepared, {source.recipe}": data.cache}
        return by_knob(config, "data.cache", caches, is_choice=False)
    preparing = find_tool("prepare", "prepare")
    if preparing is None:
        return "needs a tool that is not here: pretuned add prepare"
    count = min(len(source), max(PREPARED_IMAGES, 2 * data.batch_size))
    print(f"preparing {count:,} of the images, to measure it", flush=True)
    DATASETS[SAMPLE] = lambda *_: source.thinned(count)
    config = with_knobs(config, {"data.name": SAMPLE, "data.limit": 0})
    kind = data.channels, data.bits
    forms = ("jpeg", "raw") if kind == (3, 8) else ("raw",)
    caches = {f"prepared, {form}": str(Path(config.run.dir, SAMPLE, form)) for form in forms}
    variants = by_knob(config, "data.cache", {"files": "off"} | caches, is_choice=False)
    usual = preparing.Recipe
    for form in forms:
        recipe = usual(form, max(usual.side, data.image_size), usual.quality, *kind)
        cached = variants[f"prepared, {form}"].config.data
        preparing.prepare_images(cached, ("train",), recipe)
    return variants
