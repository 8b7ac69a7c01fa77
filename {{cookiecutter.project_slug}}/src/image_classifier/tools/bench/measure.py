"""Variants take turns, and ratios of times from the same round are compared.

So whatever else the machine does falls on all variants alike.
"""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from time import monotonic

import torch

from ...runtime.distributed import World
from .setup import Variants
from .timed_run import DatasetCache, MultiProcessRun, TimedRun

MIN_EFFECT = 0.02  # a smaller gain counts as none
CONFIDENCE = 0.9  # of the interval for the median


@dataclass(frozen=True)
class Budget:
    """How long to measure."""

    row_seconds: float  # per tip, about
    round_seconds: float  # per turn of a variant, at least
    rounds: tuple[int, int] = (5, 25)  # fewest and most
    warmup_seconds: float = 0.3  # after the first step
    step_seconds: float = math.inf  # longest step; longer ones are measured with fewer images
    total_seconds: float = math.inf  # for all tips; those that don't fit in are skipped


QUICK = Budget(
    row_seconds=10, round_seconds=0.2, rounds=(5, 11), step_seconds=0.15, total_seconds=95
)
FULL = Budget(row_seconds=40, round_seconds=1.0, rounds=(11, 25), warmup_seconds=2)


@dataclass(frozen=True)
class Gain:
    """How many times as fast one variant is as another: the median and its interval."""

    median: float
    low: float
    high: float

    @property
    def is_effect(self) -> bool:
        """Whether it is more than noise, and large enough to count."""
        return not self.low <= 1 <= self.high and abs(self.median - 1) >= MIN_EFFECT

    @property
    def is_faster(self) -> bool:
        """Whether it is an effect for the better."""
        return self.is_effect and self.median > 1

    def __str__(self) -> str:
        """`1.25 x (1.20 .. 1.31)`, or no effect."""
        interval = f"({self.low:.2f} .. {self.high:.2f})"
        return f"{self.median:.2f} x {interval}" if self.is_effect else f"no effect here {interval}"


@dataclass
class Timing:
    """What was measured of one variant."""

    batch_size: int
    seconds: list[float] = field(default_factory=list)  # per step, of each round
    memory_bytes: int | None = None  # peak on a GPU; None on a CPU
    failure: str = ""  # why it was not measured

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.batch_size / median(self.seconds)


@dataclass
class Row:
    """What was measured of one tip."""

    name: str
    reason: str = ""  # why it can't be measured here
    note: str = ""  # knobs of all its variants that are not the preset's
    variants: Variants = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)  # by variant

    def gain(self, before: str, after: str) -> Gain:
        """The gain of one variant over another; both were measured."""
        return gain(self.timings[before].seconds, self.timings[after].seconds)

    def gains(self) -> dict[str, Gain]:
        """The gain of each measured variant over the first."""
        names = [name for name, timing in self.timings.items() if timing.seconds]
        if not names or names[0] != next(iter(self.timings)):
            return {}
        return {name: self.gain(names[0], name) for name in names[1:]}


def measure(
    variants: Variants, datasets: DatasetCache, budget: Budget, seconds: float
) -> dict[str, Timing]:
    """Time the variants in turns, for about `seconds`."""
    world, began = datasets.world, monotonic()
    timings = {name: Timing(v.config.data.batch_size) for name, v in variants.items()}
    runs: dict[str, TimedRun | MultiProcessRun] = {}
    paces: dict[str, float] = {}  # seconds per step
    held = dict.fromkeys(variants, 0)  # bytes on a GPU between rounds
    try:
        for name, variant in variants.items():
            with noting_failure(timings[name]):
                if variant.processes > 1:
                    runs[name] = MultiProcessRun(variant.config, variant.processes)
                    paces[name] = warm_up(runs[name], budget)
                    continue
                data, before = datasets.open(variant.config), allocated_bytes(world)
                runs[name] = TimedRun(variant.config, world, data, variant.change)
                paces[name] = warm_up(runs[name], budget)
                held[name] = allocated_bytes(world) - before
                held[name] += data.pixels.nbytes if data.where == "device" else 0
        steps = max(1, math.ceil(budget.round_seconds / fmean(paces.values() or [1])))
        round_seconds = steps * sum(paces.values()) or 1
        fewest, most = budget.rounds
        rounds = max(fewest, min(most, int((seconds - monotonic() + began) / round_seconds)))
        for number in range(rounds):
            # There and back, so that none always comes after the same other.
            for name in list(variants)[:: -1 if number % 2 else 1]:
                if timings[name].failure:
                    continue
                before = allocated_bytes(world)
                with noting_failure(timings[name]):
                    timings[name].seconds.append(runs[name].run(steps))
                if world.device.type == "cuda" and isinstance(runs[name], TimedRun):
                    used = held[name] + torch.cuda.max_memory_allocated(world.device) - before
                    timings[name].memory_bytes = max(timings[name].memory_bytes or 0, used)
        for timing in timings.values():
            # Ratios are of rounds that all variants have.
            timing.seconds = [] if timing.failure else timing.seconds
    finally:
        for run in runs.values():
            run.close()
        runs.clear()
        torch._dynamo.reset()
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return timings


def warm_up(run: TimedRun | MultiProcessRun, budget: Budget) -> float:
    """Train until nothing happens for the first time any more; the seconds per step."""
    run.run(1)
    began = monotonic()
    pace = run.run(1)
    while monotonic() - began < budget.warmup_seconds:
        pace = run.run(1)
    return pace


@contextlib.contextmanager
def noting_failure(timing: Timing) -> Iterator[None]:
    """A block whose failure ends the measurement of this variant only."""
    try:
        yield
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        is_memory |= "allocate memory" in text
        timing.failure = "out of memory" if is_memory else f"failed: {text or type(error).__name__}"


def allocated_bytes(world: World) -> int:
    """Bytes of tensors on a GPU, from which on a new peak is counted."""
    if world.device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(world.device)
    return torch.cuda.memory_allocated(world.device)


def gain(before: list[float], after: list[float]) -> Gain:
    """How many times as fast `after` is as `before`, from times of the same rounds.

    The interval is between two order statistics of the ratios, which holds for any distribution.
    """
    ratios = sorted(b / a for b, a in zip(before, after, strict=True))
    count = len(ratios)
    # The probability that at most `outer` ratios lie on one side of the true median.
    outer, outside = 0, 2 * 0.5**count
    while outside + 2 * math.comb(count, outer + 1) * 0.5**count <= 1 - CONFIDENCE:
        outer += 1
        outside += 2 * math.comb(count, outer) * 0.5**count
    return Gain(median(ratios), ratios[outer], ratios[count - 1 - outer])
