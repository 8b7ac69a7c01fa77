"""What pages are made of: charts as SVG, and the page itself, without any script.

All charts have one size, and letters of one size; what a line is stands below its chart, where
text wraps. Text from outside, such as the names of classes, passes through `escape`. The policy of
`page.html` forbids scripts and requests, even if such text came through as HTML. Values that are
not finite are left out.
"""

import math
from collections.abc import Callable
from html import escape
from itertools import chain
from pathlib import Path
from string import Template

from torch import Tensor

from ...metrics import BINS

Points = list[tuple[float, float]]  # x and y

PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
WIDTH = 336  # of a drawing, in pixels
HEIGHT = 204
LEFT, RIGHT, TOP, BOTTOM = 50, 324, 8, 164  # edges of the plot
MOST_POINTS = 400  # of a line: more than there are pixels
MOST_TICKS = 6  # of a logarithmic axis
# Colors that color-blind people tell apart, on white and on black: https://jfly.uni-koeln.de/color/
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


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
        main: the line to show among many, the only one that is named; None: all but `train`.
        has_colors: lines that end at the same place: each has a color, and no value.
    """
    finite = {name: [p for p in lines[name] if all(map(math.isfinite, p))] for name in lines}
    finite = {name: thinned(points) for name, points in finite.items() if points}
    if not finite:
        return ""
    xs, ys = zip(*chain(*finite.values()), strict=True)
    levels = ticks(min(ys) if low is None else min(low, *ys), max(ys))
    first, last = (min(xs), max(xs)) if is_log else (0.0, max(xs) or 1.0)
    x_ticks = powers_of_ten(first, last) if is_log else [x for x in ticks(0, last) if x <= last]
    across = scale(first, last, LEFT, RIGHT, is_log)
    down = scale(levels[0], levels[-1], BOTTOM, TOP)
    parts = axes(
        {short(x): across(x) for x in x_ticks},
        {short(level) + unit: down(level) for level in levels},
        x_label,
    )
    named = []
    colors = dict(zip(finite, COLORS, strict=False)) if has_colors else {}
    for name in sorted(finite, key=lambda name: name == main):  # `main` is on top of all
        points = [(across(x), down(y)) for x, y in finite[name]]
        path = " ".join(f"{x},{y}" for x, y in points)
        style = "val" if (name == main if main else name != "train") else "train"
        color = f' style="color:{colors[name]}"' if has_colors else ""
        mark = f'class="{style}"{color}'
        x, y = points[-1]
        parts.append(
            f'<g {mark}><polyline points="{path}"/><circle cx="{x}" cy="{y}" r="2.5"/></g>'
        )
        if main in (None, name):
            label = f"{name} " * (len(lines) > 1)
            label += "" if has_colors else f"{short(finite[name][-1][1], digits=4)}{unit}"
            named.append(f"<span><i {mark}></i>{escape(label)}</span>")
    return figure(title, parts, legend="".join(named))


def reliability_diagram(bins: Tensor) -> str:
    """Accuracy by predicted confidence, of `calibrate`d bins; on the diagonal they are equal."""
    across = scale(0, 1, LEFT, RIGHT)
    down = scale(0, 1, BOTTOM, TOP)
    levels = (0.0, 0.25, 0.5, 0.75, 1.0)
    parts = axes(
        {f"{x:.0%}": across(x) for x in levels}, {f"{y:.0%}": down(y) for y in levels}, "confidence"
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


def figure(title: str, parts: list[str], width: int = WIDTH, legend: str = "") -> str:
    """A drawing with its caption, and what its lines are below it; a wide one can be scrolled."""
    kind = ' class="wide"' if width > WIDTH else ""
    return (
        f"<figure{kind}><figcaption>{escape(title)}</figcaption>"
        f'<svg width="{width}" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
        f'<p class="legend">{legend}</p></figure>'
    )


def axes(x_ticks: dict[str, float], y_ticks: dict[str, float], x_label: str) -> list[str]:
    """Grid lines and labels; the ticks are texts with their pixels."""
    parts = [
        f'<path d="M{LEFT} {y}H{RIGHT}"/><text class="y" x="{LEFT - 6}" y="{y + 4}">{name}</text>'
        for name, y in y_ticks.items()
    ]
    parts += [
        f'<text class="x" x="{x}" y="{BOTTOM + 16}">{name}</text>' for name, x in x_ticks.items()
    ]
    return [*parts, f'<text class="y" x="{RIGHT}" y="{BOTTOM + 34}">{x_label}</text>']


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
    return points[::-1][:: math.ceil(len(points) / MOST_POINTS)][::-1]


def short(value: float, digits: int = 3) -> str:
    """A number of a few digits: `0.0001`, `2.5`, `9,800`, `12.5k`, `3M`."""
    if 1000 <= abs(value) < 10_000:
        return f"{value:,.0f}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1000 * size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers, evenly spaced, with `low` and `high` between them."""
    if math.isclose(low, high, rel_tol=1e-4):
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    least = 0.999 * (high - low) / 4
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= least)
    return [step * n for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def powers_of_ten(low: float, high: float) -> list[float]:
    """Those from `low` to `high`, or evenly spread ones of them."""
    exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [10.0**n for n in exponents[:: math.ceil(len(exponents) / MOST_TICKS) or 1]]
