"""Rows of the table: what is injected, how often, and what was lost."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch


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

    @property
    def line(self) -> str:
        """As a line of the table."""
        tries = f"{self.tries:,}" if self.verdict != "not run here" else "0"
        cells = self.row.fault, tries, self.row.promise, self.verdict, self.note
        return f"| {' | '.join(cells)} | {self.seconds:.0f} s |"


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


def page(results: list[Result], command: str, seconds: float) -> str:
    """The table in Markdown, with the machine that it was made on."""
    model = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    cores = len(os.sched_getaffinity(0))
    broken = sum(result.verdict == "BROKEN" for result in results)
    missing = sum(result.verdict == "not run here" for result in results)
    kept = len(results) - broken - missing
    return "\n".join(
        [
            "# Faults",
            "",
            "Each row is a fault that was injected for real into the generated project: processes",
            "were killed and stopped, disks were full, files were damaged. `make faults` makes",
            "this table anew; a few tries of most rows are part of `make test`.",
            "",
            "| fault | tries | promise | | seen | took |",
            "|---|---:|---|---|---|---:|",
            *(result.line for result in results),
            "",
            f"{kept} promises kept, {broken} broken, {missing} not run here.",
            "",
            f"`{command}`, {date.today()}: {seconds / 60:.0f} minutes on {cores} cores ({model}), "
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"torchvision {version('torchvision')}, Pillow {version('pillow')}.",
            "",
        ]
    )
