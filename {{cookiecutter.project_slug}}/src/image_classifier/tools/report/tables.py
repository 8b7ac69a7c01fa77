"""Tables for a page: confusion matrix, metrics of each class, names with values."""

import json
import math
import shlex
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

from torch import Tensor

MOST_CLASSES, MOST_PAIRS = 1000, 30  # rows of a table


def confusion_matrix(classes: tuple[str, ...], confusion: Tensor) -> str:
    """Every class against every class; `confusion` (classes, classes), row: target."""
    names = [escape(name) for name in classes]
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


def confused_pairs(classes: tuple[str, ...], confusion: Tensor) -> str:
    """The pairs of classes that are confused most often; `confusion` as above."""
    counts, places = errors(confusion).flatten().topk(MOST_PAIRS)
    images = confusion.sum(1).tolist()
    pairs = []
    for count, place in zip(counts.tolist(), places.tolist(), strict=True):
        target, predicted = divmod(place, len(classes))
        if count:
            pairs.append((classes[target], classes[predicted], count, count / images[target]))
    return table(("class", "predicted as", "times", "share"), pairs) if pairs else "<p>None.</p>"


def class_table(classes: tuple[str, ...], confusion: Tensor) -> str:
    """Recall and precision of each class, the lowest recall first, those without images last."""
    right, images = confusion.diagonal(), confusion.sum(1)
    times, predicted = errors(confusion).max(1)
    confused = [classes[n] if count else "" for n, count in zip(predicted, times, strict=True)]
    tensors = (right / images, right / confusion.sum(0), images)
    columns = (classes, *(tensor.tolist() for tensor in tensors), confused, times.tolist())
    rows = sorted(zip(*columns, strict=True), key=lambda row: (row[3] == 0, row[1], row[0]))
    heads = ("class", "recall", "precision", "images", "most often predicted as", "times")
    return table(heads, rows[:MOST_CLASSES])


def errors(confusion: Tensor) -> Tensor:
    """The confusion matrix without the correct predictions."""
    return confusion - confusion.diagonal().diag()


def table(heads: tuple[str, ...], rows: Sequence[tuple[str | float, ...]]) -> str:
    """A table of text, counts (int) and fractions (float; nan is left empty)."""

    def cell(value: str | float) -> str:
        if isinstance(value, str):
            return f"<td>{escape(value)}</td>"
        number = f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
        return f'<td class="number">{"" if math.isnan(value) else number}</td>'

    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="long"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def definitions(values: dict[str, Any], changed: Collection[str] = ()) -> str:
    """Names with their values; those in `changed` are bold."""
    lines = []
    for name, value in values.items():
        text = shlex.join(map(str, value)) if isinstance(value, list) else value
        text = text if isinstance(text, str) else json.dumps(text)
        mark = ' class="changed"' if name in changed else ""
        lines.append(f"<div{mark}><dt>{escape(name)}</dt><dd>{escape(text) or '-'}</dd></div>")
    return "".join(lines)
