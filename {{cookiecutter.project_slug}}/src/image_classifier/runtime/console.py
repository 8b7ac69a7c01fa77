"""Printing: output that may fail, progress lines, and names from outside made printable.

A full disk, a closed terminal or a reader such as `head` ends neither a run nor a command's work.
"""

import atexit
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

# Unicode categories that move the cursor, break lines, turn the direction, or can't be encoded.
UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
JOINERS = "\u200c\u200d"  # but these two join and part letters, in many scripts and in emoji


class Output:
    r"""A stream that raises nothing: it reports its first failure and ignores later ones.

    Python's buffer keeps lines that could not be written: they appear once the disk has space
    again. Characters that the encoding lacks are shown as `\xe9`.
    """

    def __init__(self, stream: TextIO, report: Callable[[Exception], None]) -> None:
        """`report` is called with the first failure."""
        self.stream, self.report = stream, report
        self.error: Exception | None = None  # the first failure

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever streams have
        """All else is the stream's own."""
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write `text` if that is possible."""
        with self.failures_noted():
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                encoding = self.stream.encoding
                self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the buffer if that is possible."""
        with self.failures_noted():
            self.stream.flush()

    @contextmanager
    def failures_noted(self) -> Iterator[None]:
        """A block whose failures are noted; a closed stream raises ValueError."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self.error is None:
                self.error = error
                self.report(error)


@contextmanager
def lasting_output(promise: str) -> Iterator[Output]:
    """A block in which no print raises, and no file gets the number of a standard stream.

    Yields standard output; after the block its `error` tells whether some of it was lost.
    `promise` is appended to the line that reports a failure on the other stream.
    """
    before = sys.stdin, sys.stdout, sys.stderr
    open_closed()

    def reporter(name: str) -> Callable[[Exception], None]:
        def report(error: Exception) -> None:
            if isinstance(error, BrokenPipeError) and not promise:  # as by `head`
                return
            reason = getattr(error, "strerror", None) or error
            other = err if name == "output" else out
            other.write(f"cannot write to standard {name}: {reason}{promise}\n")
            other.flush()

        return report

    out, err = Output(sys.stdout, reporter("output")), Output(sys.stderr, reporter("error"))
    sys.stdout, sys.stderr = out, err
    try:
        yield out
    finally:
        for output in (out, err):
            output.flush()
            if output.error is not None:
                atexit.register(drop_rest, output.stream)
        sys.stdin, sys.stdout, sys.stderr = before


def open_closed() -> None:
    """Open closed standard streams on /dev/null, in a way that using them still fails.

    Otherwise the first file that is opened gets the number of a stream, and what C code prints.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one; opened to read where the stream writes.
            opened = os.open(os.devnull, os.O_WRONLY if name == "stdin" else os.O_RDONLY)
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def drop_rest(stream: TextIO) -> None:
    """Write the rest of a failed stream, or drop it: otherwise Python exits with code 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            stream.flush()


def is_reader_gone() -> bool:
    """Whether nobody reads standard output any more, such as `head`, which has seen enough."""
    return isinstance(getattr(sys.stdout, "error", None), BrokenPipeError)


def say(line: str, is_last: bool = True) -> None:
    """Print a line; on a terminal it replaces the last progress line (one with `is_last=False`)."""
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(clear + line, end="\n" if is_last else "", flush=True)


class Progress:
    """A line on how far a command is: each half second on a terminal, each 10 s in a log."""

    def __init__(self, total: int, done: int = 0) -> None:
        """Of `total` images, `done` are done already."""
        self.total, self.first = total, done
        self.began = self.said = time.monotonic()

    def show(self, done: int) -> None:
        """Print the line, if it is time for it."""
        now, is_live = time.monotonic(), sys.stdout.isatty()
        if done > self.first and now - self.said > (0.5 if is_live else 10):
            self.said, rate = now, (done - self.first) / (now - self.began)
            line = f"{done:,} of {self.total:,} images, {rate:,.0f} images/s"
            say(f"{line}, ETA {clock((self.total - done) / rate)}", is_last=not is_live)


def clock(seconds: float) -> str:
    """125 -> `2:05`; 3725 -> `1:02:05`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def gigabytes(size: float) -> str:
    """Bytes as `1.5 GB`."""
    return f"{size / 1e9:,.3g} GB"


def some(names: tuple[str, ...], most: int = 3) -> str:
    """The number of names and the first few: `5: ant, bee, cat, ...`."""
    return f"{len(names)}: {', '.join(names[:most])}{', ...' * (len(names) > most)}"


def printable(text: str) -> str:
    r"""`text` in one line, with control characters as Python writes them: `\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode("ascii")
        if unicodedata.category(letter) in UNPRINTABLE and letter not in JOINERS
        else letter
        for letter in text
    )


def printable_path(name: bytes) -> str:
    """A path in a form that can be printed, and that `path_of` turns back into the same bytes."""
    shown = ""
    for letter in os.fsdecode(name).replace("\\", "\\\\"):
        codes = "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))
        shown += letter if letter.isprintable() else codes
    return shown


def path_of(text: str) -> bytes:
    r"""The path that `printable_path` shows as `text`."""
    return re.sub(
        rb"\\(?:x([0-9a-f]{2})|\\)",
        lambda found: bytes.fromhex(found[1].decode()) if found[1] else b"\\",
        text.encode(),
    )
