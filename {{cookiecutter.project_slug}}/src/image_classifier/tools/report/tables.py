"""Tables for a page: confusion matrix, metrics of each class, names with values."""

import json
import math
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from ...metrics import Predictions, average_precisions, class_scores, confusion_of, mistakes_of

MOST_CLASSES, MOST_PAIRS = 1000, 30  # rows of a table


def confusion_matrix(predictions: Predictions) -> str:
    """Every class against every class."""
    names = [escape(name) for name in predictions.source.classes]
    confusion = confusion_of(predictions.predicted, predictions.source.labels, len(names))
    # The root of a share, so that an error of one percent is visible.
    shades = (confusion / confusion.sum(1, keepdim=True)).sqrt().tolist()
    heads = "".join(f'<th scope="col" title="{name}"><span>{name}</span></th>' for name in names)
    lines = [f"<tr><td></td>{heads}</tr>"]
    for target, counts in enumerate(confusion.tolist()):
        cells = "".join(
            f'<td class="{"right" if predicted == target else "wrong"}" '
            f'style="--shade:{shades[target][predicted]:.0%}" '
            f'title="{names[target]} predicted as {names[predicted]}">{count:,}</td>'
            if count
            else "<td></td>"
            for predicted, count in enumerate(counts)
        )
        head = f'<th scope="row" title="{names[target]}">{names[target]}</th>'
        lines.append(f"<tr>{head}{cells}</tr>")
    note = "Rows: true class; columns: predicted class."
    return f'<p>{note}</p><div class="wide"><table class="matrix">{"".join(lines)}</table></div>'


def confused_pairs(predictions: Predictions) -> str:
    """The pairs of classes that are confused most often."""
    classes = predictions.source.classes
    images = predictions.class_counts().tolist()
    mistakes = mistakes_of(predictions.predicted, predictions.source.labels, len(classes))
    pairs = [
        (classes[target], classes[predicted], count, count / images[target])
        for target, predicted, count in mistakes[:MOST_PAIRS].tolist()
    ]
    return table(("class", "predicted as", "times", "share"), pairs) if pairs else "<p>None.</p>"


def class_table(predictions: Predictions, has_all: bool) -> str:
    """Scores of each class, the lowest recall first, those without images last.

    `has_all`: the average precision too, which takes a while for many images and classes.
    """
    classes = predictions.source.classes
    precision, recall, f1, images = class_scores(predictions).tolist()
    average = average_precisions(predictions) if has_all else [math.nan] * len(classes)
    columns = [classes, recall, precision, f1, average, map(int, images)]
    heads = ["class", "recall", "precision", "F1", "average precision", "images"]
    if not predictions.source.is_multi_label:
        pairs = mistakes_of(predictions.predicted, predictions.source.labels, len(classes))
        most = {target: (classes[taken], count) for target, taken, count in pairs.flip(0).tolist()}
        columns += zip(*(most.get(number, ("", 0)) for number in range(len(classes))), strict=True)
        heads += ["most often predicted as", "times"]
    rows = sorted(zip(*columns, strict=True), key=lambda row: (row[5] == 0, row[1], row[0]))
    cut = f"<p>The first {MOST_CLASSES:,} of {len(rows):,}.</p>" * (len(rows) > MOST_CLASSES)
    return cut + table(tuple(heads), rows[:MOST_CLASSES])


def table(heads: tuple[str, ...], rows: Sequence[tuple[str | float, ...]]) -> str:
    """A table of text, counts (int) and fractions (float; nan is left empty)."""

    def cell(value: str | float) -> str:
        if isinstance(value, str):
            return f"<td>{escape(value)}</td>"
        number = f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
        return f'<td class="number">{"" if math.isnan(value) else number}</td>'

    kinds = ["" if isinstance(value, str) else ' class="number"' for value in rows[0]]
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, heads, strict=True))
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="long"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def definitions(values: dict[str, Any]) -> str:
    """Names with their values."""
    lines = []
    for name, value in values.items():
        text = shlex.join(map(str, value)) if isinstance(value, list) else value
        text = text if isinstance(text, str) else json.dumps(text)
        lines.append(f"<div><dt>{escape(name)}</dt><dd>{escape(text) or '-'}</dd></div>")
    return "".join(lines)
