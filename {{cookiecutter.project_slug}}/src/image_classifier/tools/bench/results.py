"""The results of `bench`: on the terminal, in Markdown, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from ...runtime.machine import device_name
from .measure import CONFIDENCE, Row
from .setup import Setup


def describe(setup: Setup) -> str:
    """What is measured, and on which machine."""
    config = setup.config
    return (
        f"{config.model.name} on {config.data.name}, {config.data.batch_size} images per step, "
        f"{config.precision}, images: {config.data.where}; {device_name(setup.world.device)}, "
        f"torch {torch.__version__}"
    )


def cells(row: Row) -> Iterator[tuple[str, str, str, str, str]]:
    """Tip, variant, images/s, memory and gain of each variant; or why there are none."""
    gains = row.gains()
    if row.reason:
        yield row.name, row.reason, "", "", ""
    for number, (name, timing) in enumerate(row.timings.items()):
        rate = f"{timing.rate:,.0f}" if timing.seconds else timing.failure
        memory = f"{timing.memory_bytes / 2**30:.2f} GB" if timing.memory_bytes else ""
        gain = str(gains[name]) if name in gains else row.note if not number else ""
        yield "" if number else row.name, name, rate, memory, gain


def terminal_lines(row: Row) -> Iterator[str]:
    """A tip on the terminal."""
    width = max(24, *map(len, row.timings)) if row.timings else 0
    for tip, variant, rate, memory, gain in cells(row):
        speed = f"{rate:>9} images/s" if rate[:1].isdigit() else rate
        yield f"{tip:<19}{variant:<{width}}{speed}  {memory}  {gain}".rstrip()


def markdown(setup: Setup, rows: list[Row], conclusion: str) -> str:
    """The table."""
    lines = ["| tip | | images/s | memory | gain |", "|---|---|--:|--:|---|"]
    lines += [f"| {' | '.join(line)} |" for row in rows for line in cells(row)]
    return (
        f"{describe(setup)}.\n\n" + "\n".join(lines) + "\n\n"
        "Gain: the median ratio of times that were taken in turn with the first variant of a tip,\n"
        f"and its interval of {CONFIDENCE:.0%} confidence. Memory: peak on a GPU.\n\n{conclusion}\n"
    )


def row_json(row: Row) -> dict[str, Any]:
    """Everything about a tip, for other programs."""
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
