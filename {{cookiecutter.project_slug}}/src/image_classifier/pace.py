"""When a run logs, evaluates, saves and stops: on all ranks after the same step."""

import math
from contextlib import nullcontext

from .checkpoints import Checkpoints, TrainState
from .config import RunConfig
from .data import TrainData
from .extensions import functions
from .runtime.consensus import AsyncConsensus
from .runtime.launch import seconds_since_start
from .runtime.signals import TIME_LIMIT, Signals, StoppedError


class Pace:
    """What is due after a step. No rank waits for another to know it."""

    def __init__(
        self, run: RunConfig, data: TrainData, state: TrainState, checkpoints: Checkpoints
    ) -> None:
        """Of a run on `data` that begins, or goes on, with `state`."""
        self.run = run
        self.state = state
        self.checkpoints = checkpoints
        self.total_steps = data.total_steps
        self.steps_per_epoch = data.steps_per_epoch
        self.evaluate_every = data.steps_in(run.evaluate_every_epochs)
        self.limit = open_limit(run, state.seconds)
        self.signals = Signals()
        self.signal = 0  # the one that ends the run, once all ranks know of it
        self.consensus = AsyncConsensus(data.world, run.timeout_seconds, state.step)
        self.is_saved = False  # whether to save, as of the last `agree`
        self.stop_reason = ""  # why the run ends before its last step
        self.decide()

    def decide(self) -> None:
        """After an evaluation, or at the start: whether to stop early."""
        self.stop_reason = self.state.early_stop(self.run.patience) or self.limit.message

    @property
    def last_step(self) -> int:
        """How many steps there are; 0 if the run is over."""
        return 0 if self.stop_reason else self.total_steps

    @property
    def schedule_step(self) -> int:
        """How many steps the schedule of the learning rate has behind it."""
        return self.limit.place(self.state.step, self.total_steps)

    @property
    def is_logged(self) -> bool:
        """Whether to log a row."""
        return self.is_due(self.run.log_every_steps) or self.is_due(self.steps_per_epoch)

    @property
    def is_evaluated(self) -> bool:
        """Whether to evaluate."""
        return self.is_due(self.evaluate_every) or self.limit.message != ""

    def is_due(self, every: int) -> bool:
        """Whether as many steps have passed, or all."""
        return self.state.step % every == 0 or self.state.step == self.total_steps

    def agree(self) -> None:
        """Tell the other ranks of a signal, the clock, or that a save is due; hear of theirs."""
        was_evaluated = self.is_evaluated  # before the clock moves on
        step = self.state.step
        pause, spent = self.limit.read()
        overdue = step if self.checkpoints.are_old else 0
        told = self.signals.number or pause, overdue, spent
        self.signal, overdue, spent = self.consensus.max(step, *told)
        self.limit.agree(spent)
        self.is_saved = was_evaluated or self.signal > 0 or overdue > self.checkpoints.saved_step
        if self.is_saved:
            self.state.seconds = self.limit.seconds

    def must_stop(self) -> bool:
        """Whether this is the last step.

        Raises:
            StoppedError: if a signal or the time limit ends it, and all is saved.
        """
        if self.signal and self.state.step < self.total_steps:
            account = self.checkpoints.account(self.state.step, self.total_steps)
            raise StoppedError(self.signal, account)
        return self.stop_reason != ""


class TimeLimit:
    """Pauses a run once its command has taken `--run.max-minutes`."""

    message = ""  # why the run is done, once it is
    seconds = 0.0  # how long a run took, all its starts together, where that decides when it ends
    evaluation = nullcontext  # a block as long as an evaluation, which a limit may count

    def __init__(self, run: RunConfig) -> None:
        """Of this start of a run."""
        self.limit = 60 * run.max_minutes or math.inf

    def read(self) -> tuple[int, int]:
        """On this rank: the number among signals that pauses the run, and the millionths over.

        Both are 0 without a limit, as in most runs: a step has no time to ask the environment.
        """
        is_over = self.limit < math.inf and seconds_since_start() > self.limit
        return TIME_LIMIT if is_over else 0, 0

    def agree(self, millionths: int) -> None:
        """Take the largest share of any rank: here it decides nothing."""

    def place(self, step: int, _: int) -> int:
        """How many steps the schedule of the learning rate has behind it."""
        return step


def open_limit(run: RunConfig, seconds_before: float) -> TimeLimit:
    """A limit that pauses the run, unless a tool has another; earlier starts took so long."""
    others = (open_other(run, seconds_before) for open_other in functions("limit", "open_limit"))
    return next(filter(None, others), TimeLimit(run))
