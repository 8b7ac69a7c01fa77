"""Read runs, and group those that differ in nothing but the seed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError
from .saved_runs import Run, read_run


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
