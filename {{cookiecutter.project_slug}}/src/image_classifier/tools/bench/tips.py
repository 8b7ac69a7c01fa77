"""The tips that are options of training; and all tips by name.

A tip returns the variants that `bench` compares, or a text: why it can't be measured here. To add
one: such a function, its name in `TIPS`, and its section in `docs/tips.md`. Other tools may have a
`tips.py` with `TIPS`, too.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from ...config import Config
from ...data import DATASETS, fits_memory, worker_counts
from ...extensions import find_tool, find_tools, of_tools
from ...runtime.command_line import summary
from ...runtime.machine import num_cores
from .timed_run import Setup, Variant, Variants, by_knob, with_knobs

SAMPLE = "bench_sample"  # dataset of some of the images, and the folder of its prepared ones
PREPARED_IMAGES = 512  # that are prepared to measure it; at least two batches
RESIDENT_IMAGES = 2048  # that are decoded to measure it, where the preset streams them

Tip = Callable[[Setup], Variants | str]


def mixed_precision(setup: Setup) -> Variants:
    """Compute convolutions and matrix products in 16 bits; weights stay float32."""
    names = ("fp32", "bf16") if setup.world.device.type == "cpu" else ("fp32", "bf16", "fp16")
    return by_knob(setup.config, "precision", {n: n for n in names}, tells_memory=True)


def channels_last(setup: Setup) -> Variants:
    """Keep the channels of a pixel next to each other in memory."""
    layouts = {"contiguous": False, "channels_last": True}
    return by_knob(setup.config, "compute.channels_last", layouts)


def torch_compile(setup: Setup) -> Variants:
    """Compile the model: fewer kernels, and operations between convolutions fused into one."""
    return by_knob(setup.config, "compute.compile", {"eager": False, "compiled": True})


def gradient_checkpointing(setup: Setup) -> Variants | str:
    """The price of computing activations a second time, in the backward pass, to save memory."""
    if "compute.gradient_checkpointing" not in of_tools():
        return "needs a tool: pretuned add gradient-checkpointing"
    config = with_knobs(setup.config, {"compute.compile": False})
    ways = {"off": False, "in each block": True}
    about = {"is_choice": False, "tells_memory": True}
    return by_knob(config, "compute.gradient_checkpointing", ways, **about)


def resident(setup: Setup) -> Variants | str:
    """Keep all images in memory, on the device if they fit."""
    config = setup.config
    source = setup.data.source
    count = len(source)
    is_same = config.augment.crop != "resized"  # else the pixels change
    if not is_same and find_tool("crops", "device-crops") is None:
        return "needs a tool that is not here: pretuned add device-crops"
    if config.data.where == "stream" and source.pixels is None and count > RESIDENT_IMAGES:
        count = max(RESIDENT_IMAGES, config.data.batch_size)
        config = with_knobs(config, {"data.limit": count})
    needed_bytes = count * config.data.image_size**2 * source.pixel_bytes
    homes = {"host": torch.device("cpu"), "device": setup.world.device}
    fitting = {
        where: where
        for where, device in homes.items()
        if where == config.data.where or fits_memory(needed_bytes, device, setup.world)
    }
    if not fitting:
        return f"{needed_bytes / 2**30:,.0f} GB of images, too much for memory"
    stays = by_knob(config, "data.where", fitting, is_choice=is_same)
    return {"stream": Variant(streamed(config), is_choice=is_same)} | stays


def prepared(setup: Setup) -> Variants | str:
    """Write photographs once at the size that training needs, and read those."""
    source = setup.data.source
    data = setup.config.data
    config = streamed(setup.config)
    if source.paths is None:
        return "needs photographs in files; these images are in memory"
    if source.recipe:
        caches = {"files": "off", f"prepared, {source.recipe}": data.cache}
        return by_knob(config, "data.cache", caches, is_choice=False)
    preparing = find_tool("prepare", "prepare")
    if preparing is None:
        return "needs a tool that is not here: pretuned add prepare"
    count = min(len(source), max(PREPARED_IMAGES, 2 * data.batch_size))
    print(f"preparing {count:,} of the images, to measure it", flush=True)
    DATASETS[SAMPLE] = lambda *_: source.thinned(count)
    tables = {"data.labels": "", "data.columns": ()} if hasattr(data, "labels") else {}
    config = with_knobs(config, {"data.name": SAMPLE, "data.limit": 0} | tables)
    kind = data.channels, data.bits
    forms = ("jpeg", "raw") if kind == (3, 8) else ("raw",)
    caches = {f"prepared, {form}": str(Path(config.run.dir, SAMPLE, form)) for form in forms}
    variants = by_knob(config, "data.cache", {"files": "off"} | caches, is_choice=False)
    usual = preparing.Recipe
    for form in forms:
        recipe = usual(form, max(usual.side, data.image_size), usual.quality, *kind)
        cached = variants[f"prepared, {form}"].config.data
        preparing.prepare_images(cached, ("train",), recipe)
    return variants


def num_workers(setup: Setup) -> Variants:
    """Decode images in worker processes, and in enough of them."""
    config = streamed(setup.config)
    counts = {0, int(config.data.workers), *worker_counts(num_cores())}
    # This process has one of the GPUs.
    rule = {4: " (4 x GPUs)"} if setup.world.device.type == "cuda" else {}
    names = {f"{count}{rule.get(count, '')}": count for count in sorted(counts | {*rule})}
    return by_knob(config, "data.workers", names)


def prefetch(setup: Setup) -> Variants:
    """Decode several batches ahead of the one in use."""
    config = streamed(setup.config)
    depths = sorted({1, 4, 16, config.data.prefetch_batches})
    return by_knob(config, "data.prefetch_batches", {f"{n} ahead": n for n in depths})


def streamed(config: Config) -> Config:
    """`config`, with images that workers decode for every batch."""
    workers = max(1, int(config.data.workers))
    return with_knobs(config, {"data.where": "stream", "data.workers": workers})


def deterministic(setup: Setup) -> Variants:
    """The price of bit-identical runs on a GPU."""
    return by_knob(setup.config, "deterministic", {"off": False, "on": True}, is_choice=False)


TIPS = (
    mixed_precision,
    channels_last,
    torch_compile,
    gradient_checkpointing,
    resident,
    prepared,
    num_workers,
    prefetch,
    deterministic,
)
SLOW = ("torch_compile",)  # takes a minute before its first step


def find_tips() -> dict[str, Tip]:
    """All tips by name, of this tool and of others."""
    return {tip.__name__: tip for module in find_tools("tips").values() for tip in module.TIPS}


def page() -> str:
    """`docs/tips.md`, or just the names and titles of the tips if the package is there alone."""
    path = Path(__file__).parents[4] / "docs" / "tips.md"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return "".join(f"{name}: {summary(tip)}\n" for name, tip in find_tips().items())
