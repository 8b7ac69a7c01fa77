"""The sections of a model card, in Markdown.

To add one: a function of the facts that returns Markdown, and its place in `SECTIONS`.
"""

import shlex
from itertools import zip_longest
from operator import itemgetter

from ...extensions import find_tool
from ...metrics import METRICS, NO_DECISION, metric_number, metric_title, mistakes_of
from ...runtime.command_line import command
from ...runtime.console import clock
from ...tracking import PROJECT
from .facts import Facts
from .markup import code, escape, items, table
from .origin import base_of, command_line, has_whole_paths, library_of

PAIRS = 10  # of classes that are confused
HIDDEN = ("changed", "platform")  # entries of environment.json that name files and the machine
FEW = 30  # images of a class, below which the limits name it


def about_section(facts: Facts) -> str:
    """What it is."""
    config = facts.config
    library = library_of(config.model.name)
    side = config.data.eval_size
    classes = len(facts.loaded.classes)
    answer = "which of {:,} labels" if facts.is_multi_label else "which of {:,} classes"
    rows = [
        ("network", escape(config.model.name) + f" ({library})" * bool(library)),
        ("weights", f"{facts.num_weights:,}, {facts.loaded.origin}"),
        ("began with", base_of(config).text),
        ("input", f"{side} x {side} pixels, {config.data.channels} channels"),
        ("trained with", f"{config.data.image_size} x {config.data.image_size} pixels"),
        ("precision", config.precision),
    ]
    title = f"# {escape(facts.name)}"
    said = f"An image classifier: it says {answer.format(classes)} an image shows."
    return f"{title}\n\n{said}\n\n{items(rows)}"


def use_section(facts: Facts) -> str:
    """How to use it."""
    if find_tool("command", "predict") is None:
        return ""
    name = facts.name
    shell = code("sh", f"{command('predict')} {shlex.quote(name)} photo.jpg")
    where = f"In an environment with the package `{PROJECT}`, where the folder of this file is:"
    parts = ["## Use", where, shell]
    if find_tool("api", "python-api") is not None:
        lines = (f"from {PROJECT} import load", "", f"load({name!r}).predict('photo.jpg')")
        parts.append(code("py", *lines))
    return "\n\n".join(parts)


def data_section(facts: Facts) -> str:
    """Which images, how many of each class, and how they were divided."""
    data = facts.config.data
    counts = {name: part.by_class.tolist() for name, part in facts.parts.items()}
    counts["validation"] = [row.recall.count for row in facts.classes]
    splits = [name for name in ("training", "validation", "test") if name in counts]
    columns = zip(facts.loaded.classes, *(counts[name] for name in splits), strict=True)
    rows = [(escape(name), *(f"{count:,}" for count in row)) for name, *row in columns]
    sizes = {name: part.size for name, part in facts.parts.items()}
    sizes["validation"] = len(facts.predictions.target)
    told = ", ".join(f"{sizes[name]:,} for {name}" for name in splits)
    lines = [
        f"{escape(facts.dataset)}: {told}.",
        f"For validation: a share of {data.val_fraction:g} (number {data.fold}) of the training "
        "images, unless the dataset has a part of its own for it.",
    ]
    if share := getattr(data, "test_fraction", 0):
        lines.append(f"For the test: a share of {share:g}, held out before all else.")
    if groups := getattr(data, "groups", ""):
        lines.append(f"Images of one group are in one split: {escape(groups)} finds it in a path.")
    if data.limit:
        lines.append(f"At most {data.limit:,} images of each split were used.")
    if not facts.parts:
        lines.append(
            "The training images were not there, or not the same, when this page was written: they "
            "are not counted here."
        )
    return f"## Images\n\n{' '.join(lines)}\n\n{table(('class', *splits), rows)}"


def results_section(facts: Facts) -> str:
    """The metrics, with the interval where there is one; each class; what is confused."""
    main = "exact" if facts.is_multi_label else "top1"
    splits = {"validation": (facts.metrics, facts.right)}
    if facts.test_metrics:
        splits["test"] = facts.test_metrics, facts.test_right
    rows = []
    for name in METRICS:
        cells = [
            str(right) if name == main and right else metric_cell(name, metrics)
            for metrics, right in splits.values()
        ]
        rows += [(metric_title(name), *cells)] * any(cells)
    parts = [
        "## Results",
        "In parentheses: the interval of 95 % confidence (Wilson) for images drawn as these were.",
        table(("metric", *splits), rows),
        decision_text(facts),
        class_table(facts),
        confused_table(facts),
    ]
    return "\n\n".join(filter(None, parts))


def metric_cell(name: str, metrics: dict[str, float]) -> str:
    """A metric as a table has it."""
    return metric_number(name, metrics[name]) if name in metrics else ""


