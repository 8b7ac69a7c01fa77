"""Variants take turns, and ratios of times from the same round are compared.

So whatever else the machine does falls on all variants alike.
"""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from time import monotonic
from typing import Any

import torch

from .timed_run import DatasetCache, MultiProcessRun, TensorMemory, TimedRun, Variants

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
    failure: str = ""  # why it was not measured
    peak_bytes: int = 0  # of memory in a step, where the variant tells it

    @property
    def rate(self) -> float | None:
        """Images per second; None if it was not measured."""
        return self.batch_size / median(self.seconds) if self.seconds else None


@dataclass
class Row:
    """What was measured of one tip."""

    name: str
    reason: str = ""  # why it can't be measured here
    note: str = ""  # knobs of its first variant that are not the preset's
    variants: Variants = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)  # by variant

    def gain(self, before: str, after: str) -> Gain | None:
        """The gain of one variant over another; None unless both were measured."""
        pair = self.timings[before].seconds, self.timings[after].seconds
        return gain(*pair) if all(pair) and before != after else None

    def lines(self) -> Iterator[str]:
        """Rows of a Markdown table: tip, variant, images/s, and gain over the first."""
        if self.reason:
            yield table_line(self.name, self.reason)
        first = next(iter(self.timings), "")
        for name, timing in self.timings.items():
            rate = f"{timing.rate:,.0f}" if timing.rate else timing.failure
            gain = self.note if name == first else str(self.gain(first, name) or "")
            memory = f"{timing.peak_bytes / 2**20:,.4g} MB per step" if timing.peak_bytes else ""
            told = ", ".join(filter(None, (gain, memory)))
            yield table_line(self.name if name == first else "", name, rate, told)

    def json(self) -> dict[str, Any]:
        """Everything, for other programs."""
        gains = {name: self.gain(next(iter(self.timings)), name) for name in self.timings}
        variants = [
            {
                "name": name,
                "images_per_second": timing.rate and round(timing.rate, 1),
                "gain": (gain := gains[name]) and asdict(gain) | {"is_effect": gain.is_effect},
                "seconds_per_step": timing.seconds,
                "peak_bytes": timing.peak_bytes or None,
                "failure": timing.failure,
            }
            for name, timing in self.timings.items()
        ]
        return {"name": self.name, "reason": self.reason, "note": self.note, "variants": variants}


def table_line(*cells: str) -> str:
    """A row of the table of results."""
    padded = zip(cells, ("<23", "<24", ">9", ""), strict=False)
    return f"| {' | '.join(f'{cell:{width}}' for cell, width in padded)} |"


def measure(
    variants: Variants, datasets: DatasetCache, budget: Budget, seconds: float
) -> dict[str, Timing]:
    """Time the variants in turns, for about `seconds`."""
    world = datasets.world
    began = monotonic()
    timings = {name: Timing(v.config.data.batch_size) for name, v in variants.items()}
    runs: dict[str, TimedRun | MultiProcessRun] = {}
    paces: dict[str, float] = {}  # seconds per step
    try:
        for name, variant in variants.items():
            with noting_failure(timings[name]):
                if variant.processes > 1:
                    runs[name] = MultiProcessRun(variant.config, variant.processes)
                else:
                    data = datasets.open(variant.config)
                    runs[name] = TimedRun(variant.config, world, data, variant.change)
                paces[name] = warm_up(runs[name], budget)
                if variant.tells_memory and not variant.config.compute.compile:
                    with TensorMemory() as memory:
                        runs[name].run(1)
                    timings[name].peak_bytes = memory.peak
        steps = max(1, math.ceil(budget.round_seconds / fmean(paces.values() or [1])))
        round_seconds = steps * sum(paces.values()) or 1
        fewest, most = budget.rounds
        rounds = max(fewest, min(most, int((seconds - monotonic() + began) / round_seconds)))
        for number in range(rounds):
            # There and back, so that none always comes after the same other.
            for name in list(variants)[:: -1 if number % 2 else 1]:
                if not timings[name].failure:
                    with noting_failure(timings[name]):
                        timings[name].seconds.append(runs[name].run(steps))
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
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        timing.seconds = []
        timing.failure = f"failed: {reason}"


def gain(before: list[float], after: list[float]) -> Gain:
    """How many times as fast `after` is as `before`, from times of the same rounds.

    The interval is between two order statistics of the ratios, which holds for any distribution.
    """
    ratios = sorted(b / a for b, a in zip(before, after, strict=True))
    count = len(ratios)
    # The probability that at most `outer` ratios lie on one side of the true median.
    outer = 0
    outside = 2 * 0.5**count
    while outside + 2 * math.comb(count, outer + 1) * 0.5**count <= 1 - CONFIDENCE:
        outer += 1
        outside += 2 * math.comb(count, outer) * 0.5**count
    return Gain(median(ratios), ratios[outer], ratios[count - 1 - outer])
