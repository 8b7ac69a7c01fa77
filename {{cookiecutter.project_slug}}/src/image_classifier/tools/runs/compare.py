"""Compare groups of runs with the first group: is a difference more than chance?

Groups are paired seed by seed; of one seed, two models are compared, image by image.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from ...errors import UserError
from ...metrics import better, counted_and_correct, metric_title, scale
from ...runtime.console import printable
from ..statistics.statistics import CONFIDENCE, Mean, by_images, mcnemar, mean_of
from .saved_runs import OF_MACHINE, SCORES, Cell, Run, columns, grain_of, read_run

Group = dict[int, Run]  # runs of one recipe, by seed, in rising order
Names = tuple[str, str]  # of two groups


def compare(folders: Sequence[str]) -> None:
    """Compare the runs in `folders`, or the folders of runs there, with the first, and print it.

    Raises:
        UserError: if there are not two groups that can be compared.
    """
    groups = open_groups(folders)
    first, *others = groups
    rows = [row_of(name, run) for name, group in groups.items() for run in group.values()]
    lines = columns(rows, str.ljust)
    for other in others:
        sentences = compare_groups((first, other), groups[first], groups[other])
        lines += ["", "\n  ".join(map(printable, sentences))]
    if len(others) > 1:
        lines += ["", "one in 20 comparisons finds a difference where there is none"]
    print("\n".join(lines))


def open_groups(folders: Sequence[str]) -> dict[str, Group]:
    """Read the groups in `folders`, in their order; they are called A, B, ... Z, 27, ...

    A folder of run folders is a group by itself. Run folders are grouped by their configs; where
    all configs are equal, each run is a group.

    Raises:
        UserError: if there are fewer than two groups, or a group has one seed twice or two recipes.
    """
    members: dict[str, list[Run]] = {}
    for folder in map(Path, folders):
        is_run = (folder / "config.json").exists()
        found = [folder] if is_run else sorted(p.parent for p in folder.glob("*/config.json"))
        if not found:
            raise UserError(f"{str(folder)!a} is not a run folder, and has none in it")
        for run in map(read_run, found):
            group_key = json.dumps(run.knobs, sort_keys=True) if is_run else str(folder)
            members.setdefault(group_key, []).append(run)
    recipes = list(members.values())
    if len(recipes) == 1 and len(folders) > 1:
        recipes = [[run] for run in recipes[0]]
    if len(recipes) < 2:
        raise UserError("there is nothing to compare with: name two runs, or two folders of runs")
    groups: dict[str, Group] = {}
    for number, runs in enumerate(recipes):
        group = {run.seed: run for run in sorted(runs, key=lambda run: run.seed)}
        groups[chr(ord("A") + number) if number < 26 else str(number + 1)] = group
        for run in runs:
            other = group[run.seed]
            why = f"both have --seed {run.seed}: leave one of them out (folds can't be compared)"
            if other is run:
                other = runs[0]
                odd = [k for k, value in run.knobs.items() if value != other.knobs.get(k, value)]
                odd = [knob for knob in odd if not knob.startswith(OF_MACHINE)]
                why = f"differ in {odd[0]}: name the runs of one recipe" if odd else ""
            if why:
                raise UserError(
                    f"{str(other.folder)!a} and {str(run.folder)!a} are in one group, and {why}"
                )
    return groups


def row_of(name: str, run: Run) -> list[Cell]:
    """A run's row of the table; `name` is that of its group."""
    state = "" if run.state == "done" else f" ({run.state})"
    return [
        ("", name),
        ("run", printable(f"{run.folder}{state}")),
        ("seed", str(run.seed)),
        *run.results,
        ("images/s", f"{run.images_per_second:,.0f}"),
    ]


