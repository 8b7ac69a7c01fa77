"""What a search found: its trials as their folders have them, a table, and the best."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

from ...errors import FaultError
from ...metrics import better, metric_number, metric_title
from ...runtime.console import printable
from ..runs import saved_runs
from .engines import Knobs
from .trial import RECORD, Row, evaluations, read_if_there


@dataclass(frozen=True)
class Trial:
    """A trial as its folder has it."""

    number: int
    state: str  # done, stopped, saved (by its time limit) or failed
    knobs: Knobs
    metric: str  # that decides
    rows: list[Row]  # its evaluations
    best: Row  # that of the weights in best.pt; empty without any
    steps: int  # that it trained
    failed: str  # why, if it failed

    @property
    def score(self) -> float:
        """The higher the better; below all others without an evaluation."""
        return better(self.metric) * self.best[f"val/{self.metric}"] if self.best else float("-inf")


def recorded_knobs(folder: Path) -> list[Knobs]:
    """What an earlier search proposed, in its order."""
    found: list[Knobs] = []
    while record := read_if_there(folder / f"{len(found):03}" / RECORD):
        found.append(record["knobs"])
    return found


def read_trials(folder: Path, metric: str) -> list[Trial]:
    """The trials of a search in which `metric` decides."""
    trials = []
    for number, knobs in enumerate(recorded_knobs(folder)):
        place = folder / f"{number:03}"
        record = read_if_there(place / RECORD)
        status = read_if_there(place / "status.json")
        is_done = status.get("state") == "done"
        state = "done" if is_done else record.get("end", "failed")
        failed = record.get("said", "Ray ended it") if state == "failed" else ""
        rows = evaluations(place, metric)
        best = saved_runs.best_of(rows, metric, status) if rows else {}
        steps = status.get("step", 0)
        trials.append(Trial(number, state, knobs, metric, rows, best, steps, failed))
    return trials


def best_of(trials: Sequence[Trial]) -> Trial:
    """The trial with the best score, among those trained to the end if there are any.

    Raises:
        FaultError: if none was evaluated.
    """
    evaluated = [trial for trial in trials if trial.rows]
    if not evaluated:
        raise FaultError(f"no trial was evaluated; the first one: {trials[0].failed}")
    return max(evaluated, key=lambda trial: (trial.state == "done", trial.score))


def table_of(trials: Sequence[Trial], epochs: float) -> str:
    """All trials, the best first; and how many of the steps they took that all take in full."""
    knobs = list(dict.fromkeys(knob for trial in trials for knob in trial.knobs))
    rows = [["trial", "", "epoch", metric_title(trials[0].metric), "loss", *knobs]]
    ranked = sorted(trials, key=lambda trial: (trial.state == "done", trial.score), reverse=True)
    for trial in ranked:
        scores = ["", "", ""]
        if trial.rows:
            score = metric_number(trial.metric, trial.best[f"val/{trial.metric}"])
            loss = trial.best.get("val/loss", nan)  # left out where it is not finite
            scores = [f"{trial.rows[-1]['epoch']:.2f}", score, f"{loss:.4f}"]
        values = (trial.knobs.get(knob, "") for knob in knobs)
        shown = [f"{v:.4g}" if isinstance(v, float) else printable(str(v)) for v in values]
        rows.append([f"{trial.number:03}", trial.state, *scores, *shown])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"{trial.number:03} failed: {trial.failed}" for trial in trials if trial.failed]
    rates = [row["step"] / row["epoch"] for trial in trials for row in trial.rows]
    steps = sum(trial.steps for trial in trials)
    full = round(max(rates) * epochs) * len(trials)
    share = f"{steps:,} training steps, {steps / full:.0%} of {full:,} for all trials in full"
    return "\n".join([*lines, share])
