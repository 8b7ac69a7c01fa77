"""What a search found: its trials as their folders have them, the table, and the best of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from ...errors import FaultError, UserError
from ...metrics import better, metric_number, metric_title, scale
from ...runtime.console import printable
from ...runtime.files import read_object
from ..runs import saved_runs
from ..runs.statistics import CONFIDENCE, by_seeds
from .engines import Knobs
from .trial import Row, evaluations, metric_in, status_of


@dataclass(frozen=True)
class Trial:
    """A trial as its folder has it."""

    number: int
    state: str  # done, stopped or failed
    knobs: Knobs
    metric: str  # that decides
    rows: list[Row]  # its evaluations
    steps: int  # that it trained
    failed: str  # why, if it failed

    @property
    def best(self) -> Row:
        """The evaluation of the weights in best.pt."""
        return saved_runs.best_of(self.rows, self.metric)

    @property
    def value(self) -> float:
        """Of the metric in the best evaluation."""
        return self.best[f"val/{self.metric}"]

    @property
    def score(self) -> float:
        """The higher the better; below all others without an evaluation."""
        return better(self.metric) * self.value if self.rows else -math.inf


def trial_folder(folder: Path, number: int) -> Path:
    """Where trial `number` of a search lives."""
    return folder / f"{number:03}"


def read_record(folder: Path) -> dict[str, Any]:
    """What is recorded of a trial: `knobs`, and why it `failed` or was `saved`; or nothing."""
    path = folder / "trial.json"
    return read_object(path) if path.exists() else {}


def recorded_knobs(folder: Path) -> list[Knobs]:
    """What an earlier search proposed, in its order.

    Raises:
        UserError: if a record is damaged.
    """
    places = (trial_folder(folder, number) for number in count())
    found = []
    for place in takewhile(lambda place: (place / "trial.json").exists(), places):
        knobs = read_record(place).get("knobs")
        if not isinstance(knobs, dict):
            raise UserError(f"{str(place / 'trial.json')!a} is damaged: set --run.fresh")
        found.append(knobs)
    return found


def read_trials(folder: Path) -> list[Trial]:
    """The trials of a search."""
    trials = []
    for number, knobs in enumerate(recorded_knobs(folder)):
        place = trial_folder(folder, number)
        status = status_of(place)
        failed = read_record(place).get("failed", "")
        state = "failed" if failed else "done" if status.get("state") == "done" else "stopped"
        rows = evaluations(place)
        steps = status.get("step", 0)
        trials.append(Trial(number, state, knobs, metric_in(place), rows, steps, failed))
    return trials


def best_of(trials: Sequence[Trial]) -> Trial:
    """The trial with the best score, among those trained to the end if there are any.

    Raises:
        FaultError: if none was evaluated.
    """
    evaluated = [trial for trial in trials if trial.rows]
    if not evaluated:
        raise FaultError(f"no trial was evaluated; the first one: {trials[0].failed}")
    done = [trial for trial in evaluated if trial.state == "done"]
    return max(done or evaluated, key=lambda trial: trial.score)


def table_of(trials: Sequence[Trial]) -> list[list[str]]:
    """All trials, the best first: a row of heads, and a row for each."""
    knobs = list(dict.fromkeys(knob for trial in trials for knob in trial.knobs))
    rows = [["trial", "", "epoch", metric_title(trials[0].metric), "loss", *knobs]]
    for trial in sorted(
        trials, key=lambda trial: (trial.state == "done", trial.score), reverse=True
    ):
        scores = ["", "", ""]
        if trial.rows:
            score = metric_number(trial.metric, trial.value)
            scores = [f"{trial.rows[-1]['epoch']:.2f}", score, f"{trial.best['val/loss']:.4f}"]
        values = [shown(trial.knobs.get(knob, "")) for knob in knobs]
        rows.append([f"{trial.number:03}", trial.state, *scores, *values])
    return rows


def shown(value: object) -> str:
    """The value of a knob, with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def compute_text(trials: Sequence[Trial], epochs: float) -> str:
    """How many steps the trials took, of those that they would take in full."""
    rates = [row["step"] / row["epoch"] for trial in trials for row in trial.rows]
    steps = sum(trial.steps for trial in trials)
    full = round(max(rates) * epochs) * len(trials)
    return f"{steps:,} training steps, {steps / full:.0%} of {full:,} for all trials in full"


def confirmed(folder: Path) -> str:
    """Whether the best config is better than the preset's, by runs with the same fresh seeds.

    They are in the folders `preset` and `best`.
    """
    preset = read_trials(folder / "preset")
    best = read_trials(folder / "best")
    pairs = [(a, b) for a, b in zip(preset, best, strict=True) if a.state == b.state == "done"]
    if len(pairs) < 2:
        return "fewer than two seeds were trained with both configs: nothing can be said"
    place = trial_folder(folder / "best", pairs[0][1].number)
    saved = saved_runs.read_predictions(place / "predictions.safetensors")
    grain = 1 / len(saved.predicted) if saved else 0.0  # the share of one image
    found = by_seeds([a.score for a, _ in pairs], [b.score for _, b in pairs], grain)
    metric = pairs[0][0].metric
    unit, points, digits = scale(metric)
    unit *= better(metric)  # the difference of the metric itself, which may be better when lower
    low, high = (f"{end:.{digits}f}" for end in sorted((unit * found.low, unit * found.high)))
    verdict = "no more than chance explains"
    if found.is_real:
        verdict = "better" if found.mean > 0 else "worse"
    return (
        f"best against preset: {unit * found.mean:+.{digits}f}{points} of {metric_title(metric)} "
        f"({CONFIDENCE:.0%} interval: {low} .. {high}, {len(pairs)} fresh seeds): {verdict}"
    )
