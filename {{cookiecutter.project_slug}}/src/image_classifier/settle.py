"""The number format and the metric that decides are settled once; `config.json` has them."""

import math
from dataclasses import replace
from typing import Any

from .config import Config
from .data import TrainData
from .extensions import function
from .precision import DTYPES
from .runtime.distributed import World
from .runtime.machine import usual_precision
from .tasks import metric_of


def settle(
    config: Config, data: TrainData, world: World, saved: dict[str, Any] | None = None
) -> tuple[Config, str]:
    """`config` with both in place of `auto`, the same on every rank, and why this number format.

    A run that resumes from the checkpoint `saved` keeps the format that it began with.
    """
    name, why = choose_precision(config, data, world, saved)
    run = replace(config.run, best_by=metric_of(config))
    return replace(config, precision=name, run=run), why


def choose_precision(
    config: Config, data: TrainData, world: World, saved: dict[str, Any] | None
) -> tuple[str, str]:
    """The number format, and why. On a CPU a tool may measure which one is faster."""
    if config.precision != "auto":
        return config.precision, "as --precision says"
    name = saved and saved["config"].get("precision")
    if name in DTYPES:
        return name, "as this run began"
    if world.device.type == "cuda":
        return usual_precision(world.device), "fast on this device"
    find_gain = function("precision", "find_gain")
    if world.device.type == "cpu" and find_gain is not None:
        gain, when = find_gain(config, data, world) if world.is_main else (math.inf, "")
        name = ("fp32", "bf16")[world.all_reduce_min(int(gain > 1))]
        return name, f"bf16 is {gain:.2g} x as fast as fp32 here, {when}"
    return "fp32", "right on every device; bf16 may be faster"
