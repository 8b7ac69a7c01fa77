"""All tips by name: one function each, in the order of `docs/tips.md`.

A tip returns the variants that `bench` compares, or raises `UnavailableError`; its docstring is its
section of the page. To add one, write such a function and list it here.
"""

import inspect
from collections.abc import Callable

from . import compute, data_loading, training_step
from .setup import Setup, Variants

TIPS: dict[str, Callable[[Setup], Variants]] = {
    tip.__name__: tip
    for tip in (
        compute.mixed_precision,
        compute.channels_last,
        compute.torch_compile,
        compute.fused_optimizer,
        compute.cudnn_benchmark,
        compute.tf32,
        compute.data_parallel,
        data_loading.resident,
        data_loading.prepared,
        data_loading.num_workers,
        data_loading.prefetch,
        data_loading.persistent_workers,
        data_loading.shared_batches,
        data_loading.uint8,
        data_loading.pin_memory,
        data_loading.non_blocking,
        training_step.on_device,
        training_step.item,
        training_step.empty_cache,
        training_step.inference_mode,
        training_step.deterministic,
        training_step.profiler,
    )
}
SLOW = ("torch_compile",)  # takes a minute before its first step


def page() -> str:
    """All tips in Markdown: `docs/tips.md`."""
    parts = [
        "# What makes training fast",
        "Each section is a row of `bench`, which measures what the tip gains on your machine, with "
        "your model\nand your images; `--rows` with names from here measures only those. Most are "
        "always on in this\nproject, and `bench` compares with training without them. "
        "`bench --tips` prints this page.",
    ]
    for name, tip in TIPS.items():
        title, _, rest = inspect.cleandoc(tip.__doc__ or "").partition("\n\n")
        parts += [f"## {name}", title, rest.strip()]
    return "\n\n".join(parts) + "\n"
