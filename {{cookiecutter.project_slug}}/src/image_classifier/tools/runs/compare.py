"""Compare groups of runs with the first group: is a difference more than chance?

Groups are paired seed by seed. Where they share one seed only, two models are compared, image by
image.
"""

from collections.abc import Sequence
from statistics import median

from ...data import are_replaced
from ...errors import UserError
from ...metrics import better, counted_and_correct, metric_number, metric_title, scale
from ...runtime.console import clock, printable
from .groups import Group, open_groups
from .saved_runs import Run
from .statistics import CONFIDENCE, Difference, by_images, by_seeds, mcnemar

Pairs = list[tuple[Run, Run]]  # runs of two groups


def compare(folders: Sequence[str]) -> None:
    """Compare the runs in `folders`, or the folders of runs there, with the first, and print it.

    Raises:
        UserError: if there are not two groups that can be compared.
    """
    first, *others = groups = open_groups(folders)
    lines = table_of_runs(groups)
    for other in others:
        lines += ["", "\n  ".join(map(printable, compare_groups(first, other)))]
    if len(others) > 1:
        one_in = round(1 / (1 - CONFIDENCE))
        lines += ["", f"one in {one_in} comparisons finds a difference where there is none"]
    print("\n".join(lines))


def compare_groups(first: Group, second: Group) -> list[str]:
    """Sentences that compare two groups by the seeds that both have; of one seed, two models.

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
        if one.metric != other.metric:
            raise UserError(
                f"the best of {first.name} is the best by {one.metric}, of {second.name} by "
                f"{other.metric}: compare runs with the same --run.best-by"
            )
    was, now = (run.knobs for run in pairs[0])
    names = (name for name in was | now if was.get(name) != now.get(name))
    arrows = (f"{name} {shown(was.get(name))} -> {shown(now.get(name))}" for name in names)
    changes = ", ".join(arrows)
    speeds = [(a.images_per_second, b.images_per_second) for a, b in pairs]
    ratios = [b / a for a, b in speeds if a and b]  # a probe made no step
    speed = f"{median(ratios):.2f} x the images/s of {first.name}" if ratios else "not measured"
    compare_pairs = compare_models if len(pairs) == 1 else compare_recipes
    how = ["trained" if knobs["epochs"] else "a linear probe" for knobs in (was, now)]
    others = f"{first.name} is {how[0]}, {second.name} {how[1]}: the difference is that, too"
    return [
        f"{second.name} against {first.name}: {changes or 'the same config'}",
        *([others] if how[0] != how[1] else []),
        *compare_pairs(first.name, second.name, pairs),
        f"speed: {speed}; `bench` measures in turns",
    ]


def shown(value: object) -> str:
    """The value of an option, `''` if it is empty."""
    return str(value) or "''"


def compare_recipes(first: str, second: str, pairs: Pairs) -> list[str]:
    """Compare two recipes, by two seeds or more; `first` and `second` are names of groups."""
    known = [run.predictions for pair in pairs for run in pair if run.predictions]
    grain = 1 / len(known[0].predicted) if known else 0.0  # the share of one image
    metric = pairs[0][0].metric
    sentences = []
    for of, name in (("best.pt", "score"), ("the last weights", "last_score")):
        if name == "last_score" and all(r.score == r.last_score for pair in pairs for r in pair):
            break
        columns = (
            [better(metric) * getattr(run, name) for run in column]
            for column in zip(*pairs, strict=True)
        )
        found = by_seeds(*columns, grain)
        basis = f"{len(pairs)} seeds"
        text = difference_text(first, second, found, basis, found.is_real, metric)
        sentences.append(f"{metric_title(metric)} of {of}: {text}")
    return sentences


def compare_models(first: str, second: str, pairs: Pairs) -> list[str]:
    """Compare two models by their predictions on the same images.

    Raises:
        UserError: if one of the runs has no predictions.
    """
    for run in pairs[0]:
        if run.predictions is None:
            raise UserError(
                f"{str(run.folder)!a} has no predictions.safetensors of its best weights, which a "
                "run writes at its end: run its command again, which takes one evaluation"
            )
    one, other = (run.predictions for run in pairs[0])
    counted, right = counted_and_correct(one.predicted, one.target)
    other_counted, other_right = counted_and_correct(other.predicted, other.target)
    counted = counted & other_counted
    count = int(counted.sum())
    only_first = int((right & ~other_right & counted).sum())
    only_second = int((other_right & ~right & counted).sum())
    p_value = mcnemar(only_first, only_second)
    found = by_images(only_first, only_second, max(1, count))
    basis = f"{count:,} images, McNemar's p {p_value:.2g}"
    text = difference_text(first, second, found, basis, p_value < 1 - CONFIDENCE)
    return [
        f"{metric_title('top1' if one.target.ndim == 1 else 'exact')} of best.pt: {text}",
        f"only {first} is right on {only_first:,} images, only {second} on {only_second:,}",
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
    # Prepared images are the same images: a space separates what says that they are prepared.
    same = was.images.partition(" ")[0] == now.images.partition(" ")[0]
    if not same or are_replaced(was.files, now.files) or len(was.predicted) != len(now.predicted):
        raise UserError(
            f"the validation images of {str(one.folder)!a} are not those of "
            f"{str(other.folder)!a}: scores on different images cannot be compared"
        )


def difference_text(  # noqa: PLR0917
    first: str,
    second: str,
    found: Difference,
    basis: str,
    is_significant: bool,
    metric: str = "top1",
) -> str:
    """How much better one of two is, in words; `first` and `second` are names of groups."""
    sign = 1 if found.mean >= 0 else -1
    ahead = second if sign > 0 else first
    unit, points, digits = scale(metric)
    mean, *ends = (unit * sign * value for value in (found.mean, found.low, found.high))
    low, high = sorted(ends)
    interval = f"({CONFIDENCE:.0%} interval: {low:.{digits}f} .. {high:.{digits}f}, {basis})"
    by = f"by {mean:.{digits}f}{points} {interval}"
    if is_significant:
        return f"{ahead} is better {by}: significant"
    return f"no significant difference: {ahead} is ahead {by}"


def table_of_runs(groups: list[Group]) -> list[str]:
    """All runs in columns."""
    metric = next(iter(groups[0].runs.values())).metric
    heads = ("", "run", "seed", metric_title(metric), "last", "loss", "training", "images/s")
    rows = [heads] + [
        (
            group.name,
            printable(f"{run.folder}{'' if run.state == 'done' else f' ({run.state})'}"),
            str(seed),
            metric_number(run.metric, run.score),
            metric_number(run.metric, run.last_score),
            f"{run.loss:.4f}",
            clock(run.seconds),
            f"{run.images_per_second:,.0f}",
        )
        for group in groups
        for seed, run in group.runs.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