def decision_text(facts: Facts) -> str:
    """When a prediction counts."""
    decision = facts.loaded.decision
    text = f"`predict` divides logits by a temperature of {decision.temperature:.3g}"
    if not decision.thresholds:
        return f"{text}; every prediction counts."
    if facts.is_multi_label:
        return f"{text}; a label counts from the probability on that the table has."
    (threshold,) = decision.thresholds
    when = f"below a probability of {threshold:.2%}" if threshold <= 1 else "always"
    return f"{text}, and abstains {when}."


def class_table(facts: Facts) -> str:
    """Recall and precision of each class, the lowest recall first."""
    heads = ["class", "images", "recall", "precision"]
    note = "On the validation images:"
    thresholds = facts.loaded.decision.thresholds if facts.is_multi_label else ()
    if facts.is_multi_label:
        note = "On the validation images, if labels count from a probability of 50 % on:"
        heads += ["counts from"] * bool(thresholds)
    rows = []
    for row, threshold in zip_longest(facts.classes, thresholds):
        cells = [escape(row.name), f"{row.recall.count:,}", str(row.recall), str(row.precision)]
        if threshold is not None:
            cells.append(f"{threshold:.1%}" if threshold <= 1 else "never")
        rows.append((row.recall.share, cells))
    rows.sort(key=itemgetter(0))
    return f"{note}\n\n{table(heads, [cells for _, cells in rows])}"


def confused_table(facts: Facts) -> str:
    """The pairs of classes that are confused most; nothing of several labels."""
    if facts.is_multi_label:
        return ""
    found = facts.predictions
    classes = [escape(name) for name in found.classes]
    mistakes = mistakes_of(found.predicted, found.target, len(classes))
    rows = [
        (classes[true], classes[taken], f"{count:,}")
        for true, taken, count in mistakes[:PAIRS].tolist()
    ]
    if not rows:
        return ""
    return f"Most often confused:\n\n{table(('class', 'taken for', 'images'), rows, 2)}"


def training_section(facts: Facts) -> str:
    """How to reproduce it, and what it took."""
    config = facts.config
    known = {name: value for name, value in facts.environment.items() if value}
    rows = [
        ("epochs", f"{config.epochs:g}"),
        ("seed", str(config.seed)),
        ("time", f"{clock(facts.run.seconds)} of training, without evaluations"),
        ("ended", escape(facts.run.state)),
        *((name, escape(str(value))) for name, value in known.items() if name not in HIDDEN),
    ]
    changed = "\n\nThe code had changes that are not in the commit." * ("changed" in known)
    line = code("sh", command_line(config))
    cut = "Only the last part of each path is shown.\n\n" * has_whole_paths(config)
    return f"## Training\n\n{line}\n\n{cut}{items(rows)}{changed}"


def limits_section(facts: Facts) -> str:
    """What the run shows of its limits, and nothing else."""
    low, high = facts.right.interval
    decision = facts.loaded.decision
    chosen = ", the temperature" * (decision != NO_DECISION)
    chosen += ", the thresholds" * bool(decision.thresholds)
    lines = [
        f"{facts.right.count:,} validation images tell the share that is right to "
        f"{50 * (high - low):.1f} points, up or down.",
        f"Chosen on the validation images: the best weights{chosen}.",
        few_text("validation", {row.name: row.recall.count for row in facts.classes}),
    ]
    if train := facts.parts.get("training"):
        counts = zip(facts.loaded.classes, train.by_class.tolist(), strict=True)
        lines.append(few_text("training", dict(counts)))
    if not facts.test_metrics:
        lines.append("No test images were scored: all scores are of images that chose something.")
    if not getattr(facts.config.data, "groups", ""):
        lines.append(
            "Images of one camera, place or object may be on both sides: none were kept together."
        )
    lines.append("All scores are of this dataset: on images from elsewhere it was not tested.")
    if not (decision.thresholds or facts.is_multi_label):
        lines.append("It takes every image for one of its classes, also one that shows none.")
    if count := int(facts.metrics.get("bad_images", 0)):
        lines.append(f"{count:,} validation images could not be read, and do not count.")
    return "\n".join(["## Limits", "", *(f"- {line}" for line in lines if line)])


def few_text(split: str, counts: dict[str, int]) -> str:
    """How many classes have few images, and the one that has fewest."""
    few = [name for name, count in counts.items() if count < FEW]
    if not few:
        return ""
    least = min(counts, key=counts.__getitem__)
    return (
        f"{len(few):,} of {len(counts):,} classes have fewer than {FEW} {split} images; "
        f"{escape(least)} has {counts[least]:,}."
    )


def license_section(facts: Facts) -> str:
    """The license of this model, as its owner says, and of the weights that it began with."""
    own = facts.license or "not said (`--license`)"
    return f"## License\n\nThis model: {own}. {base_of(facts.config).license}"


SECTIONS = (
    about_section,
    use_section,
    data_section,
    results_section,
    training_section,
    limits_section,
    license_section,
)
