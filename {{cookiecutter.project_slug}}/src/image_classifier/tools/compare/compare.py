"""Runs side by side, and whether one is better than another or whether that was chance.

Runs whose configs differ in nothing but the seed are one group; each is compared with the first.
"""

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from ...config import UserError
from ...runtime.console import clock, printable
from ...runtime.files import write_json, write_text
from ..html.charts import Line, chart, curve
from ..html.style import PAGE
from ..html.tables import table
from ..statistics import CONFIDENCE
from .comparison import Comparison, compare_groups
from .runs import Group, open_groups

HEADS = ("", "run", "seed", "top-1", "best", "loss", "training", "images/s")
STYLES = 4  # of curves, in the style sheet


def compare(folders: Sequence[str], json_file: str = "", html_file: str = "") -> None:
    """Compare the runs in `folders`, or the folders of runs there, with the first; print it.

    Raises:
        UserError: if there are not two groups that can be compared, or a file can't be written.
    """
    first, *others = open_groups(folders)
    comparisons = [compare_groups(first, other) for other in others]
    lines = run_lines([first, *others])
    for comparison in comparisons:
        lines += ["", *comparison.sentences]
    if len(others) > 1:
        one_in = round(1 / (1 - CONFIDENCE))
        lines += ["", f"one in {one_in} comparisons finds a difference where there is none"]
    print("\n".join(map(printable, lines)))
    for name, write in (
        (json_file, lambda path: write_json(path, as_json([first, *others], comparisons))),
        (html_file, lambda path: write_text(path, page([first, *others], comparisons))),
    ):
        try:
            if name:
                write(Path(name))
        except OSError as error:
            raise UserError(f"cannot write {name!a}: {error.strerror}") from error


def run_rows(groups: list[Group]) -> list[tuple[str, ...]]:
    """A row of text for each run, as HEADS has it."""
    return [
        (
            group.name,
            str(run.folder) + ("" if run.state == "done" else f" ({run.state})"),
            str(seed),
            f"{run.top1:.2%}",
            f"{run.best_top1:.2%}",
            f"{run.loss:.4f}",
            clock(run.seconds),
            f"{run.images_per_second:,.0f}",
        )
        for group in groups
        for seed, run in sorted(group.runs.items())
    ]


def run_lines(groups: list[Group]) -> list[str]:
    """All runs in columns."""
    rows = [HEADS, *(tuple(map(printable, row)) for row in run_rows(groups))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def as_json(groups: list[Group], comparisons: list[Comparison]) -> dict[str, Any]:
    """All that was found, for a program."""
    return {
        "runs": [
            {
                "group": group.name,
                "folder": str(run.folder),
                "seed": seed,
                "state": run.state,
                "top1": run.top1,
                "best_top1": run.best_top1,
                "seconds": run.seconds,
                "images_per_second": run.images_per_second,
            }
            for group in groups
            for seed, run in sorted(group.runs.items())
        ],
        "comparisons": [
            {
                "first": found.first.name,
                "second": found.second.name,
                "seeds": found.seeds,
                "knobs": found.knobs,
                "final_top1": asdict(found.final),
                "best_top1": found.best and asdict(found.best),
                "p_value": found.p_value,
                "is_real": found.is_real,
                "speed": found.speed,
                "sentences": [sentence.strip() for sentence in found.sentences],
            }
            for found in comparisons
        ],
    }


def page(groups: list[Group], comparisons: list[Comparison]) -> str:
    """All that was found as a page, with the curves of all runs in the same charts."""

    def overlaid(title: str, metric: str, **look: Any) -> str:  # noqa: ANN401 - of `chart`
        scale = 100 if look.get("unit") else 1
        lines = []
        for number, group in enumerate(groups):
            style = f"run{number % STYLES}"
            for run in group.runs.values():
                points = curve(run.rows, metric, scale)
                name = group.name if run is next(iter(group.runs.values())) else ""
                lines.append(Line(name, points, style, shows_value=len(group.runs) == 1))
        return chart(title, lines, **look)

    verdicts = "".join(
        "".join(f"<p>{escape(sentence.strip())}</p>" for sentence in found.sentences)
        for found in comparisons
    )
    charts = (
        overlaid("Validation top-1", "val/top1", unit="%")
        + overlaid("Validation loss", "val/loss")
        + overlaid("Training loss", "train/loss")
        + overlaid("Images per second", "train/images_per_second", low=0)
    )
    body = (
        f"<h1>{' / '.join(group.name for group in groups)}</h1>{verdicts}"
        f'<div class="curves">{charts}</div><h2>Runs</h2>{table(HEADS, run_rows(groups))}'
    )
    return PAGE.substitute(title="Compared runs", body=body)
