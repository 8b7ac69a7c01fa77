"""Drawings for a page, in SVG: curves over a run, and how far probabilities can be trusted.

Text from outside passes through `escape`. What is finite is drawn, and nothing else.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ...predictions import BINS, Calibration

Rows = list[dict[str, float]]
Curve = list[tuple[float, float]]  # epoch and value

LEFT, RIGHT, TOP, BOTTOM = 44, 262, 8, 174  # of what a chart encloses, in pixels
MOST_POINTS = 400  # of a curve: more than there are pixels


class Line(NamedTuple):
    """A curve of a chart."""

    name: str
    points: Curve
    style: str = "val"  # a class of the style sheet
    shows_value: bool = True  # the last one, beside the name


def curve(rows: Rows, metric: str, scale: float = 1.0) -> Curve:
    """A metric over the run, where it was logged, in units of 1 / `scale`.

    What is no number is left out, as anybody may have written to the file.
    """
    pairs = ((row.get("epoch"), row.get(metric)) for row in rows)
    return [(e, scale * value) for e, value in pairs if is_number(e) and is_number(value)]


def is_number(value: object) -> bool:
    """Whether a value is one that can be drawn, or at least is of that type: nan is too."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def chart(title: str, lines: Sequence[Line], unit: str = "", low: float | None = None) -> str:
    """Curves over the epochs, each with its last value; what is not finite is left out.

    The axis begins at `low`, or near the lowest value.
    """
    finite = [(line, [p for p in line.points if math.isfinite(p[1])]) for line in lines]
    finite = [(line, thinned(points)) for line, points in finite if points]
    if not finite:
        return ""
    epochs, values = zip(*(point for _, points in finite for point in points), strict=True)
    lowest = min(values) if low is None else min(low, *values)
    last, levels = max(epochs) or 1.0, ticks(lowest, max(values))

    def across(epoch: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * epoch / last, 1)

    def down(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - levels[0]) / (levels[-1] - levels[0]), 1)

    parts = [
        f'<path d="M{LEFT} {down(level)}H{RIGHT}"/>'
        f'<text class="level" x="{LEFT - 6}" y="{down(level) + 4}">{short(level)}{unit}</text>'
        for level in levels
    ]
    parts += [
        f'<text class="epoch" x="{across(epoch)}" y="{BOTTOM + 18}">{epoch:g}</text>'
        for epoch in ticks(0, last)
        if epoch <= last
    ]
    parts.append(f'<text x="{RIGHT + 20}" y="{BOTTOM + 18}">epoch</text>')
    free = BOTTOM + 18.0  # labels go from the lowest up, each above the one before
    for line, points in sorted(finite, key=lambda pair: pair[1][-1][1]):
        x, y = across(points[-1][0]), down(points[-1][1])
        path = " ".join(f"{across(epoch)},{down(value)}" for epoch, value in points)
        value = f"{short(line.points[-1][1])}{unit}" if line.shows_value else ""
        label = f"{line.name if len(lines) > 1 else ''} {value}".rstrip()
        free = min(free - 14, y + 4) if label else free
        parts.append(
            f'<g class="{line.style}"><polyline points="{path}"/>'
            f'<circle cx="{x}" cy="{y}" r="2.5"/>'
            f'<text x="{RIGHT + 8}" y="{free}">{escape(label)}</text></g>'
        )
    drawing = f'<svg viewBox="0 0 352 196" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{title}</figcaption>{drawing}</figure>"


def thinned(points: Curve) -> Curve:
    """At most MOST_POINTS of them, evenly spread, the last among them."""
    every = math.ceil(len(points) / MOST_POINTS)
    return points[::-1][::every][::-1]


def short(value: float) -> str:
    """A number as an axis bears it: 4 digits that count, and no more than needed."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers, evenly spaced, that `low` and `high` lie between."""
    if math.isclose(low, high, rel_tol=1e-4):
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    least = 0.999 * (high - low) / 4
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= least)
    return [step * n for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def reliability(calibration: Calibration) -> str:
    """How often answers were right, over how probable they were said to be; bin by bin.

    Bars that end on the diagonal are what is wanted. Below stands how many images a bin has.
    """
    wide, tall = (RIGHT - LEFT) / BINS, BOTTOM - TOP
    parts = [
        f'<path d="M{LEFT} {BOTTOM - tall * level / 4:g}H{RIGHT}"/>'
        f'<text class="level" x="{LEFT - 6}" y="{BOTTOM - tall * level / 4 + 4:g}">'
        f"{25 * level}%</text>"
        for level in range(5)
    ]
    columns = zip(calibration.counts, calibration.said, calibration.right, strict=True)
    for number, (count, said, right) in enumerate(columns):
        if not count:
            continue
        x, y = LEFT + wide * number, BOTTOM - tall * right
        middle = x + wide / 2
        about = f"{count:,} images: {said:.1%} said, {right:.1%} right"
        parts.append(
            f'<g class="bar"><title>{about}</title>'
            f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" '
            f'height="{BOTTOM - y:.1f}"/>'
            f'<text class="count" transform="translate({middle + 3:.1f} {BOTTOM + 22}) '
            f'rotate(-90)">{count:,}</text></g>'
        )
    parts.append(f'<path class="ideal" d="M{LEFT} {BOTTOM}L{RIGHT} {TOP}"/>')
    parts += [
        f'<text class="epoch" x="{LEFT + (RIGHT - LEFT) * share / 100:g}" y="{BOTTOM + 14}">'
        f"{share}%</text>"
        for share in (0, 50, 100)
    ]
    parts.append(f'<text x="{RIGHT + 20}" y="{BOTTOM + 14}">said</text>')
    parts.append(f'<text x="{RIGHT + 20}" y="{BOTTOM + 40}">images</text>')
    return (
        "<figure><figcaption>Right answers, by how probable they were said to be</figcaption>"
        '<svg viewBox="0 0 352 236" role="img" aria-label="Reliability">'
        f"{''.join(parts)}</svg></figure>"
    )
