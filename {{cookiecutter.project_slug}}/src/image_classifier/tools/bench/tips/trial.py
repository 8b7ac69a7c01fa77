"""One way to train, built to be timed: a config, and what no knob of it can say.

A trial makes the very steps of `train`, those after a frozen start, of which most of a training
consists; a test holds the two together.
"""

import contextlib
import copy
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from ....augment import Normalize, build_augment
from ....config import AugmentConfig, Config, DataConfig
from ....data import Batch, SharedMemoryLoader, TrainData, pins
from ....memory import split
from ....network import begin_network
from ....optim import build_loss, build_optimizer, build_schedule, set_lr
from ....precision import Precision
from ....runtime.distributed import World, join_world
from ....runtime.seeding import seed_everything, seed_layers
from ....train_state import TrainState

# What holds for the whole process, and what a config or a tip may change: how to read and set it.
SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    *(
        (
            lambda module=module, name=name: getattr(module, name),
            lambda value, module=module, name=name: setattr(module, name, value),
        )
        for module, name in (
            (torch.backends.cudnn, "benchmark"),
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.cudnn, "allow_tf32"),
            (torch.utils.deterministic, "fill_uninitialized_memory"),
        )
    ),
)


@contextmanager
def kept_switches() -> Iterator[None]:
    """A block after which the switches of the process are as they were before."""
    before = read_switches()
    try:
        yield
    finally:
        set_switches(before)


def read_switches() -> list[Any]:
    """How the switches stand."""
    return [read() for read, _ in SWITCHES]


def set_switches(values: list[Any]) -> None:
    """Set all of them."""
    for (_, write), value in zip(SWITCHES, values, strict=True):
        write(value)


class Trial:
    """A model in training: what a round of steps takes. A tip may change any part of it."""

    def __init__(
        self,
        config: Config,
        world: World,
        data: TrainData,
        change: Callable[["Trial"], object] | None = None,
    ) -> None:
        """As `config` says; then `change` is made to it.

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
            model = begin_network(config, data, normalize, precision)
            share = config.data.batch_size // world.size
            self.micro_batch = share // config.optim.accumulate
            self.loss_of = build_loss(config.optim, share, data.class_weights)
            optimizer = build_optimizer(config.optim, model)
            self.total_steps = data.steps_in(config.epochs)
            self.lr_at = build_schedule(config.optim, data.steps_per_epoch, self.total_steps)
            self.state = TrainState.start(config.optim, model, optimizer, precision)
            self.learner = world.parallelize(model, config.compute)
            self.loss = torch.zeros((), device=world.device)  # as a report adds it up
            self.batches = data.batches
            self.step = self.train_step
            self.after_step: Callable[[], object] = lambda: None
            self.around: Callable[[], AbstractContextManager] = nullcontext  # a round
            self.restart: Callable[[], object] | None = None  # what each epoch would begin with
            self.settling_steps = 0  # of each round, before the clock starts
            if change is not None:
                change(self)
            self.switches = read_switches()

    def train_step(self, batch: Batch) -> None:
        """What `train` does with a batch."""
        state = self.state
        set_lr(state.optimizer, self.lr_at(state.step % self.total_steps))
        seed_layers(self.config.seed, state.step, self.world.rank, self.world.device)
        for images, labels, is_last in split(self.augment(batch, state.step), self.micro_batch):
            self.learner.require_backward_grad_sync = is_last
            with state.precision.autocast():
                loss = self.loss_of(self.learner(images), labels)
            state.precision.backward(loss)
            self.loss += loss.detach()
        state.precision.step(state.optimizer)
        state.advance()

    def run(self, steps: int) -> float:
        """Make so many steps; the seconds that one took.

        The clock runs from the moment that the first batch is there to the one that the batch after
        the last is: as many batches are made as are computed with, whatever is made ahead.
        """
        with kept_switches(), self.around():
            set_switches(self.switches)
            called, start = time.perf_counter(), self.state.step
            if self.restart is not None:
                self.restart()
            batches = iter(self.batches(start, start + self.settling_steps + steps + 1))
            batch = next(batches)
            for step in range(-self.settling_steps, steps):
                if step == 0:
                    synchronize(self.world)
                    began = time.perf_counter()
                self.step(batch)
                self.after_step()
                batch = next(batches)
            synchronize(self.world)
            seconds = time.perf_counter() - began
            for _ in batches:  # to the end, so that no worker is left with something to do
                pass
        pace = seconds / steps
        if self.restart is not None:
            once = began - called - self.settling_steps * pace
            pace += once / self.data.steps_per_epoch
        return pace

    def close(self) -> None:
        """Let its workers end."""
        self.data.close()
        # Here, as the garbage collector would let a DataLoader wait 5 s for its workers.
        self.batches = self.data.batches


def synchronize(world: World) -> None:
    """Wait until the device is through."""
    if world.device.type != "cpu":
        torch.accelerator.synchronize(world.device)


class DataShelf:
    """Training images by the knobs that they depend on: opened and loaded once for many trials."""

    def __init__(self, world: World) -> None:
        """Still empty."""
        self.world = world
        self.known: dict[tuple[DataConfig, AugmentConfig, int], TrainData] = {}

    def open(self, config: Config) -> TrainData:
        """The images for a trial, with workers of its own.

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
            data.workers = config.data.workers
            share = config.data.batch_size // self.world.size
            data.loader = SharedMemoryLoader(
                data.loader.samples,
                share,
                data.workers,
                config.data.prefetch_batches,
                pins(self.world),
                note=data.bad_images.note,
            )
        return data


@dataclass(frozen=True)
class Variant:
    """One way to do what a tip is about."""

    config: Config  # no knob that a tip is about is `auto`
    change: Callable[[Trial], object] | None = None
    processes: int = 1  # that compute a batch together, each on a GPU of its own
    is_choice: bool = True  # nothing but speed depends on it, so it may be proposed


class Ranks:
    """Processes that share a trial: to `run` and to `close` like one."""

    def __init__(self, config: Config, size: int) -> None:
        """Start `size` of them."""
        context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
        job = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_PORT": "0",
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        }
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = []
        for rank, (_, theirs) in enumerate(pairs):
            place = job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=serve, args=(config, place, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)

    def run(self, steps: int) -> float:
        """Make so many steps; the seconds that one took, on the slowest.

        Raises:
            RuntimeError: if one of them failed.
        """
        try:
            for pipe in self.pipes:
                pipe.send(steps)
            return max(pipe.recv() for pipe in self.pipes)
        except (EOFError, OSError) as error:
            raise RuntimeError("one of the processes failed") from error

    def close(self) -> None:
        """Let them end."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=10)
            process.kill()


def serve(config: Config, place: dict[str, str], pipe: Connection) -> None:
    """Run rounds of a trial as one rank, as long as they are asked for."""
    os.environ |= place
    with join_world(config.compute) as world:
        trial = Trial(config, world, DataShelf(world).open(config))
        with contextlib.suppress(EOFError):
            while True:
                pipe.send(trial.run(pipe.recv()))
        trial.close()
