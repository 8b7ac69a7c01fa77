"""Read runs, and group those that differ in nothing but the seed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import UserError
from ...runtime.files import read_object, read_rows

# Knobs in which the runs of a group may differ, and the exception.
FREE_KNOBS, FIXED_KNOBS = ("seed", "run."), ("run.init_from",)


@dataclass(frozen=True)
class SavedPredictions:
    """What `Predictions.save` wrote."""

    predicted: Tensor  # (count,) int32; LEFT_OUT for an unreadable image
    target: Tensor  # (count,) int32
    images: str  # their fingerprint
    files: dict[str, str]  # their digests
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


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, by seed."""

    name: str  # A, B, ... Z, 27, ...
    runs: dict[int, Run]  # in the order of the seeds


def open_groups(folders: Sequence[str]) -> list[Group]:
    """Read the groups in `folders`, in their order.

    A folder of run folders is a group by itself. Run folders are grouped by their configs; where
    all configs are equal, each run is a group.

    Raises:
        UserError: if there are fewer than two groups, two runs of a group have the same seed, or a
            run cannot be read.
    """
    members: dict[str, list[Run]] = {}
    for folder in map(Path, folders):
        if (folder / "config.json").exists():
            run = read_run(folder)
            members.setdefault(json.dumps(run.knobs, sort_keys=True), []).append(run)
        else:
            found = sorted(path.parent for path in folder.glob("*/config.json"))
            if not found:
                raise UserError(f"{str(folder)!a} is not a run folder, and has none in it")
            members[str(folder)] = [read_run(path) for path in found]
    recipes = list(members.values())
    if len(recipes) == 1 and len(folders) > 1:
        recipes = [[run] for run in recipes[0]]
    if len(recipes) < 2:
        raise UserError("there is nothing to compare with: name two runs, or two folders of runs")
    groups = []
    for number, runs in enumerate(recipes):
        name = chr(ord("A") + number) if number < 26 else str(number + 1)
        groups.append(Group(name, {}))
        for run in sorted(runs, key=lambda run: run.seed):
            other = groups[-1].runs.setdefault(run.seed, run)
            if other is not run:
                raise UserError(
                    f"{str(other.folder)!a} and {str(run.folder)!a} are in one group, and both "
                    f"have --seed {run.seed}: leave one of them out"
                )
    return groups


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
        if predicted.ndim != 1 or predicted.shape != target.shape:
            raise ValueError("predictions and targets differ in number")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{str(path)!a} can't be read: {error}") from error
    return SavedPredictions(predicted, target, images, files, step)
