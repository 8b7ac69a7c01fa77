"""Compare groups of runs with the first group: is a difference more than chance?

Groups are paired seed by seed. Where they share one seed only, two models are compared, image by
image.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ...data import are_replaced
from ...errors import UserError
from ...metrics import better, counted_and_correct, metric_title, scale
from ...runtime.console import printable
from .saved_runs import Cell, Run, columns, grain_of, read_run
from .statistics import CONFIDENCE, Mean, by_images, by_seeds, mcnemar

Group = dict[int, Run]  # runs of one recipe, by seed, in rising order
Pairs = list[tuple[Run, Run]]  # runs of two groups
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
        one_in = round(1 / (1 - CONFIDENCE))
        lines += ["", f"one in {one_in} comparisons finds a difference where there is none"]
    print("\n".join(lines))


def open_groups(folders: Sequence[str]) -> dict[str, Group]:
    """Read the groups in `folders`, in their order; they are called A, B, ... Z, 27, ...

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
    groups: dict[str, Group] = {}
    for number, runs in enumerate(recipes):
        group = groups[chr(ord("A") + number) if number < 26 else str(number + 1)] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            other = group.setdefault(run.seed, run)
            if other is not run:
                raise UserError(
                    f"{str(other.folder)!a} and {str(run.folder)!a} are in one group, and both "
                    f"have --seed {run.seed}: leave one of them out"
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
    for one, other in pairs:
        check_images(one, other)
        if one.metric != other.metric:
            raise UserError(
                f"the best of {a} is the best by {one.metric}, of {b} by {other.metric}: "
                "compare runs with the same --run.best-by"
            )
    was, now = (run.knobs for run in pairs[0])
    changed = [name for name in was | now if was.get(name) != now.get(name)]
    changes = [f"{name} {shown(was.get(name))} -> {shown(now.get(name))}" for name in changed]
    lines = [f"{b} against {a}: {', '.join(changes) or 'the same config'}"]
    how = ["trained" if knobs["epochs"] else "a linear probe" for knobs in (was, now)]
    if how[0] != how[1]:
        lines.append(f"{a} is {how[0]}, {b} {how[1]}: the difference is that, too")
    lines += compare_models(names, *pairs[0]) if len(pairs) == 1 else compare_recipes(names, pairs)
    speeds = [(one.images_per_second, other.images_per_second) for one, other in pairs]
    ratios = [other / one for one, other in speeds if one and other]  # a probe made no step
    speed = f"{median(ratios):.2f} x the images/s of {a}" if ratios else "not measured"
    return [*lines, f"speed: {speed}; `bench` measures in turns"]


def shown(value: object) -> str:
    """The value of an option, `''` if it is empty."""
    return str(value) or "''"


def compare_recipes(names: Names, pairs: Pairs) -> list[str]:
    """Compare two recipes, by two seeds or more."""
    grain = grain_of(run for pair in pairs for run in pair)
    metric = pairs[0][0].metric
    scores = {"best.pt": "score", "the last weights": "last_score"}
    if all(run.score == run.last_score for pair in pairs for run in pair):
        del scores["the last weights"]
    sentences = []
    for of, name in scores.items():
        first, second = (
            [better(metric) * getattr(run, name) for run in column]
            for column in zip(*pairs, strict=True)
        )
        found = by_seeds(first, second, grain)
        text = difference_text(names, found, f"{len(pairs)} seeds", found.is_real, metric)
        sentences.append(f"{metric_title(metric)} of {of}: {text}")
    return sentences


def compare_models(names: Names, one: Run, other: Run) -> list[str]:
    """Compare two models by their predictions on the same images.

    Raises:
        UserError: if one of the runs has no predictions.
    """
    for run in (one, other):
        if run.predictions is None:
            raise UserError(
                f"{str(run.folder)!a} has no predictions.safetensors of its best weights, which a "
                "run writes at its end: run its command again, which takes one evaluation"
            )
    first, second = one.predictions, other.predictions
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


def check_images(one: Run, other: Run) -> None:
    """Check that two runs were evaluated on the same images, as far as that is known.

    Raises:
        UserError: naming both runs.
    """
    was = one.predictions
    now = other.predictions
    if was is None or now is None:
        return
    same = was.same_images(now.images) and len(was.predicted) == len(now.predicted)
    if not same or are_replaced(was.files, now.files):
        raise UserError(
            f"the validation images of {str(one.folder)!a} are not those of "
            f"{str(other.folder)!a}: scores on different images cannot be compared"
        )


def difference_text(
    names: Names, found: Mean, basis: str, is_significant: bool, metric: str
) -> str:
    """How much better one of two groups is, in words."""
    sign = 1 if found.mean >= 0 else -1
    ahead = names[sign > 0]
    unit, points, digits = scale(metric)
    mean, *ends = (unit * sign * value for value in (found.mean, found.low, found.high))
    low, high = sorted(ends)
    interval = f"({CONFIDENCE:.0%} interval: {low:.{digits}f} .. {high:.{digits}f}, {basis})"
    by = f"by {mean:.{digits}f}{points} {interval}"
    if is_significant:
        return f"{ahead} is better {by}: significant"
    return f"no significant difference: {ahead} is ahead {by}"
