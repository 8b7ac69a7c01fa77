"""Tables for a page: what is taken for what, how well each class is recognised, names and values.

Text from outside, such as the name of a class, passes through `escape`.
"""

import json
import math
import shlex
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

from torch import Tensor

MOST_CLASSES = 1000  # with a row of their own


def matrix(classes: tuple[str, ...], confusion: Tensor) -> str:
    """Every class against every class."""
    names = [escape(name) for name in classes]
    shares = confusion / confusion.sum(1, keepdim=True)
    shades = shares.sqrt().tolist()  # the root: a mistake of one percent is to be seen too
    heads = "".join(f'<th scope="col" title="{name}"><span>{name}</span></th>' for name in names)
    lines = [f"<tr><td></td>{heads}</tr>"]
    for truth, counts in enumerate(confusion.tolist()):
        cells = "".join(
            f'<td class="{"right" if answer == truth else "wrong"}" '
            f'style="--shade:{shades[truth][answer]:.0%}" '
            f'title="{names[truth]} taken for {names[answer]}">{count:,}</td>'
            if count
            else "<td></td>"
            for answer, count in enumerate(counts)
        )
        head = f'<th scope="row" title="{names[truth]}">{names[truth]}</th>'
        lines.append(f"<tr>{head}{cells}</tr>")
    note = "Images of the class on the left that were taken for the class at the top."
    return f'<p>{note}</p><div class="wide"><table class="matrix">{"".join(lines)}</table></div>'


def confused_pairs(classes: tuple[str, ...], confusion: Tensor, most: int = 30) -> str:
    """The pairs of classes that are mistaken most often."""
    counts, places = mistakes(confusion).flatten().topk(most)
    images = confusion.sum(1).tolist()
    pairs = []
    for count, place in zip(counts.tolist(), places.tolist(), strict=True):
        truth, answer = divmod(place, len(classes))
        if count:
            pairs.append((classes[truth], classes[answer], count, count / images[truth]))
    return table(("class", "taken for", "times", "share"), pairs) if pairs else "<p>None.</p>"


def class_table(classes: tuple[str, ...], confusion: Tensor) -> str:
    """How well each class is recognised: the worst first, those without images last."""
    right, images = confusion.diagonal(), confusion.sum(1)
    times, answers = mistakes(confusion).max(1)
    taken_for = [classes[n] if count else "" for n, count in zip(answers, times, strict=True)]
    tensors = (right / images, right / confusion.sum(0), images)
    columns = (classes, *(tensor.tolist() for tensor in tensors), taken_for, times.tolist())
    rows = sorted(zip(*columns, strict=True), key=lambda row: (row[3] == 0, row[1], row[0]))
    heads = ("class", "recall", "precision", "images", "most often taken for", "times")
    more = f"<p>The {MOST_CLASSES:,} worst of {len(rows):,}.</p>" * (len(rows) > MOST_CLASSES)
    return more + table(heads, rows[:MOST_CLASSES])


def mistakes(confusion: Tensor) -> Tensor:
    """The confusion matrix without the right answers."""
    return confusion - confusion.diagonal().diag()


def table(heads: tuple[str, ...], rows: Sequence[tuple[str | float, ...]]) -> str:
    """A table of text, counts (int) and shares (float; nan is left empty)."""

    def cell(value: str | float) -> str:
        if isinstance(value, str):
            return f"<td>{escape(value)}</td>"
        number = f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
        return f'<td class="number">{"" if math.isnan(value) else number}</td>'

    kinds = ["" if isinstance(value, str) else ' class="number"' for value in rows[0]]
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, heads, strict=True))
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="long"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def listing(values: dict[str, Any], changed: Collection[tuple[str, Any]] = ()) -> str:
    """Names with their values; the pairs in `changed` stand out."""
    lines = []
    for name, value in values.items():
        text = shlex.join(map(str, value)) if isinstance(value, list) else value
        text = text if isinstance(text, str) else json.dumps(text)
        mark = ' class="changed"' if (name, value) in changed else ""
        lines.append(f"<div{mark}><dt>{escape(name)}</dt><dd>{escape(text) or '-'}</dd></div>")
    return "".join(lines)
