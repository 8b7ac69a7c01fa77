"""Finds out which number format trains a network fastest on a CPU: it times a few steps in each.

bf16 is faster or slower depending on the CPU's instructions and on the network: ResNets gain from
it, depthwise convolutions may lose. The measurement takes less than a second, or up to two for a
large network; it is made once per network and machine, and kept in `precision.json` in the
dataset's cache folder.
"""

import json
import math
import os
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch import nn

from .config import Config, RunConfig
from .data import TrainData, cache_folder
from .models import build_model
from .precision import DTYPES, Precision
from .runtime.distributed import World
from .runtime.files import read_object, write_json
from .runtime.machine import cpu_name, one_thread, usual_precision
from .runtime.seeding import WEIGHTS, seeded

NAMES = ("fp32", "bf16")
STEP_SECONDS = 0.06  # target length of a step: with fewer images all formats take as long
LONG_SECONDS = 0.9  # if the first step of both formats takes longer, it alone decides
ROUND_SECONDS = 0.25  # if a round takes longer, it is not repeated
MOST_ROUNDS = 2
LEAST_IMAGES = 2  # in a step: BatchNorm in training needs two
DOUBTFUL = 0.77  # a bf16 that is this fast with two images may be faster than fp32 with more
DOUBTFUL_IMAGES = 8  # which then decide

Rounds = list[tuple[float, float]]  # seconds per image of each round: fp32, bf16


def settle_precision(config: Config, data: TrainData, world: World) -> tuple[Config, str]:
    """`config` with a number format in place of `auto`, the same on every rank, and the reason.

    A resumed run keeps the format that it began with.
    """
    if config.precision != "auto":
        return config, "as --precision says"
    name, why = begun_with(config.run), "as this run began"
    if name is None and world.device.type != "cpu":
        name, why = usual_precision(world.device), "fast on this device"
    elif name is None:
        gain, when = find_gain(config, data, world) if world.is_main else (0.0, "")
        name = NAMES[world.all_reduce_min(int(gain > 1) if world.is_main else len(NAMES))]
        why = f"bf16 is {gain:.2g} x as fast as fp32 here, {when}"
    return replace(config, precision=name), why


def begun_with(run: RunConfig) -> str | None:
    """The format of the run that resumes in this folder; None if none does."""
    folder = Path(run.dir)
    if run.fresh or not (folder / "checkpoints" / "last.pt").exists():
        return None
    with suppress(OSError):  # if the config is damaged, the checkpoint tells whether it differs
        name = read_object(folder / "config.json").get("precision")
        return name if name in [*DTYPES] else None
    return None


def find_gain(config: Config, data: TrainData, world: World) -> tuple[float, str]:
    """How many times as fast as fp32 bf16 is, and when that was measured."""
    memory, key, known = cache_folder(config.data) / "precision.json", machine_key(config), {}
    with suppress(OSError):
        known = read_object(memory)
    if isinstance(gain := known.get(key), float) and 0 < gain < math.inf:
        return gain, "measured before"
    rounds = measure(config, data.num_classes, config.data.batch_size // world.size, world)
    gain = gain_of(rounds)
    if len({fp32 > bf16 for fp32, bf16 in rounds}) == 1:  # else the machine is busy: not kept
        with suppress(OSError):  # a folder that can't be written: it is measured again
            memory.parent.mkdir(exist_ok=True)
            write_json(memory, known | {key: gain})
    return gain, "measured now"


def gain_of(rounds: Rounds) -> float:
    """How many times as fast as fp32 bf16 is, by the fastest round of each."""
    fp32, bf16 = map(min, zip(*rounds, strict=True))
    return fp32 / bf16


def machine_key(config: Config) -> str:
    """What the measurement depends on."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "all instructions")
    layout = "channels_last" if config.compute.channels_last else "contiguous"
    network = f"{json.dumps(asdict(config.model))} at {config.data.image_size} pixels"
    return f"{cpu_name()}, {limit}, torch {torch.__version__}, {network}, {layout}"


def measure(config: Config, num_classes: int, most_images: int, world: World) -> Rounds:
    """Time forward and backward passes in both formats, round by round.

    In CPU time of one thread: other load on the machine hardly changes that.
    """
    size = config.data.image_size

    def once(count: int) -> tuple[float, float]:
        fp32, bf16 = (step_seconds(*one, count, size) / count for one in formats)
        return fp32, bf16

    def repeat(count: int) -> Rounds:
        ends, rounds = perf_counter() + ROUND_SECONDS, [once(count)]
        while len(rounds) < MOST_ROUNDS and perf_counter() < ends:
            rounds.append(once(count))
        return rounds

    with one_thread(), seeded(WEIGHTS, config.seed):  # leaves the random state as it was
        model = build_model(config.model, num_classes, size).train()
        formats = []
        for name, network in zip(NAMES, (model, with_small_weights(model)), strict=True):
            precision = Precision(name, config.compute, config.optim, world.device)
            formats.append((precision, network.to(memory_format=precision.memory_format)))
        first = once(LEAST_IMAGES)  # builds the kernels, too
        if LEAST_IMAGES * sum(first) >= LONG_SECONDS:
            return [first]
        rounds = repeat(LEAST_IMAGES)
        count = int(STEP_SECONDS / min(fp32 for fp32, _ in rounds))
        if DOUBTFUL < gain_of(rounds) < 1:
            count = max(count, DOUBTFUL_IMAGES)
        if count <= LEAST_IMAGES:
            return rounds
        count = min(count, most_images)
        once(count)
        return repeat(count)


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
    """CPU seconds of a forward and a backward pass over `count` images of `size` pixels."""
    images = torch.rand(count, 3, size, size).to(memory_format=precision.memory_format)
    began = process_time()
    with precision.autocast():
        loss = model(images).float().square().mean()
    precision.backward(loss)
    seconds = process_time() - began
    model.zero_grad()
    return seconds