def compare_groups(names: Names, first: Group, second: Group) -> list[str]:
    """Sentences that compare two groups by the seeds that both have; of one seed, two models.

    Raises:
        UserError: if no runs can be paired, or their validation images differ.
    """
    a, b = names
    pairs = [(first[seed], second[seed]) for seed in first if seed in second]
    if not pairs and len(first) == len(second) == 1:
        pairs = [(*first.values(), *second.values())]
    if not pairs:
        raise UserError(
            f"{a} has the seeds {[*first]}, {b} {[*second]}: nothing can be paired; train one of "
            "them with the seeds of the other"
        )
    for pair in pairs:
        check_pair(*pair)
    was, now = (run.knobs for run in pairs[0])
    changed = [name for name in was | now if was.get(name) != now.get(name)]
    changes = [f"{name} {was.get(name)!r} -> {now.get(name)!r}" for name in changed]
    found = compare_recipes(names, pairs) if len(pairs) > 1 else compare_models(names, *pairs[0])
    if early := [str(run.folder) for pair in pairs for run in pair if run.state != "done"]:
        found.append(f"not at their end, so their scores may change: {', '.join(early)}")
    return [f"{b} against {a}: {', '.join(changes) or 'the same config'}", *found]


def compare_recipes(names: Names, pairs: list[tuple[Run, Run]]) -> list[str]:
    """Compare two recipes, by two seeds or more, paired seed by seed."""
    grain = grain_of([run for pair in pairs for run in pair])
    metric = pairs[0][0].metric
    sign = better(metric)
    sentences = []
    for of, name in SCORES.items():
        gains = [sign * (getattr(other, name) - getattr(one, name)) for one, other in pairs]
        found = mean_of(gains, grain, is_share=False)
        is_real = found.low > 0 or found.high < 0
        text = difference_text(names, found, f"{len(pairs)} seeds", is_real, metric)
        sentences.append(f"{metric_title(metric)} of {of}: {text}")
    return sentences


def compare_models(names: Names, one: Run, other: Run) -> list[str]:
    """Compare two models by their predictions on the same images; UserError if one has none."""
    first = one.need_predictions()
    second = other.need_predictions()
    counted, right = counted_and_correct(first.predicted, first.target)
    other_counted, other_right = counted_and_correct(second.predicted, second.target)
    counted = counted & other_counted
    count = int(counted.sum())
    only_first = int((right & ~other_right & counted).sum())
    only_second = int((other_right & ~right & counted).sum())
    p_value = mcnemar(only_first, only_second)
    found = by_images(only_first, only_second, max(1, count))
    basis = f"{count:,} images, McNemar's p {p_value:.2g}"
    metric = "top1" if first.target.ndim == 1 else "exact"
    text = difference_text(names, found, basis, p_value < 1 - CONFIDENCE, metric)
    return [
        f"{metric_title(metric)} of best.pt: {text}",
        f"only {names[0]} is right on {only_first:,} images, only {names[1]} on {only_second:,}",
        "one seed of each: this compares two models, not two recipes; for recipes, train both "
        "with the same three seeds or more",
    ]


def check_pair(one: Run, other: Run) -> None:
    """Raise `UserError` unless two runs have one metric and, where known, the same images."""
    runs = f"{str(one.folder)!a} and {str(other.folder)!a}"
    if one.metric != other.metric:
        raise UserError(
            f"the best of {runs} are the best by {one.metric} and by {other.metric}: "
            "compare runs with the same --run.best-by"
        )
    known = one.predictions and other.predictions
    if known and not one.predictions.are_of(known.images, known.files):
        raise UserError(
            f"the validation images of {runs} differ: scores on different images cannot be compared"
        )


def difference_text(names: Names, found: Mean, basis: str, is_real: bool, metric: str) -> str:
    """How much better one of two groups is, in words."""
    sign = 1 if found.mean >= 0 else -1
    ahead = names[sign > 0]
    unit, points, digits = scale(metric)
    mean, *ends = (unit * sign * value for value in (found.mean, found.low, found.high))
    low, high = sorted(ends)
    interval = f"({CONFIDENCE:.0%} interval: {low:.{digits}f} .. {high:.{digits}f}, {basis})"
    by = f"by {mean:.{digits}f}{points} {interval}"
    if is_real:
        return f"{ahead} is better {by}: significant"
    return f"no significant difference: {ahead} is ahead {by}"
