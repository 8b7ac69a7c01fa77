"""What a run folder says of its run."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from ..runtime.files import read_object, read_rows

# Knobs in which the runs of a recipe may differ, and the exception.
FREE_KNOBS, FIXED_KNOBS = ("seed", "run."), ("run.init_from",)


@dataclass(frozen=True)
class SavedPredictions:
    """What `Predictions.save` wrote."""

    predicted: Tensor  # (count,) int32; LEFT_OUT for an unreadable image
    target: Tensor  # (count,) int32
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
    top1: float  # of the last evaluation
    best_top1: float  # of the best evaluation
    loss: float  # of the last evaluation
    images_per_second: float  # median, in training
    seconds: float  # of training, without evaluating and saving
    predictions: SavedPredictions | None  # of the last evaluation


def read_run(folder: Path) -> Run:
    """Read a run, which may still be running.

    Predictions count only if they are those of the last evaluation: they are written at the end of
    a run, which may have been continued since.

    Raises:
        UserError: if it is not a run folder, or has no evaluation yet.
    """
    try:
        config = read_object(folder / "config.json")
        rows = read_rows(folder / "metrics.jsonl")
        scored = [row for row in rows if isinstance(row.get("val/top1"), float)]
        if not scored:
            raise LookupError("it has no evaluation yet")
        predictions = read_predictions(folder / "predictions.safetensors")
        if predictions is not None and predictions.step != scored[-1]["step"]:
            predictions = None
        rates, seconds, last_step = [], 0.0, 0
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
            top1=scored[-1]["val/top1"],
            best_top1=max(row["val/top1"] for row in scored),
            loss=float(scored[-1]["val/loss"]),
            images_per_second=median(rates or [0.0]),
            seconds=seconds,
            predictions=predictions,
        )
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise UserError(f"{str(folder)!a} can't be read as a run: {error}") from error


def read_predictions(path: Path) -> SavedPredictions | None:
    """What `Predictions.save` wrote; None if there is no such file.

    Raises:
        UserError: if it holds something else.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            predicted, target = file.get_tensor("predicted"), file.get_tensor("target")
            about = file.metadata()
            images, step = about["images"], int(about["step"])
            files = dict(json.loads(about.get("files", "{}")))
            classes = tuple(map(str, json.loads(about["classes"])))
        if predicted.ndim != 1 or predicted.shape != target.shape:
            raise ValueError("predictions and targets differ in number")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{str(path)!a} can't be read: {error}") from error
    return SavedPredictions(predicted, target, images, files, classes, step)
