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
from traceback import clear_frames
from typing import Any

import torch
from scipy.stats import quantile_test

from .timed_run import DatasetCache, TensorMemory, TimedRun, Variant, Variants, kept_switches

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
    is_effect: bool  # more than noise, and large enough to count

    @property
    def is_faster(self) -> bool:
        """Whether it is an effect for the better."""
        return self.is_effect and self.median > 1

    def __str__(self) -> str:
        """`1.25 x (1.20 .. 1.31)`, or no effect."""
        interval = f"({self.low:.2f} .. {self.high:.2f})"
        return f"{self.median:.2f} x {interval}" if self.is_effect else f"no effect here {interval}"


@dataclass
class Row:
    """A tip, and what was measured of it."""

    name: str
    reason: str = ""  # why it can't be measured here
    note: str = ""  # knobs of its first variant that are not the preset's
    variants: Variants = field(default_factory=dict)

    def gain(self, after: str, before: str = "") -> Gain | None:
        """The gain of a variant over another, the first one; None unless both were measured."""
        before = before or next(iter(self.variants))
        pair = self.variants[before].seconds, self.variants[after].seconds
        return gain(*pair) if all(pair) and before != after else None

    def lines(self) -> Iterator[str]:
        """Rows of a Markdown table: tip, variant, images/s, and gain over the first."""
        if self.reason:
            yield table_line(self.name, self.reason)
        first = next(iter(self.variants), "")
        for name, variant in self.variants.items():
            rate = f"{variant.rate:,.0f}" if variant.rate else variant.failure
            gain = self.note if name == first else str(self.gain(name) or "")
            memory = f"{variant.peak_bytes / 2**20:,.4g} MB per step" if variant.peak_bytes else ""
            told = ", ".join(filter(None, (gain, memory)))
            yield table_line(self.name if name == first else "", name, rate, told)

    def json(self) -> dict[str, Any]:
        """Everything, for other programs."""
        variants = [
            {
                "name": name,
                "images_per_second": variant.rate and round(variant.rate, 1),
                "gain": (gain := self.gain(name)) and asdict(gain),
                "seconds_per_step": variant.seconds,
                "peak_bytes": variant.peak_bytes or None,
                "failure": variant.failure,
            }
            for name, variant in self.variants.items()
        ]
        return {"name": self.name, "reason": self.reason, "note": self.note, "variants": variants}


def table_line(*cells: str) -> str:
    """A row of the table of results."""
    padded = zip(cells, ("<23", "<24", ">9", ""), strict=False)
    return f"| {' | '.join(f'{cell:{width}}' for cell, width in padded)} |"


@kept_switches()
def measure(variants: Variants, datasets: DatasetCache, budget: Budget, seconds: float) -> None:
    """Time the variants in turns, for about `seconds`."""
    began = monotonic()
    runs: dict[str, Any] = {}  # `TimedRun` or another
    paces: dict[str, float] = {}  # seconds per step
    try:
        for name, variant in variants.items():
            with noting_failure(variant, name, runs):
                if variant.start is None:
                    own = [datasets.open(variant.config)]  # a name would outlive a run that fails
                    runs[name] = TimedRun(variant.config, datasets.world, own.pop(), variant.change)
                else:
                    runs[name] = variant.start(variant.config)
                paces[name] = warm_up(runs[name], budget)
                if variant.tells_memory and not variant.config.compute.compile:
                    with TensorMemory() as memory:
                        runs[name].run(1)
                    variant.peak_bytes = memory.peak
        steps = max(1, math.ceil(budget.round_seconds / fmean(paces.values() or [1])))
        round_seconds = steps * sum(paces.values()) or 1
        fewest, most = budget.rounds
        rounds = max(fewest, min(most, int((seconds - monotonic() + began) / round_seconds)))
        for number in range(rounds):
            # There and back, so that none always comes after the same other.
            for name, variant in list(variants.items())[:: -1 if number % 2 else 1]:
                if not variant.failure:
                    with noting_failure(variant, name, runs):
                        variant.seconds.append(runs[name].run(steps))
    finally:
        while runs:
            runs.popitem()[1].close()
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing if no GPU is in use


def warm_up(run: TimedRun, budget: Budget) -> float:
    """Train until nothing happens for the first time any more; the seconds per step."""
    run.run(1)
    began = monotonic()
    pace = run.run(1)
    while monotonic() - began < budget.warmup_seconds:
        pace = run.run(1)
    return pace


@contextlib.contextmanager
def noting_failure(variant: Variant, name: str, runs: dict[str, Any]) -> Iterator[None]:
    """A block whose failure ends the measurement of this variant only."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        variant.seconds = []
        # That of a worker of DataLoader ends with what failed there.
        variant.failure = f"failed: {lines[-1 if lines[0].startswith('Caught ') else 0]}"
        clear_frames(error.__traceback__)  # with the run, whose memory the others may need
        if name in runs:
            runs.pop(name).close()
        gc.collect()


def gain(before: list[float], after: list[float]) -> Gain:
    """How many times as fast `after` is as `before`, from times of the same rounds.

    The interval is between two order statistics of the ratios, which holds for any distribution;
    nan for fewer than five rounds.
    """
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    middle = median(ratios)
    low, high = map(float, quantile_test(ratios, p=0.5).confidence_interval(CONFIDENCE))
    is_effect = (low > 1 or high < 1) and abs(middle - 1) >= MIN_EFFECT
    return Gain(middle, low, high, is_effect)
