"""A time limit by which a run is done: the learning rate decays by the clock.

https://arxiv.org/abs/1905.04753 shows what such schedules cost.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...config import RunConfig
from ...runtime.launch import RESTART_COUNTS, seconds_since_start


def open_limit(run: RunConfig, seconds_before: float) -> "Deadline | None":
    """The limit of a run that finishes in time, whose earlier starts took `seconds_before`."""
    return Deadline(60 * run.max_minutes, seconds_before) if run.finish_in_time else None


class Deadline:
    """How much of `--run.max-minutes` is over, which all ranks learn at the same step.

    The run takes its learning rate from the clock where that is ahead of the steps.
    """

    def __init__(self, limit: float, seconds_before: float) -> None:
        """Of `limit` seconds, of which earlier starts took `seconds_before`."""
        self.limit = limit
        self.evaluation_seconds = 0.0  # how long the last evaluation took
        self.share = 0.0  # of the time
        self.message = ""  # why the run is done, once it is
        # By what was saved, which all ranks know, and not by the clock of each.
        self.agree(round(1e6 * seconds_before / limit))
        if RESTART_COUNTS[0] in os.environ:  # of this command, since whose start what was saved is
            seconds_before = max(0.0, seconds_before - seconds_since_start())
        self.seconds_before = seconds_before

    @property
    def seconds(self) -> float:
        """How long all starts of the run took until now; once it is done, at least the limit."""
        spent = self.seconds_before + seconds_since_start()
        return max(spent, self.limit) if self.message else spent

    def read(self) -> tuple[int, int]:
        """On this rank: 0, as no signal pauses the run, and the millionths that are over."""
        return 0, round(1e6 * self.seconds / max(1.0, self.limit - self.evaluation_seconds))

    def agree(self, millionths: int) -> None:
        """Take the largest share of any rank."""
        if millionths:
            self.share = max(self.share, min(1.0, millionths / 1e6))
        if self.share == 1:
            self.message = "done in time: --run.max-minutes is over"

    def place(self, step: int, total_steps: int) -> int:
        """How many of `total_steps` the schedule of the learning rate has behind it."""
        return max(step, int(self.share * total_steps))

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A block as long as the evaluation that must still fit into the limit at the end."""
        began = time.monotonic()
        yield
        self.evaluation_seconds = time.monotonic() - began
