"""Which number format trains this network fastest on this CPU: a few steps of it tell.

Whether a processor is faster in bf16 depends on its instructions and on the network: where the
convolutions of a ResNet gain, depthwise ones may lose. The measurement takes a fraction of a second
for each network and machine; it is kept in `precision.json` in the folder of the dataset's cache.
"""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import torch

from .config import Config, RunConfig
from .datasets.prepared import cache_folder
from .distributed import World
from .loader import TrainData
from .machine import cpu_name, usual_precision
from .models import build_model
from .precision import Precision
from .seeding import WEIGHTS, seeded
from .workers import recall, remember

NAMES = ("fp32", "bf16")  # the slower ones that may win first: a tie goes to more digits
WORTH = 1.1  # times as fast as fp32, from which on bf16 is taken
PROBE_SECONDS = 0.3  # for the timed steps, about
ROUNDS = 2, 5  # fewest and most of them, each of a step in every format
LEAST_IMAGES = 2  # in a step: BatchNorm in training needs two


def settle_precision(config: Config, data: TrainData, world: World) -> tuple[Config, str]:
    """`config` with a format in place of `auto`, the same on every rank, and why that one.

    A run keeps the format that it began with, wherever it goes on.
    """
    if config.precision != "auto":
        return config, "as --precision says"
    name, why = begun_with(config.run), "as this run began"
    if name is None and world.device.type != "cpu":
        name, why = usual_precision(world.device), "fast on this device"
    elif name is None:
        seconds, when = find_seconds(config, data, world) if world.is_main else ({}, "")
        chosen = NAMES.index("bf16" if seconds and gain(seconds) > WORTH else "fp32")
        name = NAMES[world.smallest(chosen if world.is_main else len(NAMES))]
        why = f"bf16 is {gain(seconds):.2g} x as fast as fp32 here, {when}" if seconds else ""
    return replace(config, precision=name), why


def gain(seconds: dict[str, float]) -> float:
    """How many times as fast as fp32 bf16 is."""
    return seconds["fp32"] / seconds["bf16"]


def begun_with(run: RunConfig) -> str | None:
    """The format of the run that goes on in this folder; None if none does."""
    folder = Path(run.dir)
    if run.fresh or not (folder / "checkpoints" / "last.pt").exists():
        return None
    try:
        name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["precision"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # damaged: a checkpoint says so if it differs
        return None
    return name if name in ("fp32", "bf16", "fp16") else None


def find_seconds(config: Config, data: TrainData, world: World) -> tuple[dict[str, float], str]:
    """Seconds that an image takes in each format, and when that was measured."""
    memory = cache_folder(config.data) / "precision.json"
    key = machine_key(config)
    known = recall(memory)
    if key in known:
        return known[key], "measured before"
    rounds = measure(config, data.num_classes, config.data.batch_size // world.size, world)
    seconds = {name: min(times) for name, times in rounds.items()}
    gains = [one / other > WORTH for one, other in zip(*rounds.values(), strict=True)]
    if len(set(gains)) == 1:  # else the machine has other things to do, and may say so next time
        remember(memory, known | {key: seconds})
    return seconds, "measured now"


def machine_key(config: Config) -> str:
    """What the measurement depends on."""
    network = json.dumps(asdict(config.model))
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "all instructions")
    return ", ".join(
        (
            f"{cpu_name()}, {limit}, {torch.get_num_threads()} threads, torch {torch.__version__}",
            f"{network} at {config.data.image_size} pixels",
            "channels_last" if config.compute.channels_last else "contiguous",
        )
    )


def measure(
    config: Config, num_classes: int, most_images: int, world: World
) -> dict[str, list[float]]:
    """Seconds that an image takes forward and backward in each format, round by round."""
    plain = replace(config.compute, compile=False)  # which would take a minute for each
    formats = {name: Precision(name, plain, config.optim, world.device) for name in NAMES}
    size = config.data.image_size
    with seeded(WEIGHTS, config.seed):  # what is drawn here is not missing anywhere
        model = formats["fp32"].place(build_model(config.model, num_classes, size)).train()

        def step(precision: Precision, count: int) -> float:
            images = torch.rand(count, 3, size, size).to(memory_format=precision.memory_format)
            began = perf_counter()
            with precision.autocast():
                loss = model(images).float().square().mean()
            precision.backward(loss)
            seconds = perf_counter() - began
            model.zero_grad()
            return seconds / count

        for precision in (*formats.values(), formats["fp32"]):  # kernels are made in the first
            pace = step(precision, LEAST_IMAGES)
        count = int(PROBE_SECONDS / pace / (len(NAMES) * ROUNDS[0]))
        count = max(LEAST_IMAGES, min(count, most_images))
        if count > LEAST_IMAGES:
            for precision in formats.values():
                step(precision, count)
        rounds: dict[str, list[float]] = {name: [] for name in NAMES}
        began = perf_counter()
        while len(rounds[NAMES[0]]) < ROUNDS[0] or (
            len(rounds[NAMES[0]]) < ROUNDS[1] and perf_counter() - began < PROBE_SECONDS
        ):
            for name, precision in formats.items():
                rounds[name].append(step(precision, count))
    return rounds
