"""Runs that are there to be compared, and which of them are of one recipe."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .answers import Predictions, read_predictions
from .charts import Rows, curve
from .config import UserError

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
    """What `folder` says of its run.

    Raises:
        UserError: if it is no run folder, or was not evaluated yet.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        state = json.loads((folder / "status.json").read_text(encoding="utf-8"))["state"]
        run = Run(folder, config, rows, state, read_predictions(folder / "predictions.safetensors"))
        if not curve(rows, "val/top1"):
            raise UserError(f"{str(folder)!a} was not evaluated yet")
        # Whatever the files may hold: these are numbers, or it shows now.
        int(run.seed), math.fsum((run.top1, run.best_top1, run.loss, run.seconds))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename!a} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{str(folder)!a} holds no run of this project: {error!r}") from error
    return run
