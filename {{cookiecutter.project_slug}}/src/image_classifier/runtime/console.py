"""Printing: output that may fail, progress lines, and names from outside made printable.

A full disk, a closed terminal or a reader such as `head` ends neither a run nor a command's work.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

JOINERS_AND_SPACES = "\u200c\u200d\xa0\u3000"  # printable too, whatever Python says


class Output:
    """A standard stream that never raises: after its first failure, it drops what is printed."""

    def __init__(self, stream: TextIO, promise: str = "") -> None:
        """`promise` is appended to the line that reports the failure on standard error."""
        self.stream = stream
        self.promise = promise
        self.error: OSError | None = None  # the first failure
        stream.reconfigure(errors="backslashreplace")  # for characters that the encoding lacks

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever streams have
        """All else is the stream's own."""
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write `text` if that is possible."""
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer if that is possible."""
        self.attempt(self.stream.flush)

    def attempt(self, action: Callable[..., object], *arguments: str) -> None:
        """Where that fails, let all that follows go to /dev/null; say why, unless a reader left."""
        try:
            action(*arguments)
        except OSError as error:
            self.error = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if self.promise or not isinstance(error, BrokenPipeError):
                reason = f"cannot write to standard output: {error.strerror}{self.promise}"
                print(reason, file=sys.stderr, flush=True)


@contextmanager
def lasting_output(promise: str) -> Iterator[Output]:
    """A block in which no print raises; yields standard output, with its `error` if it failed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the first file opened would get its number
            # Opened to read, so that writing to it still fails.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDONLY), mode))
    output = Output(sys.stdout, promise)
    with redirect_stdout(output), redirect_stderr(Output(sys.stderr)):
        try:
            yield output
        finally:
            output.flush()


def say(line: str, is_last: bool = True) -> None:
    """Print a line; on a terminal it replaces the last progress line (one with `is_last=False`)."""
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(clear + line, end="\n" if is_last else "", flush=True)


class Progress:
    """A line on how far a command is: each half second on a terminal, each 10 s in a log."""

    def __init__(self, total: int, done: int = 0, what: str = "images") -> None:
        """Of `total` images, or `what` there is to do, `done` are done already."""
        self.what = what
        self.total = total
        self.first = done
        self.began = self.said = time.monotonic()

    def show(self, done: int) -> None:
        """Print the line, if it is time for it."""
        now = time.monotonic()
        is_live = sys.stdout.isatty()
        if done > self.first and now - self.said > (0.5 if is_live else 10):
            self.said = now
            rate = (done - self.first) / (now - self.began)
            line = f"{done:,} of {self.total:,} {self.what}, {rate:,.0f} {self.what}/s"
            say(f"{line}, ETA {clock((self.total - done) / rate)}", is_last=not is_live)


def clock(seconds: float) -> str:
    """125 -> `2:05`; 3725 -> `1:02:05`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def some(names: tuple[str, ...], most: int = 3) -> str:
    """The number of names and the first few: `5: ant, bee, cat, ...`."""
    return f"{len(names)}: {', '.join(names[:most])}{', ...' * (len(names) > most)}"


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, printable, or its kind if it says nothing."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(text: str) -> str:
    r"""`text` in one line, with control characters as Python writes them: `\x1b`."""
    return "".join(
        letter
        if letter.isprintable() or letter in JOINERS_AND_SPACES
        else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def printable_path(name: bytes) -> str:
    """A path in a form that can be printed, and turned back into the same bytes."""
    return "".join(
        letter if letter.isprintable() else "".join(f"\\x{b:02x}" for b in os.fsencode(letter))
        for letter in os.fsdecode(name).replace("\\", "\\\\")
    )
