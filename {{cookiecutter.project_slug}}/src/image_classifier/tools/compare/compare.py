"""Compare groups of runs with the first group: is a difference more than chance?

Groups are paired seed by seed. Where they share one seed only, two models are compared, image by
image.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from ...data import LEFT_OUT, are_replaced
from ...errors import UserError
from ...runtime.console import clock, printable
from ...runtime.files import write_json
from ..statistics import CONFIDENCE, Difference, by_images, by_seeds, mcnemar
from .runs import Group, Run, open_groups

HEADS = ("", "run", "seed", "top-1", "best", "loss", "training", "images/s")


def compare(folders: Sequence[str], json_file: str = "") -> None:
    """Compare the runs in `folders`, or the folders of runs there, with the first, and print it.

    Raises:
        UserError: if there are not two groups that can be compared, or a file cannot be written.
    """
    first, *others = groups = open_groups(folders)
    comparisons = [compare_groups(first, other) for other in others]
    lines = table_of_runs(groups)
    for found in comparisons:
        lines += ["", "\n  ".join(map(printable, found["sentences"]))]
    if len(others) > 1:
        one_in = round(1 / (1 - CONFIDENCE))
        lines += ["", f"one in {one_in} comparisons finds a difference where there is none"]
    print("\n".join(lines))
    names = ("seed", "state", "top1", "best_top1", "loss", "seconds", "images_per_second")
    runs = [
        {"group": group.name, "folder": str(run.folder)} | {n: getattr(run, n) for n in names}
        for group in groups
        for run in group.runs.values()
    ]
    try:
        if json_file:
            write_json(Path(json_file), {"runs": runs, "comparisons": comparisons})
    except OSError as error:
        raise UserError(f"cannot write {json_file!a}: {error.strerror}") from error


def compare_groups(first: Group, second: Group) -> dict[str, Any]:
    """Compare two groups by the seeds that both have, or two models where that is one.

    Returns:
        The result for `--json`; `sentences` say all of it.

    Raises:
        UserError: if no runs can be paired, or their validation images differ.
    """
    pairs = [(first.runs[seed], second.runs[seed]) for seed in first.runs if seed in second.runs]
    if not pairs and len(first.runs) == len(second.runs) == 1:
        pairs = [(*first.runs.values(), *second.runs.values())]
    if not pairs:
        raise UserError(
            f"{first.name} has the seeds {[*first.runs]}, {second.name} {[*second.runs]}: "
            "nothing can be paired; train one of them with the seeds of the other"
        )
    for one, other in pairs:
        check_images(one, other)
    by_pairs = compare_models if len(pairs) == 1 else compare_recipes
    found = by_pairs(first.name, second.name, pairs)
    was, now = (run.knobs for run in pairs[0])
    knobs = {n: (was.get(n), now.get(n)) for n in was | now if was.get(n) != now.get(n)}
    changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in knobs.items())
    ratios = [b.images_per_second / a.images_per_second for a, b in pairs if a.images_per_second]
    speed = median(ratios or [float("nan")])
    sentences = [
        f"{second.name} against {first.name}: {changes or 'the same config'}",
        *found.pop("sentences"),
        f"speed: {speed:.2f} x the images/s of {first.name}; `bench` measures in turns",
    ]
    about = {"first": first.name, "second": second.name, "knobs": knobs, "speed": speed}
    return about | found | {"sentences": sentences}


def compare_recipes(first: str, second: str, pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Compare two recipes, by two seeds or more."""
    known = [run.predictions for pair in pairs for run in pair if run.predictions]
    grain = 1 / len(known[0].predicted) if known else 0.0  # the share of one image
    final, best = (
        by_seeds([getattr(a, what) for a, _ in pairs], [getattr(b, what) for _, b in pairs], grain)
        for what in ("top1", "best_top1")
    )
    basis = f"{len(pairs)} seeds"
    return {
        "seeds": [one.seed for one, _ in pairs],
        "final_top1": asdict(final),
        "best_top1": asdict(best),
        "p_value": None,
        "is_significant": final.is_real,
        "sentences": [
            f"final top-1: {difference_text(first, second, final, basis, final.is_real)}",
            f"best top-1: {difference_text(first, second, best, basis, best.is_real)}",
        ],
    }


def compare_models(first: str, second: str, pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Compare two models by their predictions on the same images.

    Raises:
        UserError: if one of the runs has no predictions.
    """
    for run in pairs[0]:
        if run.predictions is None:
            raise UserError(
                f"{str(run.folder)!a} has no predictions.safetensors of its last evaluation, which "
                "a run writes at its end: two models cannot be compared without it"
            )
    one, other = (run.predictions for run in pairs[0])
    counted = (one.predicted != LEFT_OUT) & (other.predicted != LEFT_OUT)
    right, other_right = one.predicted == one.target, other.predicted == other.target
    count = int(counted.sum())
    only_first = int((right & ~other_right & counted).sum())
    only_second = int((other_right & ~right & counted).sum())
    p_value = mcnemar(only_first, only_second)
    is_significant = p_value < 1 - CONFIDENCE
    final = by_images(only_first, only_second, max(1, count))
    basis = f"{count:,} images, McNemar's p {p_value:.2g}"
    return {
        "seeds": [],
        "final_top1": asdict(final),
        "best_top1": None,
        "p_value": p_value,
        "is_significant": is_significant,
        "sentences": [
            f"final top-1: {difference_text(first, second, final, basis, is_significant)}",
            f"only {first} is right on {only_first:,} images, only {second} on {only_second:,}",
            "one seed of each: this compares two models, not two recipes; for recipes, train both "
            "with the same three seeds or more",
        ],
    }


def check_images(one: Run, other: Run) -> None:
    """Check that two runs were evaluated on the same images, as far as that is known.

    Raises:
        UserError: naming both runs.
    """
    was, now = one.predictions, other.predictions
    if was is None or now is None:
        return
    # Prepared images are the same images: a space separates what says that they are prepared.
    same = was.images.partition(" ")[0] == now.images.partition(" ")[0]
    if not same or are_replaced(was.files, now.files) or len(was.predicted) != len(now.predicted):
        raise UserError(
            f"the validation images of {str(one.folder)!a} are not those of "
            f"{str(other.folder)!a}: scores on different images cannot be compared"
        )


def difference_text(
    first: str, second: str, found: Difference, basis: str, is_significant: bool
) -> str:
    """A difference of two fractions in words; `first` and `second` name the groups."""
    sign = 1 if found.mean >= 0 else -1
    better = second if sign > 0 else first
    mean, *ends = (100 * sign * value for value in (found.mean, found.low, found.high))
    low, high = sorted(ends)
    interval = f"({CONFIDENCE:.0%} interval: {low:.2f} .. {high:.2f}, {basis})"
    if is_significant:
        return f"{better} is better by {mean:.2f} points {interval}: significant"
    return f"no significant difference: {better} is ahead by {mean:.2f} points {interval}"


def table_of_runs(groups: list[Group]) -> list[str]:
    """All runs in columns."""
    rows = [HEADS] + [
        (
            group.name,
            printable(f"{run.folder}{'' if run.state == 'done' else f' ({run.state})'}"),
            str(seed),
            f"{run.top1:.2%}",
            f"{run.best_top1:.2%}",
            f"{run.loss:.4f}",
            clock(run.seconds),
            f"{run.images_per_second:,.0f}",
        )
        for group in groups
        for seed, run in group.runs.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
