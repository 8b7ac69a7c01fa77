"""What pages are made of: charts as SVG, and the page itself, without any script.

Text from outside, such as the names of classes, passes through `escape`. The policy of `page.html`
forbids scripts and requests, even if such text came through as HTML. Values that are not finite are
left out.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from string import Template

from torch import Tensor

from ...metrics import BINS

Points = list[tuple[float, float]]  # x and y

PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
LEFT, RIGHT, TOP, BOTTOM = 44, 262, 8, 174  # edges of the plot, in pixels
WIDTH, WIDE = 352, 720  # of a drawing, and of one with parallel coordinates
MOST_POINTS = 400  # of a line: more than there are pixels


def line_chart(
    title: str,
    lines: dict[str, Points],
    *,
    unit: str = "",
    low: float | None = None,
    x_label: str = "epoch",
    is_log: bool = False,
    main: str | None = None,
    has_colors: bool = False,
) -> str:
    """Lines, each with its last value; empty where there are no finite points.

    Args:
        title: the caption.
        lines: points by the name of their line; a logarithmic x axis needs x > 0.
        unit: of y.
        low: where the y axis begins at the latest; None: near the lowest value.
        x_label: what x is.
        is_log: whether the x axis is logarithmic; else it begins at 0.
        main: the line to show among many, the only one with a label; None: all but `train`.
        has_colors: lines that end at the same place: each has a color, and no value.
    """
    finite = {name: [p for p in lines[name] if all(map(math.isfinite, p))] for name in lines}
    finite = {name: thinned(points) for name, points in finite.items() if points}
    if not finite:
        return ""
    xs, ys = zip(*chain(*finite.values()), strict=True)
    levels = ticks(min(ys) if low is None else min(low, *ys), max(ys))
    if is_log:
        first = min(xs)
        last = max(xs)
        powers = range(math.ceil(math.log10(first)), math.floor(math.log10(last)) + 1)
        x_ticks = [10.0**n for n in powers]
    else:
        first = 0.0
        last = max(xs) or 1.0
        x_ticks = [x for x in ticks(0, last) if x <= last]
    across = scale(first, last, LEFT, RIGHT, is_log)
    down = scale(levels[0], levels[-1], BOTTOM, TOP)
    parts = axes(
        {f"{x:g}": across(x) for x in x_ticks},
        {f"{short(level)}{unit}": down(level) for level in levels},
        x_label,
    )
    named: list[str] = []
    free = BOTTOM + 18.0  # labels go from the lowest up, each above the one before
    for name, points in sorted(finite.items(), key=lambda pair: pair[1][-1][1]):
        x, y = across(points[-1][0]), down(points[-1][1])
        path = " ".join(f"{across(x)},{down(y)}" for x, y in points)
        is_main = name == main if main else name != "train"
        text = ""
        if is_main or not main:
            free = min(free - 14, y + 4)
            label = f"{name} " * (len(lines) > 1) + short(points[-1][1]) + unit
            if has_colors:  # a legend, from the top
                label = name
                free = TOP + 4 + 14.0 * len(named)
            named.append(name)
            text = f'<text x="{RIGHT + 8}" y="{free}">{escape(label)}</text>'
        hue = f"hsl({360 * len(named) // len(finite)} 60% 50%)"
        color = f' style="stroke:{hue};fill:{hue}"' if has_colors else ""
        parts.append(
            f'<g class="{"val" if is_main else "train"}"{color}><polyline points="{path}"/>'
            f'<circle cx="{x}" cy="{y}" r="2.5"/>{text}</g>'
        )
    return figure(title, parts)


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
        x = scale(0, max(1, len(axes) - 1), 70, WIDE - 70)(number)
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
    return figure(title, parts + labels, WIDE)


def reliability_diagram(bins: Tensor) -> str:
    """Accuracy by predicted confidence, of `calibrate`d bins; on the diagonal they are equal."""
    across = scale(0, 1, LEFT, RIGHT)
    down = scale(0, 1, BOTTOM, TOP)
    levels = (0.0, 0.25, 0.5, 0.75, 1.0)
    parts = axes(
        {f"{x:.0%}": across(x) for x in levels},
        {f"{y:.0%}": down(y) for y in levels},
        "confidence",
    )
    for number, (count, said, right) in enumerate(bins.T.tolist()):
        if count:
            parts.append(
                f'<g class="bar"><title>{count:,.0f} images: confidence {said:.1%}, accuracy '
                f'{right:.1%}</title><rect x="{across(number / BINS) + 1}" y="{down(right)}" '
                f'width="{(RIGHT - LEFT) / BINS - 2:.1f}" height="{BOTTOM - down(right):.1f}"/></g>'
            )
    parts.append(f'<path class="ideal" d="M{LEFT} {BOTTOM}L{RIGHT} {TOP}"/>')
    return figure("Accuracy by predicted confidence", parts)


def figure(title: str, parts: list[str], width: int = WIDTH) -> str:
    """A drawing with its caption."""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} 196" '
        f'role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def axes(x_ticks: dict[str, float], y_ticks: dict[str, float], x_label: str) -> list[str]:
    """Grid lines and labels; the ticks are texts with their pixels."""
    parts = [
        f'<path d="M{LEFT} {y}H{RIGHT}"/><text class="y" x="{LEFT - 6}" y="{y + 4}">{name}</text>'
        for name, y in y_ticks.items()
    ]
    below = BOTTOM + 16
    parts += [f'<text class="x" x="{x}" y="{below}">{name}</text>' for name, x in x_ticks.items()]
    return [*parts, f'<text x="{RIGHT + 20}" y="{below}">{x_label}</text>']


def scale(
    low: float, high: float, first: float, last: float, is_log: bool = False
) -> Callable[[float], float]:
    """A function from values to pixels: `low` is at `first`, `high` at `last`."""
    position: Callable[[float], float] = math.log10 if is_log else float
    start = position(low)
    span = position(high) - position(low) or 1.0
    return lambda value: round(first + (last - first) * (position(value) - start) / span, 1)


def thinned(points: Points) -> Points:
    """At most MOST_POINTS of them, evenly spread, the last among them."""
    every = math.ceil(len(points) / MOST_POINTS)
    return points[::-1][::every][::-1]


def short(value: float) -> str:
    """A number with four significant digits at most."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers, evenly spaced, with `low` and `high` between them."""
    if math.isclose(low, high, rel_tol=1e-4):
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    least = 0.999 * (high - low) / 4
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= least)
    return [step * n for n in range(math.floor(low / step), math.ceil(high / step) + 1)]
