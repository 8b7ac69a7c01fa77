"""What a run folder says of its run."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import UserError
from ...extensions import of_tools
from ...metrics import better
from ...runtime.files import about_tensors, read_object, read_rows
from ...tasks import metric_of

# Knobs in which the runs of a recipe may differ, and the exception.
FREE_KNOBS, FIXED_KNOBS = ("seed", "run."), ("run.init_from",)


@dataclass(frozen=True)
class SavedPredictions:
    """What `Predictions.save` wrote."""

    predicted: Tensor  # (count,) int32; LEFT_OUT for an unreadable image; or with several labels
    target: Tensor  # both (count, classes) int8
    images: str  # their fingerprint
    files: dict[str, str]  # their digests
    classes: tuple[str, ...]
    step: int  # of the weights


@dataclass(frozen=True)
class Run:
    """What a run folder says of its run."""

    folder: Path
    seed: int
    state: str  # running, done, interrupted or failed
    knobs: dict[str, Any]  # of the config, without those in which a group may differ
    metric: str  # that decides which evaluation is the best
    score: float  # its value in the best evaluation: of the weights in best.pt, the run's result
    last_score: float  # in the last evaluation
    loss: float  # of the best evaluation
    images_per_second: float  # median, in training
    seconds: float  # of training, without evaluating and saving
    predictions: SavedPredictions | None  # of the best evaluation


def read_run(folder: Path) -> Run:
    """Read a run, which may still be running.

    Predictions count only if they are those of the best evaluation: they are written at the end of
    a run, which may have been continued since.

    Raises:
        UserError: if it is not a run folder, or has no evaluation yet.
    """
    try:
        config = of_tools() | read_object(folder / "config.json")
        rows = read_rows(folder / "metrics.jsonl")
        metric = metric_of(config)
        scored = evaluations(rows, metric)
        if not scored:
            raise LookupError("it has no evaluation yet")
        best = best_of(scored, metric)
        predictions = read_predictions(folder / "predictions.safetensors")
        if predictions is not None and predictions.step != best["step"]:
            predictions = None
        rates = []
        seconds = 0.0
        last_step = 0
        for row in rows:
            if rate := row.get("train/images_per_second"):  # 0 where a row is of the first step
                seconds += (row["step"] - last_step) * config["data.batch_size"] / rate
                rates.append(rate)
                last_step = row["step"]
        return Run(
            folder=folder,
            seed=int(config["seed"]),
            state=str(read_object(folder / "status.json").get("state", "unknown")),
            knobs={
                name: value
                for name, value in config.items()
                if name in FIXED_KNOBS or not name.startswith(FREE_KNOBS)
            },
            metric=metric,
            score=best[f"val/{metric}"],
            last_score=scored[-1][f"val/{metric}"],
            loss=float(best["val/loss"]),
            images_per_second=median(rates or [0.0]),
            seconds=seconds,
            predictions=predictions,
        )
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise UserError(f"{str(folder)!a} can't be read as a run: {error}") from error


def evaluations(rows: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` that have a value of `metric`."""
    values = (row.get(f"val/{metric}") for row in rows)
    is_known = [isinstance(value, float) and isfinite(value) for value in values]
    return [row for row, known in zip(rows, is_known, strict=True) if known]


def best_of(rows: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The row of the weights in best.pt: of equal scores the first, as a run keeps them."""
    return max(rows, key=lambda row: better(metric) * row[f"val/{metric}"])


def read_predictions(path: Path) -> SavedPredictions | None:
    """What `Predictions.save` wrote; None if there is no such file.

    Raises:
        UserError: if it holds something else.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            predicted = file.get_tensor("predicted")
            target = file.get_tensor("target")
            about = about_tensors(file.metadata(), "files", "classes")
            images = str(about["images"])
            step = int(about["step"])
            files = dict(about.get("files", {}))
            classes = tuple(map(str, about["classes"]))
        if predicted.ndim > 2 or predicted.shape != target.shape:
            raise ValueError("predictions and targets differ in number")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{str(path)!a} can't be read: {error}") from error
    return SavedPredictions(predicted, target, images, files, classes, step)
