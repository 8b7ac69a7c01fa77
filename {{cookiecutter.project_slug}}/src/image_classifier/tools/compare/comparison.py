"""Whether one group of runs is better than another, or whether that was chance, in sentences.

Groups are paired seed by seed. Of one seed each, two models are left, which are paired image by
image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

from ...config import UserError
from ...data import LEFT_OUT, are_replaced
from ..statistics import (
    CONFIDENCE,
    MOST_SEEDS,
    Difference,
    by_images,
    by_seeds,
    mcnemar,
    seeds_needed,
)
from .runs import Group, Run


@dataclass(frozen=True)
class Comparison:
    """A group against the first one."""

    first: Group
    second: Group
    seeds: list[int]  # that both have; empty if two models are compared image by image
    knobs: dict[str, tuple[Any, Any]]  # that differ: of the first, of the second
    final: Difference  # of the top-1 of the last evaluations
    best: Difference | None  # of the best evaluations; None for two models
    p_value: float | None  # of two models; None for several seeds
    speed: float  # images per second of the second, in those of the first
    sentences: list[str]

    @property
    def is_real(self) -> bool:
        """Whether the final accuracies differ by more than chance."""
        return self.final.is_real if self.p_value is None else self.p_value < 1 - CONFIDENCE


def compare_groups(first: Group, second: Group) -> Comparison:
    """How `second` differs from `first`.

    Raises:
        UserError: if nothing of them can be paired, or their images are not the same.
    """
    seeds = sorted(first.runs.keys() & second.runs.keys())
    if len(seeds) < 2:
        return compare_models(first, second, seeds)
    pairs = [(first.runs[seed], second.runs[seed]) for seed in seeds]
    for one, other in pairs:
        check_images(one, other)
    known = [run.predictions for pair in pairs for run in pair if run.predictions]
    grain = 1 / len(known[0].answer) if known else 0.0
    final, best = (
        by_seeds([getattr(a, what) for a, _ in pairs], [getattr(b, what) for _, b in pairs], grain)
        for what in ("top1", "best_top1")
    )
    basis = f"{len(seeds)} seeds"
    spread = max(stdev([b.top1 - a.top1 for a, b in pairs]), grain)
    more = "" if final.is_real else what_it_takes(final, spread)
    sentences = [
        f"final top-1: {verdict(first, second, final, basis, final.is_real)}{more}",
        f"best top-1: {verdict(first, second, best, basis, best.is_real)}",
    ]
    return concluded(first, second, pairs, sentences, seeds=seeds, final=final, best=best)


def compare_models(first: Group, second: Group, seeds: list[int]) -> Comparison:
    """The two models of the one seed that two groups share, or of the one run that each has.

    Raises:
        UserError: if there are no such, or their images are not the same.
    """
    if not seeds and max(len(first.runs), len(second.runs)) > 1:
        raise UserError(
            f"{first.name} has the seeds {seed_list(first)}, {second.name} {seed_list(second)}: "
            "nothing can be paired; train one of them with the seeds of the other"
        )
    one, other = (
        group.runs[seeds[0]] if seeds else next(iter(group.runs.values()))
        for group in (first, second)
    )
    for run in (one, other):
        if run.predictions is None:
            raise UserError(
                f"{str(run.folder)!a} has no predictions.safetensors of its last evaluation, which "
                "a run writes at its end: of one seed, nothing can be told without it"
            )
    check_images(one, other)
    was, now = one.predictions, other.predictions
    counted = (was.answer != LEFT_OUT) & (now.answer != LEFT_OUT)
    right, now_right = was.answer == was.truth, now.answer == now.truth
    count = int(counted.sum())
    only_first = int((right & ~now_right & counted).sum())
    only_second = int((now_right & ~right & counted).sum())
    p_value = mcnemar(only_first, only_second)
    final = by_images(only_first, only_second, max(1, count))
    basis = f"{count:,} images, McNemar's p {p_value:.2g}"
    sentences = [
        f"final top-1: {verdict(first, second, final, basis, p_value < 1 - CONFIDENCE)}",
        f"only {first.name} is right on {only_first:,} images, only {second.name} on "
        f"{only_second:,}",
        "one seed of each: this is about these two models, and tells nothing of the two recipes; "
        "train both with the same three seeds or more",
    ]
    return concluded(first, second, [(one, other)], sentences, final=final, p_value=p_value)


def concluded(
    first: Group,
    second: Group,
    pairs: list[tuple[Run, Run]],
    sentences: list[str],
    *,
    final: Difference,
    seeds: Sequence[int] = (),
    best: Difference | None = None,
    p_value: float | None = None,
) -> Comparison:
    """The comparison, with what differs and how fast both are."""
    one, other = pairs[0]
    knobs = {
        knob: (one.knobs.get(knob), other.knobs.get(knob))
        for knob in one.knobs | other.knobs
        if one.knobs.get(knob) != other.knobs.get(knob)
    }
    differs = ", ".join(f"{knob} {was} -> {now}" for knob, (was, now) in knobs.items())
    differs = differs or "the same config"
    rates = [b.images_per_second / a.images_per_second for a, b in pairs if a.images_per_second]
    speed = median(rates) if rates else float("nan")
    sentences = [
        f"{second.name} against {first.name}: {differs}",
        *(f"  {sentence}" for sentence in sentences),
        f"  speed: {speed:.2f} x the images/s of {first.name}; `bench` measures in turns",
    ]
    return Comparison(first, second, list(seeds), knobs, final, best, p_value, speed, sentences)


def check_images(one: Run, other: Run) -> None:
    """Refuse to compare scores on different images.

    Raises:
        UserError: naming both runs.
    """
    was, now = one.predictions, other.predictions
    if was is None or now is None:
        return
    # Prepared images are the same images, and say so behind a space.
    same = was.images.partition(" ")[0] == now.images.partition(" ")[0]
    if not same or are_replaced(was.files, now.files) or len(was.answer) != len(now.answer):
        raise UserError(
            f"the validation images of {str(one.folder)!a} are not those of "
            f"{str(other.folder)!a}: scores on different images can't be compared"
        )


def verdict(first: Group, second: Group, found: Difference, basis: str, is_real: bool) -> str:
    """A difference of shares in a sentence."""
    sign = 1 if found.mean >= 0 else -1
    better = (second if sign > 0 else first).name
    mean, *ends = (100 * sign * value for value in (found.mean, found.low, found.high))
    low, high = sorted(ends)
    where = f"({CONFIDENCE:.0%}: {low:.2f} .. {high:.2f}, {basis})"
    if is_real:
        return f"{better} is better by {mean:.2f} points {where}: real"
    if not mean:
        return f"no difference can be told {where}"
    return f"no difference can be told: {better} is ahead by {mean:.2f} points {where}"


def what_it_takes(final: Difference, spread: float) -> str:
    """How many seeds would show a difference of this size, if it is one."""
    if not final.mean:
        return ""
    count = seeds_needed(final.mean, spread)
    seeds = f"about {count}" if count < MOST_SEEDS else f"more than {MOST_SEEDS}"
    return f"; if it is one, it would show with {seeds} seeds"


def seed_list(group: Group) -> str:
    """The seeds of a group, for people."""
    return ", ".join(map(str, sorted(group.runs)))
