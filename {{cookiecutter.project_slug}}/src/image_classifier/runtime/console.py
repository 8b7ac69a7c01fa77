"""What is printed, on streams that may fail: neither a run nor a verb's work ends for that."""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Output:
    r"""A stream that raises nothing: its first failure is told, and later ones are passed over.

    What could not be written stays in Python's buffer, as far as that goes: once a disk has space
    again, the lines appear again. What the encoding does not have is shown as `\xe9`.
    """

    def __init__(self, stream: TextIO, tell: Callable[[Exception], None]) -> None:
        """`tell` is called with the first failure."""
        self.stream, self.tell = stream, tell
        self.error: Exception | None = None  # the first

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
        """Hand to the system what is in the buffer, if that is possible."""
        with self.failures_noted():
            self.stream.flush()

    @contextmanager
    def failures_noted(self) -> Iterator[None]:
        """A block whose failures are noted; ValueError is that of a stream that was closed."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self.error is None:
                self.error = error
                self.tell(error)


@contextmanager
def lasting_output(promise: str) -> Iterator[Output]:
    """A block in which no print fails, and no file gets the number of a standard stream.

    Yields standard output, whose `error` says after the block whether some of it was lost.
    `promise` is added to what is told of a failure on the other stream.
    """
    before = sys.stdin, sys.stdout, sys.stderr
    open_closed()

    def teller(name: str) -> Callable[[Exception], None]:
        def tell(error: Exception) -> None:
            is_usual = isinstance(error, BrokenPipeError) and not promise  # as by `head`
            if not is_usual:
                reason = getattr(error, "strerror", None) or error
                other = err if name == "output" else out
                other.write(f"cannot write to standard {name}: {reason}{promise}\n")
                other.flush()

        return tell

    out, err = Output(sys.stdout, teller("output")), Output(sys.stderr, teller("error"))
    sys.stdout, sys.stderr = out, err
    try:
        yield out
    finally:
        for output in (out, err):
            output.flush()
            if output.error is not None:
                atexit.register(let_go, output.stream)
        sys.stdin, sys.stdout, sys.stderr = before


def open_closed() -> None:
    """Open the standard streams that are closed on /dev/null: to use them fails as before.

    Else the first file that is opened has the number of one, and gets what C code prints there.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            is_input = name == "stdin"
            # The lowest number that is free is this one; it can be read where writing was asked.
            opened = os.open(os.devnull, os.O_WRONLY if is_input else os.O_RDONLY)
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def let_go(stream: TextIO) -> None:
    """Write what is left of a stream that has failed, or nowhere, before Python's end tries it.

    Python would complain, and exit with 120.
    """
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            stream.flush()


def is_reader_gone() -> bool:
    """Whether nobody reads standard output any more, such as `head`, which has seen enough."""
    return isinstance(getattr(sys.stdout, "error", None), BrokenPipeError)


def clock(seconds: float) -> str:
    """125 -> `2:05`; 3725 -> `1:02:05`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def say(line: str, is_last: bool = True) -> None:
    """Print a line, on a terminal in place of the last one if that was of progress."""
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(clear + line, end="\n" if is_last else "", flush=True)


def gigabytes(size: float) -> str:
    """Bytes as `1.5 GB`."""
    return f"{size / 1e9:,.3g} GB"


def some(names: tuple[str, ...], most: int = 3) -> str:
    """How many there are, and the first few."""
    return f"{len(names)}: {', '.join(names[:most])}{', ...' * (len(names) > most)}"
