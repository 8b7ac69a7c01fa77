"""Tips by name: what each is, and the ways to do it that `bench` compares.

To add one: a function of a `Case` in a file here that returns variants, or raises `NotHereError`,
and its name in `TIPS`. Its docstring is what `docs/tips.md` says.
"""

import inspect
from collections.abc import Callable

from .case import Case, NotHereError, Variants
from .computing import (
    channels_last,
    cudnn_benchmark,
    data_parallel,
    fused_optimizer,
    keep_memory,
    mixed_precision,
    strips,
    tf32,
    torch_compile,
)
from .habits import deterministic, empty_cache, inference_mode, item, on_device, profiler
from .loading import (
    SAMPLE,
    non_blocking,
    num_workers,
    persistent_workers,
    pin_memory,
    prefetch,
    prepared,
    resident,
    shared_memory,
    uint8,
)

__all__ = ["SAMPLE", "SLOW", "TIPS", "Case", "NotHereError", "Variants", "page"]

TIPS: dict[str, Callable[[Case], Variants]] = {
    tip.__name__: tip
    for tip in (
        # How the model is computed.
        mixed_precision,
        channels_last,
        torch_compile,
        fused_optimizer,
        cudnn_benchmark,
        tf32,
        data_parallel,
        keep_memory,
        strips,
        # How images reach the device.
        resident,
        prepared,
        num_workers,
        prefetch,
        persistent_workers,
        shared_memory,
        uint8,
        pin_memory,
        non_blocking,
        # What is done in a step or around it, and what things cost.
        on_device,
        item,
        empty_cache,
        inference_mode,
        deterministic,
        profiler,
    )
}
SLOW = ("torch_compile",)  # takes a minute before its first step


def page() -> str:
    """All tips in Markdown: `docs/tips.md`."""
    parts = [
        "# What makes training fast",
        "Each of these is a row of `bench`, which measures what it buys on your machine, with your "
        "model and\nyour images; `--rows` with names from here measures only those. Most are "
        "always on in this project,\nand `bench` compares with what you would have without. This "
        "page is what `bench --tips` prints.",
    ]
    for name, tip in TIPS.items():
        title, _, rest = inspect.cleandoc(tip.__doc__ or "").partition("\n\n")
        parts += [f"## {name}", title, rest.strip()]
    return "\n\n".join(parts) + "\n"
