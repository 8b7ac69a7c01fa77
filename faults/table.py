"""Rows of the table: what is injected, how often, and what was lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class NotHereError(Exception):
    """This machine, or this user, does not allow the fault to be injected."""


class LossError(AssertionError):
    """What was promised was not kept; the text says how."""


@dataclass(frozen=True)
class Row:
    """A fault: what it is called, what is promised, and the function that injects it.

    The function is called with a scratch folder and how often to try. It returns a note on what
    was seen, and raises `LossError` where the promise was not kept.
    """

    fault: str
    promise: str
    inject: Callable[[Path, int], str]
    tries: int
    short_tries: int  # in `make test`; 0: not there


@dataclass(frozen=True)
class Result:
    """What came of a row."""

    row: Row
    tries: int
    verdict: str  # kept, broken, or not run here
    note: str
    seconds: float

    def facts(self) -> dict[str, str | int]:
        """As the file of the result has it."""
        return {
            "fault": self.row.fault,
            "tries": 0 if self.verdict == "not run here" else self.tries,
            "promise": self.row.promise,
            "verdict": self.verdict,
            "seen": self.note,
            "seconds": round(self.seconds),
        }


def run_row(row: Row, scratch: Path, tries: int) -> Result:
    """Inject a fault so many times."""
    began = time.monotonic()
    try:
        note = row.inject(scratch, tries)
        verdict = "**kept**"
    except LossError as loss:
        verdict, note = "BROKEN", str(loss)
    except NotHereError as reason:
        verdict, note = "not run here", str(reason)
    return Result(row, tries, verdict, note, time.monotonic() - began)
