"""Rows of the table: what is injected, how often, and what was lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NOT_HERE = "not run here"  # a verdict
Facts = dict[str, str | int]


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


def run_row(row: Row, scratch: Path, tries: int) -> Facts:
    """Inject a fault so many times: what the file of the result says of it."""
    began = time.monotonic()
    try:
        seen = row.inject(scratch, tries)
        verdict = "**kept**"
    except LossError as loss:
        verdict, seen = "BROKEN", str(loss)
    except NotHereError as reason:
        verdict, seen = NOT_HERE, str(reason)
    return {
        "fault": row.fault,
        "tries": 0 if verdict == NOT_HERE else tries,
        "promise": row.promise,
        "verdict": verdict,
        "seen": seen,
        "seconds": round(time.monotonic() - began),
    }
