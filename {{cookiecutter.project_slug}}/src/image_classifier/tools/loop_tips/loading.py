"""Tips on loading: the project's loader against torch's own, used in different ways."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...augment import build_augment
from ...data import Batch, Samples, prefetched
from ...extensions import of_tools
from ...runtime import platform
from ...runtime.seeding import images_of
from ..bench.timed_run import Setup, TimedRun, Variant, Variants, with_knobs
from ..bench.tips import streamed
from .gpu import on_gpu


def persistent_workers(setup: Setup) -> Variants:
    """Keep the workers, instead of starting new ones for each epoch."""
    ways = {"new in each epoch": {"persistent_workers": False}, "kept": {}}
    return compare_loaders(setup, ways)


@on_gpu
def pin_memory(setup: Setup) -> Variants:
    """Copy to the GPU from page-locked memory."""
    return compare_loaders(setup, {"pageable": {"pin_memory": False}, "pinned": {}})


@on_gpu
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
        """Image, label and index, by epoch and index in an order: see `images_of`."""
        epoch, drawn = key
        pixels = self.samples.source.empty(1, self.samples.size)
        self.samples.fill(pixels, epoch, np.array([drawn]))
        index = images_of(drawn, len(self.samples.source))
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
