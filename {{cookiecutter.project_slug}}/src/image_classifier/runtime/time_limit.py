"""The wall-clock limit of a run, at which it pauses, or by which it finishes."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..config import RunConfig
from .launch import seconds_since_start
from .signals import TIME_LIMIT


class TimeLimit:
    """How much of `--run.max-minutes` is over, which all ranks learn at the same step.

    A run that finishes in time takes its learning rate from the clock where that is ahead of the
    steps. https://arxiv.org/abs/1905.04753 shows what such schedules cost.
    """

    def __init__(self, run: RunConfig, seconds_before: float) -> None:
        """Of a run whose earlier starts took `seconds_before`."""
        self.limit = 60 * run.max_minutes or math.inf
        self.finishes, self.seconds_before = run.finish_in_time, seconds_before
        self.evaluation_seconds = 0.0  # how long the last evaluation took
        self.share, self.message = 0.0, ""  # the message says why the run is done, once it is
        self.agree(round(1e6 * seconds_before / self.limit) if self.finishes else 0)

    @property
    def seconds(self) -> float:
        """How long a run that finishes in time took until now, all its starts together; else 0."""
        return self.seconds_before + seconds_since_start() if self.finishes else 0.0

    def read(self) -> tuple[int, int]:
        """On this rank: the number among signals that pauses the run, and the millionths over.

        Both are 0 without a limit, as in most runs: a step has no time to ask the environment.
        """
        if self.limit == math.inf:
            return 0, 0
        if not self.finishes:
            return TIME_LIMIT if seconds_since_start() > self.limit else 0, 0
        return 0, round(1e6 * self.seconds / max(1.0, self.limit - self.evaluation_seconds))

    def agree(self, millionths: int) -> None:
        """Take the largest share of any rank."""
        if millionths:
            self.share = max(self.share, min(1.0, millionths / 1e6))
        if self.share == 1:
            self.message = "done in time: --run.max-minutes is over"

    def place(self, step: int, total_steps: int) -> int:
        """How many of `total_steps` the schedule of the learning rate has behind it."""
        return max(step, int(self.share * total_steps)) if self.share else step

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A block as long as the evaluation that must still fit into the limit at the end."""
        began = time.monotonic()
        yield
        self.evaluation_seconds = time.monotonic() - began
