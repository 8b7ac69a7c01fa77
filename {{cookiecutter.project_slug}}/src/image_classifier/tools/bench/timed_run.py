"""A training run, built to be timed: it makes the steps of `train`, which a test compares."""

import copy
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ...augment import build_augment
from ...config import AugmentConfig, Config, DataConfig
from ...data import Batch, TrainData, open_loader
from ...optim import build_loss, build_optimizer, build_schedule, set_lr
from ...precision import Precision
from ...preprocess import Normalize
from ...runtime.distributed import World, join_world
from ...runtime.seeding import seed_everything, seed_layers
from ...train import init_model, train_step, wrap_ddp
from ...train_state import TrainState

CUDNN = torch.backends.cudnn
FLAGS = [(CUDNN, name) for name in ("benchmark", "deterministic", "allow_tf32")]
FLAGS += [(torch.utils.deterministic, "fill_uninitialized_memory")]


def read_switches() -> list[Any]:
    """The process-wide settings of torch that a config or a tip may change."""
    return [
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        *(getattr(owner, name) for owner, name in FLAGS),
    ]


def set_switches(values: list[Any]) -> None:
    """Set all of them."""
    threads, precision, deterministic, *flags = values
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)
    for (owner, name), value in zip(FLAGS, flags, strict=True):
        setattr(owner, name, value)


@contextmanager
def kept_switches() -> Iterator[None]:
    """A block that leaves the settings as they were."""
    before = read_switches()
    try:
        yield
    finally:
        set_switches(before)


class TimedRun:
    """A model in training; `run` times some of its steps. A tip may replace any attribute."""

    def __init__(
        self,
        config: Config,
        world: World,
        data: TrainData,
        change: Callable[["TimedRun"], object] | None = None,
    ) -> None:
        """Build what `config` says, and make a tip's `change` to it.

        Raises:
            UserError: if there is no such model, or the device can't do what is asked for.
        """
        self.config, self.world, self.data = config, world, data
        with kept_switches():
            seed_everything(config.seed, config.deterministic, world.device)
            precision = Precision(config.precision, config.compute, config.optim, world.device)
            self.normalize = normalize = Normalize(
                data.source, config.data.max_size, precision, config.augment
            )
            self.augment = build_augment(config.augment, data, normalize, world, config.seed)
            model = init_model(config, data, normalize)
            model = model.to(world.device, memory_format=precision.memory_format)
            ema = copy.deepcopy(model).requires_grad_(False) if config.optim.ema_decay else None
            if config.compute.compile:
                model.compile()
            share = config.data.batch_size // world.size
            self.micro_batch_size = share // config.optim.accumulate
            self.loss_fn = build_loss(config.optim, share, data.class_weights)
            optimizer = build_optimizer(config.optim, model)
            self.total_steps = data.steps_in(config.epochs)
            self.lr_at = build_schedule(config.optim, data.steps_per_epoch, self.total_steps)
            self.state = TrainState(model, optimizer, precision, ema, config.optim.ema_decay)
            self.ddp_model = wrap_ddp(model, world)
            self.loss = torch.zeros((), device=world.device)  # summed, as the log does
            self.batches: Callable[[int, int], Iterator[Any]] = data.batches
            self.step: Callable[[Any], None] = self.train_step
            self.after_step: Callable[[], object] = lambda: None
            self.around: Callable[[], AbstractContextManager] = nullcontext  # of a round
            self.restarts_workers = False  # `batches` starts them, as each epoch would
            self.uncounted_steps = 0  # at the start of each round
            if change is not None:
                change(self)
            self.switches = read_switches()

    def train_step(self, batch: Batch) -> None:
        """Train on one batch, as `train` does."""
        state = self.state
        set_lr(state.optimizer, self.lr_at(state.step % self.total_steps))
        seed_layers(self.config.seed, state.step, self.world.rank, self.world.device)
        images, labels = self.augment(batch, state.step)
        self.loss += train_step(
            self.ddp_model, images, labels, self.loss_fn, state.precision, self.micro_batch_size
        )
        state.precision.step(state.optimizer)
        state.advance()

    def run(self, steps: int) -> float:
        """Train for `steps`; the seconds per step.

        The clock runs from when the first batch is there to when the one after the last is, so that
        as many batches are loaded as are trained on, however many are loaded ahead.
        """
        with kept_switches(), self.around():
            set_switches(self.switches)
            called, start = time.perf_counter(), self.state.step
            batches = iter(self.batches(start, start + self.uncounted_steps + steps + 1))
            batch = next(batches)
            for step in range(-self.uncounted_steps, steps):
                if step == 0:
                    synchronize(self.world)
                    began = time.perf_counter()
                self.step(batch)
                self.after_step()
                batch = next(batches)
            synchronize(self.world)
            seconds = (time.perf_counter() - began) / steps
            for _ in batches:  # leaves the workers idle
                pass
        if self.restarts_workers:
            seconds += (began - called) / self.data.steps_per_epoch
        return seconds

    def close(self) -> None:
        """End the workers."""
        # A DataLoader that the garbage collector finds would wait for its workers for 5 s.
        self.batches = self.data.batches
        self.data.close()


def synchronize(world: World) -> None:
    """Wait until the device has finished."""
    if world.device.type != "cpu":
        torch.accelerator.synchronize(world.device)


class DatasetCache:
    """Training images by the knobs that they depend on: opened and loaded once for many runs."""

    def __init__(self, world: World) -> None:
        """Start empty."""
        self.world = world
        self.known: dict[tuple[DataConfig, AugmentConfig, int], TrainData] = {}

    def open(self, config: Config) -> TrainData:
        """The images for one run, with workers of its own.

        Raises:
            UserError: if the images or the batch size are unusable.
        """
        plain = replace(config.data, workers=0, prefetch_batches=1)
        key = plain, config.augment, config.optim.accumulate
        if key not in self.known:
            data = TrainData(replace(config, data=plain), self.world)
            found = replace(plain, where=data.where), *key[1:]
            self.known[key] = self.known[found] = data
        data = copy.copy(self.known[key])
        data.data = config.data
        if data.where == "stream":
            assert config.data.workers != "auto"
            samples, note = data.loader.samples, data.bad_images.note
            data.loader, _ = open_loader(samples, config.data, self.world, note)
            data.workers = data.loader.num_workers
        return data


class MultiProcessRun:
    """A run on several GPUs, one process each; `run` and `close` as of a `TimedRun`."""

    def __init__(self, config: Config, size: int) -> None:
        """Start `size` processes."""
        job = {"MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
        job |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.ranks = [
            ProcessPoolExecutor(
                1, context, start_rank, (config, job | {"RANK": str(n), "LOCAL_RANK": str(n)})
            )
            for n in range(size)
        ]

    def run(self, steps: int) -> float:
        """Train for `steps`; the seconds per step of the slowest process."""
        futures = [rank.submit(run_rank, steps) for rank in self.ranks]
        return max(future.result() for future in futures)

    def close(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            rank.shutdown(wait=False, cancel_futures=True)


# In a process of a MultiProcessRun: its part, and the world that it is in to its end.
RANK_RUN: list[TimedRun] = []
WORLD = ExitStack()


def start_rank(config: Config, variables: dict[str, str]) -> None:
    """Join the other processes and build the run."""
    os.environ |= variables
    world = WORLD.enter_context(join_world(config.compute))
    RANK_RUN.append(TimedRun(config, world, DatasetCache(world).open(config)))


def run_rank(steps: int) -> float:
    """`TimedRun.run` of this process."""
    return RANK_RUN[0].run(steps)
