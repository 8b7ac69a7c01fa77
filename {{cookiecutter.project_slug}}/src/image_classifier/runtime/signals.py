"""Signals that end a run: noted at once, obeyed by all ranks after the same step."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from ..errors import FaultError

# What schedulers, terminals and `kill` send to a job that should end.
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
END = b"\0"  # no signal has this number


def obeyed() -> list[signal.Signals]:
    """The signals that end this process; under `nohup` a closed terminal (SIGHUP) does not."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [n for n in NUMBERS if not (n == signal.SIGHUP and ignores_hangup)]


class StoppedError(FaultError):
    """A signal ended the run, and everything is saved; the exit code is 128 + the signal."""

    def __init__(self, number: int, account: str) -> None:
        """`account` says what was saved; empty on all ranks but the first."""
        self.name = signal.Signals(number).name
        self.code = 128 + number
        super().__init__(account and f"received {self.name}: {account}")


class Signals:
    """The first signal of the run; a second Ctrl-C ends it without waiting for the step."""

    def __init__(self) -> None:
        """No signal yet."""
        self.number = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        """Note signals from here on; only the main thread can, elsewhere nothing changes.

        A thread notes them: Python calls handlers between two lines of the main thread, which may
        be busy in C code, and calls them once for several signals.
        """
        if threading.current_thread() is threading.main_thread():
            receive, send = os.pipe()
            os.set_blocking(send, False)
            self.before = {number: signal.signal(number, do_nothing) for number in obeyed()}
            self.wakeup = signal.set_wakeup_fd(send, warn_on_full_buffer=False), send
            self.thread = threading.Thread(target=self.note_all, args=(receive,), daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let signals act as before."""
        if self.before:
            wakeup, send = self.wakeup
            signal.set_wakeup_fd(wakeup)
            os.write(send, END)  # closing it is not enough: data workers hold this end too
            self.thread.join()
            os.close(send)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note_all(self, receive: int) -> None:
        """Note signals as they come, until END."""
        with os.fdopen(receive, "rb", buffering=0) as arrivals:
            while (arrived := arrivals.read(1)) != END:
                if arrived[0] in NUMBERS:
                    self.note(arrived[0])

    def note(self, number: int) -> None:
        """Remember `number`; the run continues to the end of its step."""
        # Other signals come twice by themselves: from a cluster and from our launcher, or from each
        # thread of a launcher that is killed.
        if self.number and number == signal.SIGINT:
            os._exit(128 + number)
        self.number = self.number or number


def do_nothing(_: int, __: FrameType | None) -> None:
    """A handler; without one, Python would not pass the signal on."""
