"""Signals that end a run: noted at once, acted on by all ranks after the same step."""

import os
import signal
import threading
from types import FrameType

from ..errors import EXIT_RESTART, FaultError, is_peer_failure
from .platform import STOP_SIGNALS

TIME_LIMIT = 1000  # stands among signals, of which no system has so many


def stop_signals() -> list[signal.Signals]:
    """The signals that end this process; under `nohup` a closed terminal (SIGHUP) does not."""
    return [n for n in STOP_SIGNALS if n.name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN]


class StoppedError(FaultError):
    """A signal or the time limit ended the run, and everything is saved."""

    def __init__(self, number: int, account: str) -> None:
        """`account` says what was saved; empty on all ranks but the first."""
        if number == TIME_LIMIT:
            self.name = "time limit"
            self.code = EXIT_RESTART
            cause = "--run.max-minutes is over"
        else:
            self.name = signal.Signals(number).name
            self.code = 128 + number
            cause = f"received {self.name}"
        super().__init__(account and f"{cause}: {account}")


class Signals:
    """The first signal of the run; a second Ctrl-C ends it without waiting for the step."""

    number = 0  # none yet

    def __enter__(self) -> "Signals":
        """Note signals from here on; only the main thread can, elsewhere nothing changes."""
        is_main = threading.current_thread() is threading.main_thread()
        self.before = {n: signal.signal(n, self.note) for n in stop_signals()} if is_main else {}
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Let signals act as before.

        Raises:
            StoppedError: in place of an error that only says that another rank is gone, if this one
                was told to end: the other rank reports why.
        """
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.number and isinstance(error, Exception) and is_peer_failure(error):
            raise StoppedError(self.number, "") from error

    def note(self, number: int, _: FrameType | None) -> None:
        """Remember `number`; the run continues to the end of its step."""
        # Other signals come twice by themselves: from a cluster and from our launcher, or from each
        # thread of a launcher that is killed.
        if self.number and number == signal.SIGINT:
            os._exit(128 + number)
        self.number = self.number or number
