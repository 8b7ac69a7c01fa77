"""Parallel coordinates: a line for each trial over one vertical axis for each quantity."""

from collections.abc import Sequence
from html import escape

from ..report.charts import BOTTOM, TOP, figure, scale, short

WIDTH = 720  # of the drawing, in pixels


def parallel_coordinates(
    title: str, axes: dict[str, Sequence[float | str]], names: Sequence[str], main: int
) -> str:
    """A line for each of `names` over one vertical axis for each quantity; `main` is shown.

    Args:
        title: the caption.
        axes: by the name of a quantity, its value for each line: numbers, of which positive ones
            that differ by a factor of 20 are on a logarithmic axis, or texts.
        names: of the lines.
        main: the line to show among the others.
    """
    parts = []
    labels = []
    columns = []
    for number, (axis, values) in enumerate(axes.items()):
        x = scale(0, max(1, len(axes) - 1), 70, WIDTH - 70)(number)
        if all(isinstance(value, int | float) for value in values):
            low, high = min(values), max(values)
            up = scale(low, high, BOTTOM - 8, TOP + 8, low > 0 and high > 20 * low)
            marks = {short(value): up(value) for value in (low, high)}
        else:
            texts = list(dict.fromkeys(map(str, values)))
            place = scale(0, max(1, len(texts) - 1), BOTTOM - 8, TOP + 8)
            marks = {text: place(n) for n, text in enumerate(texts)}
            up = lambda value, marks=marks: marks[str(value)]  # noqa: E731
        columns.append([(x, up(value)) for value in values])
        parts.append(f'<path d="M{x} {TOP}V{BOTTOM}"/>')
        labels += [  # on top of the lines
            f'<text x="{x + 6}" y="{y + 4}">{escape(text)}</text>' for text, y in marks.items()
        ]
        parts.append(f'<text class="x" x="{x}" y="{BOTTOM + 16}">{escape(axis)}</text>')
    lines = list(zip(*columns, strict=True))
    for number in [*(n for n in range(len(lines)) if n != main), main]:  # on top of all
        path = " ".join(f"{x},{y}" for x, y in lines[number])
        parts.append(
            f'<g class="{"val" if number == main else "train"}"><title>{escape(names[number])}'
            f'</title><polyline points="{path}"/></g>'
        )
    return figure(title, parts + labels, WIDTH)
