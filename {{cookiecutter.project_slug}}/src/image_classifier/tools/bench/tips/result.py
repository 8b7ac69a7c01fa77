"""What was found of the tips: on the terminal, in Markdown, as a drawing, and for programs."""

import math
from dataclasses import asdict
from html import escape
from string import Template
from typing import Any

import torch

from ....runtime.machine import device_name
from .case import Case
from .rounds import CONFIDENCE, Row

LEFT, WIDTH, RIGHT, HEIGHT = 330, 420, 100, 20  # of a drawing: names, bars, verdicts; of a row


def about(case: Case) -> str:
    """What was measured, and where."""
    config = case.config
    return (
        f"{config.model.name} on {config.data.name}, {config.data.batch_size} images in a step, "
        f"{config.precision}, images: {config.data.where}; {device_name(case.world.device)}, "
        f"torch {torch.__version__}"
    )


def row_lines(row: Row) -> list[str]:
    """A tip on the terminal: a line for each variant."""
    if row.reason:
        return [f"{row.name:<19}{row.reason}"]
    gains, lines, width = row.gains(), [], max(map(len, row.timings), default=0)
    for number, (name, timing) in enumerate(row.timings.items()):
        rate = f"{timing.rate:>9,.0f} images/s" if timing.seconds else timing.failure
        end = str(gains[name]) if name in gains else f"({row.note})" * bool(row.note and not number)
        memory = f"  {timing.memory_bytes / 2**30:.2f} GB" if timing.memory_bytes else ""
        head = "" if number else row.name
        lines.append(f"{head:<19}{name:<{max(width, 24)}}{rate}{memory}  {end}".rstrip())
    return lines


def row_json(row: Row) -> dict[str, Any]:
    """All that is known of a tip, for other programs."""
    gains = row.gains()
    variants = [
        {
            "name": name,
            "images_per_second": round(timing.rate, 1) if timing.seconds else None,
            "gain": asdict(gains[name]) | {"is_effect": gains[name].is_effect}
            if name in gains
            else None,
            "seconds_per_step": timing.seconds,
            "memory_bytes": timing.memory_bytes,
            "failure": timing.failure,
        }
        for name, timing in row.timings.items()
    ]
    return {"name": row.name, "reason": row.reason, "note": row.note, "variants": variants}


def markdown(case: Case, rows: list[Row], sentence: str) -> str:
    """The table, to be pasted where others read it."""
    lines = [
        f"{about(case)}.",
        "",
        "![What each tip buys](bench.svg)",
        "",
        "| tip | | images/s | gain | memory |",
        "|---|---|--:|---|--:|",
    ]
    for row in rows:
        gains = row.gains()
        if row.reason:
            lines.append(f"| {row.name} | {row.reason} | | | |")
        for number, (name, timing) in enumerate(row.timings.items()):
            head = "" if number else row.name
            note = f" (`{row.note}`)" if row.note and not number else ""
            rate = f"{timing.rate:,.0f}" if timing.seconds else timing.failure
            memory = f"{timing.memory_bytes / 2**30:.2f} GB" if timing.memory_bytes else ""
            lines.append(f"| {head} | {name}{note} | {rate} | {gains.get(name, '')} | {memory} |")
    return "\n".join(
        [
            *lines,
            "",
            "Gain: median of the ratios of times that were taken in turn with the first variant of "
            f"a tip,\nand an interval for it of {CONFIDENCE:.0%} confidence. Memory: of a GPU, at "
            "the most.\n",
            sentence,
            "",
        ]
    )


def bars(rows: list[Row]) -> str:
    """A drawing: a bar for each variant from 1 to its gain, and a line over the interval."""
    found = [(row.name, name, gain) for row in rows for name, gain in row.gains().items()]
    ends = [end for *_, gain in found for end in (gain.low, gain.high)]
    low, high = math.log(min([0.8, *ends])), math.log(max([1.25, *ends]))
    height = HEIGHT * len(found) + 2 * HEIGHT

    def across(value: float) -> float:
        return round(LEFT + WIDTH * (math.log(value) - low) / (high - low), 1)

    parts = []
    for level in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100):
        if low <= math.log(level) <= high:
            x = across(level)
            parts.append(
                f'<path class="{"one" if level == 1 else "level"}" d="M{x} 8V{height - 24}"/>'
                f'<text class="middle" x="{x}" y="{height - 8}">{level:g} x</text>'
            )
    for number, (tip, name, gain) in enumerate(found):
        y = 8 + HEIGHT * number
        one, end = across(1), across(gain.median)
        kind = "none" if not gain.is_effect else "faster" if gain.median > 1 else "slower"
        head = tip if not number or found[number - 1][0] != tip else ""
        says = f"{gain.median:.2f} x" if gain.is_effect else "no effect"
        parts.append(
            f'<text x="8" y="{y + 14}">{escape(head)}</text>'
            f'<text class="end soft" x="{LEFT - 12}" y="{y + 14}">{escape(name)}</text>'
            f'<rect class="{kind}" x="{min(one, end)}" y="{y + 4}" height="{HEIGHT - 8}" '
            f'width="{round(abs(end - one), 1)}"/>'
            f'<path class="interval" d="M{across(gain.low)} {y + 10}H{across(gain.high)}"/>'
            f'<text class="soft" x="{LEFT + WIDTH + 12}" y="{y + 14}">{says}</text>'
        )
    return DRAWING.substitute(width=LEFT + WIDTH + 100, height=height, parts="".join(parts))


# As `page.py` draws: nothing from outside, and colours for light and dark.
DRAWING = Template("""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height"
 role="img" aria-label="What each tip buys">
<style>
svg { color-scheme: light dark; background: #fff; font: 12px system-ui, sans-serif; fill: #1b1f24; }
.soft, .middle { fill: #66707b; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.level { stroke: #e2e6ea; }
.one { stroke: #66707b; }
.interval { stroke: #1b1f24; stroke-width: 1.5; }
.faster { fill: #8ebdf0; }
.slower { fill: #f0a873; }
.none { fill: #e2e6ea; }
@media (prefers-color-scheme: dark) {
  svg { background: #14171a; fill: #e3e7eb; }
  .soft, .middle { fill: #939da7; }
  .level { stroke: #2b3138; }
  .one { stroke: #939da7; }
  .interval { stroke: #e3e7eb; }
  .faster { fill: #2a5f9c; }
  .slower { fill: #9a5325; }
  .none { fill: #2b3138; }
}
</style>
$parts
</svg>
""")
