"""Ways to do one thing take turns: what a step of each takes, side by side.

What else the machine does falls on all of them alike; what counts is the ratio of two times that
were taken one after the other.
"""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from time import monotonic

import torch

from ....runtime.distributed import World
from .case import Variants
from .trial import DataShelf, Ranks, Trial

SMALLEST = 0.02  # a gain that is smaller than this is none
CONFIDENCE = 0.9  # of an interval, that the true median lies in it


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    row_seconds: float  # for a tip, about
    round_seconds: float  # of one turn, at least
    rounds: tuple[int, int] = (5, 25)  # fewest and most
    warmup_seconds: float = 0.3  # after the first step
    step_seconds: float = math.inf  # of the preset; if its steps take longer, with fewer images
    total_seconds: float = math.inf  # for all tips; those for which none is left are passed over


QUICK = Effort(
    row_seconds=10, round_seconds=0.2, rounds=(5, 11), step_seconds=0.15, total_seconds=95
)
FULL = Effort(row_seconds=40, round_seconds=1.0, rounds=(11, 25), warmup_seconds=2)


@dataclass(frozen=True)
class Gain:
    """How many times as fast one way is as another: the median, and an interval for it."""

    median: float
    low: float
    high: float

    @property
    def is_effect(self) -> bool:
        """Whether it is more than noise, and enough to speak of."""
        return not self.low <= 1 <= self.high and abs(self.median - 1) >= SMALLEST

    def __str__(self) -> str:
        """The verdict."""
        interval = f"({self.low:.2f} .. {self.high:.2f})"
        return f"{self.median:.2f} x {interval}" if self.is_effect else f"no effect here {interval}"


@dataclass
class Timing:
    """What was measured of one variant."""

    batch_size: int
    seconds: list[float] = field(default_factory=list)  # of a step, by round
    memory_bytes: int | None = None  # at the most, on a GPU; a CPU's is not told apart
    failure: str = ""  # why it was not, or no longer, measured

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.batch_size / median(self.seconds)


@dataclass
class Row:
    """What was found of one tip."""

    name: str
    reason: str = ""  # why it can't be measured here
    note: str = ""  # how all that was measured differs from the preset
    variants: Variants = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)  # by variant

    def gain(self, before: str, after: str) -> Gain:
        """What one variant brings against another; both were measured."""
        return gain(self.timings[before].seconds, self.timings[after].seconds)

    def gains(self) -> dict[str, Gain]:
        """What each variant brings against the first, of those that were measured."""
        names = [name for name, timing in self.timings.items() if timing.seconds]
        if not names or names[0] != next(iter(self.timings)):
            return {}
        return {name: self.gain(names[0], name) for name in names[1:]}


def measure(
    variants: Variants, shelf: DataShelf, effort: Effort, budget_seconds: float
) -> dict[str, Timing]:
    """Let the variants take turns for about so long."""
    timings = {name: Timing(v.config.data.batch_size) for name, v in variants.items()}
    trials: dict[str, Trial | Ranks] = {}
    paces: dict[str, float] = {}
    began = monotonic()
    try:
        for name, variant in variants.items():
            with noting(timings[name]):
                data = shelf.open(variant.config) if variant.processes == 1 else None
                used = allocated_bytes(shelf.world)
                trials[name] = (
                    Ranks(variant.config, variant.processes)
                    if data is None
                    else Trial(variant.config, shelf.world, data, variant.change)
                )
                paces[name] = warm_up(trials[name], effort)
                if data is not None and shelf.world.device.type == "cuda":
                    resident = data.pixels.nbytes if data.where == "device" else 0
                    timings[name].memory_bytes = allocated_bytes(shelf.world) - used + resident
        pace = fmean(paces.values()) if paces else 1
        steps = max(1, math.ceil(effort.round_seconds / pace))
        spare = budget_seconds - (monotonic() - began)
        fewest, most = effort.rounds
        turns = max(fewest, min(most, int(spare / (steps * sum(paces.values()) or 1))))
        peaks = dict.fromkeys(variants, 0)
        for turn in range(turns):
            # There and back, so that none always comes after the same other.
            for name in list(variants)[:: -1 if turn % 2 else 1]:
                if not timings[name].failure:
                    with noting(timings[name]), peak_of(peaks, name, shelf.world):
                        timings[name].seconds.append(trials[name].run(steps))
        for name, timing in timings.items():
            if timing.memory_bytes is not None:
                timing.memory_bytes += peaks[name]
            # Ratios are of rounds that all have: who failed on the way has none.
            timing.seconds = [] if timing.failure else timing.seconds
    finally:
        for trial in trials.values():
            trial.close()
        trials.clear()
        clear_memory(shelf.world)
    return timings


def warm_up(trial: Trial | Ranks, effort: Effort) -> float:
    """Make steps until nothing is made for the first time; the seconds that one takes."""
    trial.run(1)
    began = monotonic()
    pace = trial.run(1)
    while monotonic() - began < effort.warmup_seconds:
        pace = trial.run(1)
    return pace


@contextlib.contextmanager
def noting(timing: Timing) -> Iterator[None]:
    """A block whose failure is that of one variant, and no reason not to measure others."""
    try:
        yield
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        is_memory |= "allocate memory" in text
        timing.failure = "out of memory" if is_memory else f"failed: {text or type(error).__name__}"


def allocated_bytes(world: World) -> int:
    """What tensors take on a GPU."""
    return torch.cuda.memory_allocated(world.device) if world.device.type == "cuda" else 0


@contextlib.contextmanager
def peak_of(peaks: dict[str, int], name: str, world: World) -> Iterator[None]:
    """A block for which `peaks[name]` is how much memory it takes on a GPU for a time."""
    if world.device.type != "cuda":
        yield
        return
    used = allocated_bytes(world)
    torch.cuda.reset_peak_memory_stats(world.device)
    yield
    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(world.device) - used)


def clear_memory(world: World) -> None:
    """Forget models that are through, and what was compiled for them."""
    torch._dynamo.reset()
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def gain(before: list[float], after: list[float]) -> Gain:
    """How many times as fast `after` is as `before`, from times of the same rounds.

    The interval is that between two order statistics of the ratios: it holds for any distribution.
    """
    ratios = sorted(b / a for b, a in zip(before, after, strict=True))
    count = len(ratios)
    # How probable it is that no more than `outer` of the ratios lie on one side of the median.
    outer, outside = 0, 2 * 0.5**count
    while outside + 2 * math.comb(count, outer + 1) * 0.5**count <= 1 - CONFIDENCE:
        outer += 1
        outside += 2 * math.comb(count, outer) * 0.5**count
    return Gain(median(ratios), ratios[outer], ratios[count - 1 - outer])
