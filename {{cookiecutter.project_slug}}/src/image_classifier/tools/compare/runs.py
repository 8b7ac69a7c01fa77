"""Runs that are there to be compared, and which of them are of one recipe."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...config import UserError
from ...predictions import Predictions, read_predictions
from ...runtime.files import read_object, read_rows
from ..html.charts import Rows, curve, is_number

# Knobs in which the runs of a group may differ, and what of them counts all the same.
NO_KNOBS, STILL_KNOBS = ("seed", "run."), ("run.init_from",)


@dataclass(frozen=True)
class Run:
    """What a run folder says of its run."""

    folder: Path
    config: dict[str, Any]
    rows: Rows
    state: str  # running, done, interrupted or failed
    predictions: Predictions | None

    @property
    def seed(self) -> int:
        """Of weights, order and augmentation."""
        return self.config["seed"]

    @property
    def knobs(self) -> dict[str, Any]:
        """All that its group has in common."""
        return {
            knob: value
            for knob, value in self.config.items()
            if knob in STILL_KNOBS or not knob.startswith(NO_KNOBS)
        }

    @property
    def top1(self) -> float:
        """Of the last evaluation."""
        return curve(self.rows, "val/top1")[-1][1]

    @property
    def best_top1(self) -> float:
        """Of the best evaluation."""
        return max(value for _, value in curve(self.rows, "val/top1"))

    @property
    def loss(self) -> float:
        """Of the last evaluation."""
        return curve(self.rows, "val/loss")[-1][1]

    @property
    def images_per_second(self) -> float:
        """In training, as a rule."""
        rates = [value for _, value in curve(self.rows, "train/images_per_second")]
        return median(rates) if rates else 0.0

    @property
    def seconds(self) -> float:
        """Of training, without evaluating and saving."""
        timed = [row for row in self.rows if row.get("train/images_per_second")]
        steps = [0, *(row["step"] for row in timed)]
        return sum(
            (row["step"] - before) * self.config["data.batch_size"] / row["train/images_per_second"]
            for before, row in zip(steps[:-1], timed, strict=True)
        )


@dataclass(frozen=True)
class Group:
    """Runs of one recipe."""

    name: str  # a letter
    runs: dict[int, Run]  # by seed


def open_groups(folders: Sequence[str]) -> list[Group]:
    """The groups that `folders` make, in their order.

    A folder of run folders is a group by itself. Run folders are put together by their knobs;
    where that leaves one group, they are to be compared with each other, as of other code.

    Raises:
        UserError: if there are less than two, or a run can't be read.
    """
    groups: dict[str, list[Run]] = {}
    for folder in map(Path, folders):
        if (folder / "config.json").exists():
            run = read_run(folder)
            groups.setdefault(json.dumps(run.knobs, sort_keys=True), []).append(run)
        else:
            found = sorted(path.parent for path in folder.glob("*/config.json"))
            if not found:
                raise UserError(f"{str(folder)!a} is no run folder, nor are there any in it")
            groups[str(folder)] = [read_run(path) for path in found]
    members = list(groups.values())
    if len(members) == 1 and len(folders) > 1:
        members = [[run] for run in members[0]]
    if len(members) < 2:
        raise UserError("there is nothing to compare with: name two runs, or two folders of runs")
    return [make_group(number, runs) for number, runs in enumerate(members)]


def make_group(number: int, runs: list[Run]) -> Group:
    """A group with the letter, or after those the number, that is its turn.

    Raises:
        UserError: if two runs have the same seed.
    """
    by_seed: dict[int, Run] = {}
    for run in runs:
        other = by_seed.setdefault(run.seed, run)
        if other is not run:
            raise UserError(
                f"{str(other.folder)!a} and {str(run.folder)!a} are one group, and both have "
                f"--seed {run.seed}: leave one of them out"
            )
    return Group(chr(ord("A") + number) if number < 26 else str(number + 1), by_seed)


def read_run(folder: Path) -> Run:
    """What `folder` says of its run, which may be at work there.

    Answers count only if they are those of the last evaluation: they are written at the end of a
    run, which may since have gone on.

    Raises:
        UserError: if it is no run folder, was not evaluated yet, or was begun anew meanwhile.
    """
    try:
        began = written_at(folder / "config.json")
        config = read_object(folder / "config.json")
        rows = read_rows(folder / "metrics.jsonl")
        state = str(read_object(folder / "status.json").get("state", "unknown"))
        predictions = read_predictions(folder / "predictions.safetensors")
        if not (scored := [row for row in rows if is_number(row.get("val/top1"))]):
            raise UserError(f"{str(folder)!a} was not evaluated yet")
        if predictions is not None and predictions.step != scored[-1]["step"]:
            predictions = None
        run = Run(folder, config, rows, state, predictions)
        # Whatever the files may hold: these are numbers, or it shows now.
        if type(run.seed) is not int or not math.isfinite(run.seconds):
            raise ValueError("seed, or seconds")
        math.fsum((run.top1, run.best_top1, run.loss))
        is_same = written_at(folder / "config.json") == began
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename!a} can't be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise UserError(f"{str(folder)!a} holds no run of this project: {error!r}") from error
    if not is_same:
        raise UserError(f"{str(folder)!a} was begun anew while it was read: compare once more")
    return run


def written_at(path: Path) -> tuple[int, int]:
    """What tells a file from another that gets its name."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
