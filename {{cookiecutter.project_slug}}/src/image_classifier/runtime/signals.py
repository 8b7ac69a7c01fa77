"""Signals that end a run: noted when they come, obeyed by all ranks after the same step."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from ..config import FaultError

# What schedulers, terminals and `kill` send to a job that shall end.
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
END = b"\0"  # what no signal's number is


def obeyed() -> list[signal.Signals]:
    """Those that shall end this process; `nohup` has it ignore that the terminal is closed."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [n for n in NUMBERS if not (n == signal.SIGHUP and ignores_hangup)]


class StoppedError(FaultError):
    """A signal ended the run, and all of it is saved; the exit code is 128 + the signal."""

    def __init__(self, number: int, account: str) -> None:
        """`account` says what was saved; empty on ranks that are quiet."""
        self.name = signal.Signals(number).name
        self.code = 128 + number
        super().__init__(account and f"received {self.name}: {account}")


class Signals:
    """The first signal that came; a second Ctrl-C does not wait for the step to end."""

    def __init__(self) -> None:
        """None yet."""
        self.number = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        """Note signals from here on. Only the main thread can; elsewhere they act as always.

        A thread notes them, as Python calls handlers between two lines of the main thread, which
        may be at work in C, and calls them once for several signals.
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
        """Let them act again as before."""
        if self.before:
            wakeup, send = self.wakeup
            signal.set_wakeup_fd(wakeup)
            os.write(send, END)  # data workers hold this end too: to close it would end nothing
            self.thread.join()
            os.close(send)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note_all(self, receive: int) -> None:
        """Note signals as they come, until there is the one that is none."""
        with os.fdopen(receive, "rb", buffering=0) as arrivals:
            while (arrived := arrivals.read(1)) != END:
                if arrived[0] in NUMBERS:
                    self.note(arrived[0])

    def note(self, number: int) -> None:
        """Remember `number`; what runs goes on to the end of its step."""
        # Other signals come twice by themselves: from a cluster and from what launched us, or from
        # each thread of a launcher that is killed.
        if self.number and number == signal.SIGINT:
            os._exit(128 + number)
        self.number = self.number or number


def do_nothing(_: int, __: FrameType | None) -> None:
    """A handler, without which a signal would not arrive anywhere."""
