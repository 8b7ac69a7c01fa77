"""Variants of training, and runs that are built to be timed."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...config import Config
from ...data import TrainData, open_loader
from ...optim import build_schedule
from ...runtime.config_dict import flatten, unflatten
from ...runtime.distributed import World
from ...runtime.seeding import seed_everything
from ...train import Training


@dataclass(frozen=True)
class Setup:
    """The user's preset, images and machine."""

    config: Config  # of one process; no knob that a tip changes is `auto`
    world: World
    data: TrainData  # the images as the preset uses them


Change = Callable[["TimedRun"], object]  # of a run, once it is built


@dataclass
class Variant:
    """One way to train, and what was measured of it."""

    config: Config
    change: Change | None = None  # where no knob does it
    start: Callable[[Config], Any] | None = None  # another run, which has `run` and `close`, too
    is_choice: bool = True  # changes nothing but speed, so it may be recommended
    tells_memory: bool = False  # of a step, too, unless the model is compiled
    seconds: list[float] = field(default_factory=list)  # per step, of each round
    failure: str = ""  # why it was not measured
    peak_bytes: int = 0  # of memory in a step

    @property
    def rate(self) -> float | None:
        """Images per second; None if it was not measured."""
        return self.config.data.batch_size / median(self.seconds) if self.seconds else None


Variants = dict[str, Variant]  # by name; the others are compared with the first


def with_knobs(config: Config, knobs: dict[str, Any]) -> Config:
    """`config` with other values of knobs, which have dotted names."""
    return unflatten(flatten(config) | knobs)


def by_knob(config: Config, knob: str, values: dict[str, Any], **about: bool) -> Variants:
    """A variant for each of the named values of a knob; `about` are fields of all of them."""
    return {name: Variant(with_knobs(config, {knob: v}), **about) for name, v in values.items()}


def read_switches() -> list[partial]:
    """What sets the process-wide settings of torch that variants change to what they are now."""
    cudnn = torch.backends.cudnn
    return [
        partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
        partial(setattr, cudnn, "benchmark", cudnn.benchmark),
        partial(setattr, cudnn, "allow_tf32", cudnn.allow_tf32),
    ]


@contextmanager
def kept_switches() -> Iterator[None]:
    """A block that leaves the settings as they were."""
    before = read_switches()
    try:
        yield
    finally:
        for switch in before:
            switch()


class TimedRun(Training):
    """A model in training; `run` times some of its steps. A tip may replace any attribute."""

    def __init__(
        self, config: Config, world: World, data: TrainData, change: Change | None = None
    ) -> None:
        """Build what `config` says, and make a tip's `change` to it."""
        seed_everything(config.seed, config.deterministic, world.device)
        share = config.data.batch_size // world.size
        super().__init__(config, world, data, share)
        self.begin()
        self.data = data
        self.micro_batch_size = share // config.optim.accumulate
        self.total_steps = data.steps_in(config.epochs)
        self.lr_at = build_schedule(config.optim, data.steps_per_epoch, self.total_steps)
        self.loss = torch.zeros((), device=world.device)  # summed, as the log does
        self.batches: Callable[[int, int], Iterator[Any]] = data.batches
        self.train_on: Callable[[Any], None] = self.sum_loss
        self.after_step: Callable[[], object] = lambda: None
        self.around: Callable[[], AbstractContextManager] = nullcontext  # of a round
        self.restarts_workers = False  # `batches` starts them, as each epoch would
        if change is not None:
            change(self)
        self.switches = read_switches()

    def sum_loss(self, batch: Any) -> None:  # noqa: ANN401 - what `batches` yields
        """Train on one batch."""
        lr = self.lr_at(self.state.step % self.total_steps)
        self.loss += self.step(batch, lr, self.micro_batch_size)[1]

    def run(self, steps: int) -> float:
        """Train for `steps`; the seconds per step.

        The clock runs from when the first batch is there to when the one after the last is, so that
        as many batches are loaded as are trained on, however many are loaded ahead.
        """
        synchronize = torch.get_device_module(self.world.device).synchronize
        for switch in self.switches:
            switch()
        with self.around():
            called = time.perf_counter()
            start = self.state.step
            batches = iter(self.batches(start, start + steps + 1))
            batch = next(batches)
            synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                self.train_on(batch)
                self.after_step()
                batch = next(batches)
            synchronize()
            seconds = (time.perf_counter() - began) / steps
            for _ in batches:  # leaves the workers idle
                pass
        return seconds + self.restarts_workers * (began - called) / self.data.steps_per_epoch

    def close(self) -> None:
        """End the workers."""
        # A DataLoader that the garbage collector finds would wait for its workers for 5 s.
        self.batches = self.data.batches
        self.data.close()


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of tensors, not those of kernels; `peak` is the most at a time."""

    def __init__(self) -> None:
        """Start without tensors."""
        super().__init__()
        self.alive = WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Call an operation of torch."""
        result = func(*args, **(kwargs or {}))
        found = filter(torch.is_tensor, tree_leaves(result))
        given = filter(torch.is_tensor, tree_leaves((args, kwargs)))
        # Not views, nor what is changed in place.
        self.alive |= {x.untyped_storage() for x in found} - {x.untyped_storage() for x in given}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.alive))
        return result


class DatasetCache:
    """Training images by the knobs that they depend on: loaded once, on a device while in use."""

    def __init__(self, world: World) -> None:
        """Start empty."""
        self.world = world
        self.known: WeakValueDictionary[tuple, TrainData] = WeakValueDictionary()
        self.kept: list[TrainData] = []  # all that are in host memory, or streamed

    def open(self, config: Config) -> TrainData:
        """The images for one run, with workers of its own."""
        plain = replace(config.data, workers=0, prefetch_batches=1)
        key = plain, config.augment, config.optim.accumulate
        if (whole := self.known.get(key)) is None:
            whole = TrainData(replace(config, data=plain), self.world)
            self.known[key] = self.known[replace(plain, where=whole.where), *key[1:]] = whole
            self.kept += [whole] * (whole.where != "device")
        data = copy.copy(whole)
        data.whole = whole  # it stays as long as a run has it
        data.data = config.data
        if data.where == "stream":
            data.loader, _ = open_loader(data.loader.samples, config.data, self.world, data.note)
            data.workers = data.loader.num_workers
        return data
