"""What a run folder says of its run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors import SafetensorError
from torch import Tensor

from ...config import FREE_TO_CHANGE, Config
from ...data import LEFT_OUT, are_replaced, open_dataset
from ...errors import UserError
from ...extensions import of_tools
from ...metrics import better, find_metric, metric_number, metric_title
from ...runtime.console import clock
from ...runtime.files import about_tensors, open_tensors, read_object, read_rows
from ...tasks import metric_of

# Knobs in which the runs of a recipe may differ, the exceptions, and those of a machine.
FREE_KNOBS = ("seed", "run.")
FIXED_KNOBS = ("run.init_from", "run.init_head")
OF_MACHINE = (*(knob for knob in FREE_TO_CHANGE if knob != "run."), "precision")
SCORES = {"best.pt": "score", "the last weights": "last_score"}  # of weights, in a `Run`

Images = tuple[str, dict[str, str]]  # a fingerprint, and digests of files
Cell = tuple[str, str]  # of a table: the head of its column, and what it holds


@dataclass(frozen=True)
class SavedPredictions:
    """What `Predictions.save` wrote."""

    predicted: Tensor  # (count,) int32; LEFT_OUT for an unreadable image; or with several labels
    target: Tensor  # both (count, classes) int8
    images: str  # their fingerprint
    files: dict[str, str]  # their digests
    classes: tuple[str, ...]
    step: int  # of the weights

    def are_of(self, images: str, files: dict[str, str]) -> bool:
        """Whether they are of the images with this fingerprint and these digests of files."""
        return are_same((self.images, self.files), (images, files))

    @property
    def is_counted(self) -> Tensor:
        """Which predictions count, as in `Predictions`: bool."""
        return (self.predicted != LEFT_OUT) & (self.target != LEFT_OUT)


@dataclass(frozen=True)
class Run:
    """What a run folder says of its run."""

    folder: Path
    seed: int
    state: str  # running, done, interrupted or failed
    knobs: dict[str, Any]  # of the config, without those in which a group may differ
    metric: str  # that decides which evaluation is the best
    score: float  # its value for the weights in best.pt, the run's result
    last_score: float  # in the last evaluation
    loss: float  # of the weights in best.pt
    images_per_second: float  # median, in training
    seconds: float  # of training, without evaluating and saving
    predictions: SavedPredictions | None  # of these weights

    def need_predictions(self) -> SavedPredictions:
        """Its predictions; UserError if it has none."""
        if self.predictions is None:
            raise UserError(
                f"{str(self.folder)!a} has no predictions.safetensors of its best weights, which a "
                "run writes at its end: run its command again, which takes one evaluation"
            )
        return self.predictions

    def __str__(self) -> str:
        """Its results in words."""
        return ", ".join(map(" ".join, self.results))

    @property
    def results(self) -> list[Cell]:
        """What it reached, of best.pt; and the score of the last weights."""
        return [
            (metric_title(self.metric), metric_number(self.metric, self.score)),
            ("last", metric_number(self.metric, self.last_score)),
            ("loss", f"{self.loss:.4f}"),
            ("training", clock(self.seconds)),
        ]


def images_of(config: Config, split: str) -> Images:
    """What tells the images of a split from others; UserError if there are none."""
    source = open_dataset(config.data, split).fitted(config.model.task, split)
    return source.fingerprint(), source.file_digests


def are_same(was: Images, now: Images) -> bool:
    """Whether images are those of before, which may be prepared now."""
    # A space separates what says that they are prepared.
    is_same = was[0].partition(" ")[0] == now[0].partition(" ")[0]
    return is_same and not are_replaced(was[1], now[1])


def read_run(folder: Path) -> Run:
    """Read a run, which may still be running.

    Predictions count only if they are those of the weights in best.pt: they are written at the end
    of a run, which may have been continued since.

    Raises:
        UserError: if it is not a run folder, or has no evaluation yet.
    """
    try:
        config = of_tools() | read_object(folder / "config.json")
        knobs = {k: config[k] for k in config if k in FIXED_KNOBS or not k.startswith(FREE_KNOBS)}
        rows = read_rows(folder / "metrics.jsonl")
        metric = metric_of(config)
        scored = evaluations(rows, metric)
        if not scored:
            raise LookupError("it has no evaluation yet")
        status = read_object(folder / "status.json")
        saved = read_predictions(folder / "predictions.safetensors")
        best = best_of(scored, metric, status, len(saved.predicted) if saved else 0)
        timed = [row for row in rows if row.get("train/images_per_second")]  # 0: the first step
        rates = [row["train/images_per_second"] for row in timed]
        steps = np.diff([0, *(row["step"] for row in timed)])
        return Run(
            folder=folder,
            seed=int(config["seed"]),
            state=str(status.get("state", "unknown")),
            knobs=knobs,
            metric=metric,
            score=best[f"val/{metric}"],
            last_score=scored[-1][f"val/{metric}"],
            loss=float(best.get("val/loss", nan)),  # left out where it is not finite
            images_per_second=median(rates or [0.0]),
            seconds=float((steps * config["data.batch_size"] / rates).sum()),
            predictions=saved if saved and saved.step == best["step"] else None,
        )
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise UserError(f"{str(folder)!a} can't be read as a run: {error}") from error


def grain_of(runs: Sequence[Run]) -> float:
    """The share of one image in the scores of runs; 0 where they count none, or none has any."""
    metric = find_metric(runs[0].metric)
    if not metric.is_percent or metric.needs_all:
        return 0.0
    return next((1 / len(run.predictions.predicted) for run in runs if run.predictions), 0.0)


def columns(rows: list[list[Cell]], align: Callable[[str, int], str]) -> list[str]:
    """The lines of a table, with its heads."""
    lines = [[head for head, _ in rows[0]], *([cell for _, cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(align, line, widths)).rstrip() for line in lines]


def evaluations(rows: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` that have a value of `metric`."""
    pairs = ((row, row.get(f"val/{metric}")) for row in rows)
    return [row for row, value in pairs if isinstance(value, float) and isfinite(value)]


def best_of(
    rows: list[dict[str, Any]], metric: str, status: dict[str, Any], count: int = 0
) -> dict[str, Any]:
    """The row of the weights in best.pt, which a run at its end names in its `status`.

    Else it is the latest within an image of the best, as in `TrainState.record`. Where it is not
    known of how many images, `count`, best.pt may be an image behind.
    """
    result = status.get("result")
    step = result.get("step") if isinstance(result, dict) else None
    if named := [row for row in rows if row["step"] == step]:
        return named[0]
    slack = find_metric(metric).slack(count)
    scores = [better(metric) * row[f"val/{metric}"] for row in rows]
    return rows[max(n for n, score in enumerate(scores) if max(scores) - score <= slack)]


def read_predictions(path: Path) -> SavedPredictions | None:
    """What `Predictions.save` wrote; None without the file; UserError if it is something else."""
    if not path.is_file():
        return None
    try:
        with open_tensors(path) as file:
            about = about_tensors(file.metadata(), "files", "classes")
            return SavedPredictions(
                predicted=file.get_tensor("predicted"),
                target=file.get_tensor("target"),
                images=str(about["images"]),
                files=dict(about.get("files", {})),
                classes=tuple(map(str, about["classes"])),
                step=int(about["step"]),
            )
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{str(path)!a} can't be read: {error}") from error
