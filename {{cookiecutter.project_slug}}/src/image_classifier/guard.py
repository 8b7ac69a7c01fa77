"""What ends a run before its end, or makes it save: agreed on by all ranks, after the same step."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from .checkpoint import Checkpoints
from .config import RunConfig
from .data import TrainData
from .finite import FiniteCheck
from .heartbeat import Heartbeat
from .memory import MicroBatch
from .runtime.distributed import Board
from .runtime.signals import Signals
from .train_state import TrainState


class Guard:
    """Looks after a run, from its first step to its last."""

    def __init__(  # noqa: PLR0917 - six different things
        self,
        run: RunConfig,
        state: TrainState,
        data: TrainData,
        lr_at: Callable[[int], float],
        micro_batch: MicroBatch,
        signals: Signals,
        checkpoints: Checkpoints,
    ) -> None:
        """Of the training of `state` on `data`."""
        self.state, self.data, self.micro_batch = state, data, micro_batch
        self.signals, self.checkpoints = signals, checkpoints
        self.finite = FiniteCheck(
            run, state.model, data, lr_at, scales=state.precision.scales, step=state.step
        )
        self.board = Board(data.world, run.timeout_seconds)
        self.heartbeat = Heartbeat(run, data.world, state)

    def __enter__(self) -> "Guard":
        """Begin to look."""
        with ExitStack() as stack:
            stack.enter_context(self.heartbeat)
            stack.enter_context(self.micro_batch.halved_on_failure(self.state, self.data))
            self.exits = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> bool | None:
        """Say in one line why memory did not suffice, or which rank was lost, if that is the end.

        Raises:
            FaultError: in place of torch's.
        """
        if error[0] is None:
            self.board.close()
        return self.exits.__exit__(*error)

    @property
    def metrics(self) -> dict[str, float]:
        """What is logged of it."""
        return self.finite.metrics

    def look(self, is_spoiled: Tensor) -> tuple[int, bool]:
        """The signal after which all ranks end, 0 while there is none; and whether to save now.

        `is_spoiled` is what `Precision.step` returns.

        Raises:
            FaultError: if a loss was not finite.
        """
        step = self.state.step
        fatal = self.finite.note(is_spoiled, step)
        # The last save may have come between the exchange in which rank 0 asked for one and this.
        wanted = step if self.checkpoints.are_old else 0
        signal, fatal, wanted = self.board.exchange(step, self.signals.number, fatal, wanted)
        if fatal:
            raise self.finite.error(fatal)
        return signal, bool(signal) or wanted > self.checkpoints.saved_step
