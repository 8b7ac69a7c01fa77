"""Which number format trains this network fastest on this CPU: a few steps of it tell.

Whether a processor is faster in bf16 depends on its instructions and on the network: where the
convolutions of a ResNet gain, depthwise ones may lose. The measurement takes less than a second, or
up to two where a step of two images in each format takes that long; it is made once for each
network and machine, and kept in `precision.json` in the folder of the dataset's cache.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn

from .config import Config, RunConfig
from .data import TrainData, cache_folder
from .models import build_model
from .precision import Precision
from .runtime.distributed import World
from .runtime.files import read_object
from .runtime.machine import cpu_name, usual_precision
from .runtime.run_dir import write_json
from .runtime.seeding import WEIGHTS, seeded

NAMES = ("fp32", "bf16")
STEP_SECONDS = 0.06  # of a step, about: with fewer images all formats take as long
LONG_SECONDS = 0.9  # of the first step in each format, from which on it decides alone
ROUND_SECONDS = 0.25  # of a step in each format, from which on it is not made again
MOST_ROUNDS = 2  # each of a step in every format
LEAST_IMAGES = 2  # in a step: BatchNorm in training needs two
DOUBTFUL = 0.77  # times as fast in bf16 with two images; with more of them it may be faster
DOUBTFUL_IMAGES = 8  # which then decide


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
        gain, when = find_gain(config, data, world) if world.is_main else (0.0, "")
        name = NAMES[world.smallest(int(gain > 1) if world.is_main else len(NAMES))]
        why = f"bf16 is {gain:.2g} x as fast as fp32 here, {when}"
    return replace(config, precision=name), why


def begun_with(run: RunConfig) -> str | None:
    """The format of the run that goes on in this folder; None if none does."""
    folder = Path(run.dir)
    if run.fresh or not (folder / "checkpoints" / "last.pt").exists():
        return None
    with suppress(OSError):  # of a config that is damaged, a checkpoint says so if it differs
        name = read_object(folder / "config.json").get("precision")
        return next((known for known in ("fp32", "bf16", "fp16") if known == name), None)
    return None


def find_gain(config: Config, data: TrainData, world: World) -> tuple[float, str]:
    """How many times as fast as fp32 bf16 is, and when that was measured."""
    memory = cache_folder(config.data) / "precision.json"
    key = machine_key(config)
    known = recall(memory)
    gain = known.get(key)
    if isinstance(gain, float) and 0 < gain < math.inf:
        return gain, "measured before"
    rounds = measure(config, data.num_classes, config.data.batch_size // world.size, world)
    gain = min(rounds["fp32"]) / min(rounds["bf16"])
    verdicts = {fp32 > bf16 for fp32, bf16 in zip(*rounds.values(), strict=True)}
    if len(verdicts) == 1:  # else the machine has other things to do, and may say so next time
        remember(memory, known | {key: gain})
    return gain, "measured now"


def machine_key(config: Config) -> str:
    """What the measurement depends on."""
    network = json.dumps(asdict(config.model))
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "all instructions")
    return ", ".join(
        (
            f"{cpu_name()}, {limit}, torch {torch.__version__}",
            f"{network} at {config.data.image_size} pixels",
            "channels_last" if config.compute.channels_last else "contiguous",
        )
    )


def measure(
    config: Config, num_classes: int, most_images: int, world: World
) -> dict[str, list[float]]:
    """Seconds that an image takes forward and backward in each format, round by round.

    CPU time of a single thread: what else the machine has to do hardly changes that.
    """
    plain = replace(config.compute, compile=False)  # which would take a minute for each
    size = config.data.image_size
    with one_thread(), seeded(WEIGHTS, config.seed):  # what is drawn here is missing nowhere
        model = build_model(config.model, num_classes, size).train()
        formats = [
            (Precision(name, plain, config.optim, world.device), network)
            for name, network in zip(NAMES, (model, with_small_weights(model)), strict=True)
        ]
        for precision, network in formats:
            precision.place(network)

        def once(count: int) -> tuple[float, ...]:
            return tuple(step_seconds(*each, count, size) / count for each in formats)

        def repeat(count: int) -> list[tuple[float, ...]]:
            ends = perf_counter() + ROUND_SECONDS
            rounds = [once(count)]
            while len(rounds) < MOST_ROUNDS and perf_counter() < ends:
                rounds.append(once(count))
            return rounds

        count = LEAST_IMAGES
        rounds = [once(count)]  # makes the kernels, which takes a little
        if count * sum(rounds[0]) < LONG_SECONDS:
            rounds = repeat(count)
            fp32, bf16 = map(min, zip(*rounds, strict=True))
            enough = int(STEP_SECONDS / fp32)
            if DOUBTFUL < fp32 / bf16 < 1:
                enough = max(enough, DOUBTFUL_IMAGES)
            if enough > count:
                count = min(enough, most_images)
                once(count)
                rounds = repeat(count)
    return {name: list(each) for name, each in zip(NAMES, zip(*rounds, strict=True), strict=True)}


def with_small_weights(model: nn.Module) -> nn.Module:
    """A copy of `model` with the large weights in bf16, where autocast puts them in each step.

    Beside a whole batch that takes no time; beside the few images of a probe it would.
    """
    model = deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.weight.data = layer.weight.data.bfloat16()
    return model


def step_seconds(precision: Precision, model: nn.Module, count: int, size: int) -> float:
    """CPU seconds of `count` images of `size` pixels, forward and backward."""
    images = torch.rand(count, 3, size, size).to(memory_format=precision.memory_format)
    began = process_time()
    with precision.autocast():
        loss = model(images).float().square().mean()
    precision.backward(loss)
    seconds = process_time() - began
    model.zero_grad()
    return seconds


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which torch computes with a single thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def recall(memory: Path) -> dict[str, Any]:
    """What was measured before."""
    with suppress(OSError):
        return read_object(memory)
    return {}


def remember(memory: Path, known: dict[str, Any]) -> None:
    """Keep what was measured, where that is possible."""
    with suppress(OSError):  # a folder that can't be written: it is measured again
        memory.parent.mkdir(exist_ok=True)
        write_json(memory, known)
