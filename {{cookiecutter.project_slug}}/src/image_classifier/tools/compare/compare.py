"""Compare groups of runs with the first group: is a difference more than chance?

Groups are paired seed by seed. Where they share one seed only, two models are compared, image by
image.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Any

from ...data import LEFT_OUT, are_replaced
from ...errors import UserError
from ...runtime.console import clock, printable
from ...runtime.files import write_json
from ..statistics import (
    CONFIDENCE,
    MOST_SEEDS,
    Difference,
    by_images,
    by_seeds,
    mcnemar,
    seeds_needed,
)
from .runs import Group, Run, open_groups

HEADS = ("", "run", "seed", "top-1", "best", "loss", "training", "images/s")


@dataclass(frozen=True)
class Comparison:
    """A group against the first one."""

    first: Group
    second: Group
    pairs: list[tuple[Run, Run]]
    final: Difference  # of the top-1 of the last evaluations
    best: Difference | None  # of the best evaluations; None for two models
    p_value: float | None  # of two models; None for several seeds
    sentences: list[str]  # about the accuracy

    @property
    def is_significant(self) -> bool:
        """Whether the final accuracies differ by more than chance."""
        return self.final.is_real if self.p_value is None else self.p_value < 1 - CONFIDENCE

    @property
    def knobs(self) -> dict[str, tuple[Any, Any]]:
        """The knobs that differ: values of the first and the second group."""
        one, other = (run.knobs for run in self.pairs[0])
        names = (name for name in one | other if one.get(name) != other.get(name))
        return {name: (one.get(name), other.get(name)) for name in names}

    @property
    def speed(self) -> float:
        """Throughput of the second group relative to the first."""
        pairs = [(a.images_per_second, b.images_per_second) for a, b in self.pairs]
        return median([b / a for a, b in pairs if a] or [float("nan")])

    @property
    def lines(self) -> list[str]:
        """All of it as text."""
        changes = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in self.knobs.items())
        first = self.first.name
        return [
            f"{self.second.name} against {first}: {changes or 'the same config'}",
            *(f"  {sentence}" for sentence in self.sentences),
            f"  speed: {self.speed:.2f} x the images/s of {first}; `bench` measures in turns",
        ]


def compare(folders: Sequence[str], json_file: str = "") -> None:
    """Compare the runs in `folders`, or the folders of runs there, with the first, and print it.

    Raises:
        UserError: if there are not two groups that can be compared, or a file cannot be written.
    """
    first, *others = groups = open_groups(folders)
    comparisons = [compare_groups(first, other) for other in others]
    lines = table_of_runs(groups)
    for comparison in comparisons:
        lines += ["", *comparison.lines]
    if len(others) > 1:
        one_in = round(1 / (1 - CONFIDENCE))
        lines += ["", f"one in {one_in} comparisons finds a difference where there is none"]
    print("\n".join(map(printable, lines)))
    try:
        if json_file:
            write_json(Path(json_file), as_json(groups, comparisons))
    except OSError as error:
        raise UserError(f"cannot write {json_file!a}: {error.strerror}") from error


def compare_groups(first: Group, second: Group) -> Comparison:
    """Compare two groups by the seeds that both have, or two models where that is one.

    Raises:
        UserError: if no runs can be paired, or their validation images differ.
    """
    seeds = sorted(first.runs.keys() & second.runs.keys())
    pairs = [(first.runs[seed], second.runs[seed]) for seed in seeds]
    if not pairs and len(first.runs) == len(second.runs) == 1:
        pairs = [(*first.runs.values(), *second.runs.values())]
    if not pairs:
        raise UserError(
            f"{first.name} has the seeds {first.seeds}, {second.name} {second.seeds}: "
            "nothing can be paired; train one of them with the seeds of the other"
        )
    for one, other in pairs:
        check_images(one, other)
    if len(pairs) == 1:
        return compare_models(first, second, pairs)
    known = [run.predictions for pair in pairs for run in pair if run.predictions]
    grain = 1 / len(known[0].predicted) if known else 0.0  # the share of one image
    final, best = (
        by_seeds([getattr(a, what) for a, _ in pairs], [getattr(b, what) for _, b in pairs], grain)
        for what in ("top1", "best_top1")
    )
    basis = f"{len(seeds)} seeds"
    more = ""
    if final.mean and not final.is_real:
        count = seeds_needed(final.mean, max(stdev([b.top1 - a.top1 for a, b in pairs]), grain))
        enough = f"about {count}" if count < MOST_SEEDS else f"more than {MOST_SEEDS}"
        more = f"; a difference of this size would show with {enough} seeds"
    sentences = [
        f"final top-1: {difference_text(first, second, final, basis, final.is_real)}{more}",
        f"best top-1: {difference_text(first, second, best, basis, best.is_real)}",
    ]
    return Comparison(first, second, pairs, final, best, None, sentences)


def compare_models(first: Group, second: Group, pairs: list[tuple[Run, Run]]) -> Comparison:
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
    final = by_images(only_first, only_second, max(1, count))
    basis = f"{count:,} images, McNemar's p {p_value:.2g}"
    sentences = [
        "final top-1: " + difference_text(first, second, final, basis, p_value < 1 - CONFIDENCE),
        f"only {first.name} is right on {only_first:,} images, only {second.name} on "
        f"{only_second:,}",
        "one seed of each: this compares two models, not two recipes; for recipes, train both "
        "with the same three seeds or more",
    ]
    return Comparison(first, second, pairs, final, None, p_value, sentences)


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
    first: Group, second: Group, found: Difference, basis: str, is_significant: bool
) -> str:
    """A difference of two fractions in words."""
    sign = 1 if found.mean >= 0 else -1
    better = (second if sign > 0 else first).name
    mean, *ends = (100 * sign * value for value in (found.mean, found.low, found.high))
    low, high = sorted(ends)
    interval = f"({CONFIDENCE:.0%} interval: {low:.2f} .. {high:.2f}, {basis})"
    if is_significant:
        return f"{better} is better by {mean:.2f} points {interval}: significant"
    ahead = f"{better} is ahead by {mean:.2f} points " if mean else ""
    return f"no significant difference: {ahead}{interval}"


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
        for seed, run in sorted(group.runs.items())
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def as_json(groups: list[Group], comparisons: list[Comparison]) -> dict[str, Any]:
    """All results, for a program."""
    names = ("seed", "state", "top1", "best_top1", "loss", "seconds", "images_per_second")
    return {
        "runs": [
            {"group": group.name, "folder": str(run.folder)} | {n: getattr(run, n) for n in names}
            for group in groups
            for _, run in sorted(group.runs.items())
        ],
        "comparisons": [
            {
                "first": found.first.name,
                "second": found.second.name,
                "seeds": sorted({run.seed for run, _ in found.pairs} if found.best else []),
                "knobs": found.knobs,
                "final_top1": asdict(found.final),
                "best_top1": found.best and asdict(found.best),
                "p_value": found.p_value,
                "is_significant": found.is_significant,
                "speed": found.speed,
                "sentences": [sentence.strip() for sentence in found.lines],
            }
            for found in comparisons
        ],
    }
