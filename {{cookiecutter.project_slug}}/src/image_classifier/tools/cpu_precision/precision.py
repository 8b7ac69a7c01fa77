"""Times a few training steps in fp32 and bf16.

ResNets gain from bf16, depthwise convolutions may lose. It takes a few seconds, once per
network and machine: `precision.json` in the dataset's cache folder keeps the result.
"""

import json
import os
import platform
import re
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from time import perf_counter, process_time

import torch
from torch import nn

from ...config import Config
from ...data import TrainData, cache_folder
from ...models import build_model
from ...precision import Precision
from ...runtime.distributed import World
from ...runtime.files import read_object, write_json
from ...runtime.machine import one_thread, proc
from ...runtime.seeding import WEIGHTS, seeded
from ...tracking import only_logits

STEP_SECONDS = 0.06  # target length of a step: with fewer images all formats take as long
LONG_SECONDS = 5.0  # if the first step of both formats takes longer, it alone decides
ROUND_SECONDS = 0.25  # if a round takes longer, it is not repeated
LEAST_IMAGES = 2  # in a step: BatchNorm in training needs two
DOUBTFUL = 0.77  # a bf16 that is this fast with two images may be faster than fp32 with more
DOUBTFUL_IMAGES = 8  # which then decide

Rounds = list[tuple[float, float]]  # seconds per image of each round, at most two: fp32, bf16


def find_gain(config: Config, data: TrainData, world: World) -> tuple[float, str]:
    """How many times as fast as fp32 bf16 is, and when that was measured."""
    memory = cache_folder(config.data) / "precision.json"
    key = machine_key(config)
    known = {}
    with suppress(OSError):
        known = read_object(memory)
    if isinstance(gain := known.get(key), float):
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
    network += f" of {config.data.channels} channels" * (config.data.channels != 3)
    return f"{cpu_name()}, {limit}, torch {torch.__version__}, {network}, {layout}"


def cpu_name() -> str:
    """The CPU's model name: `AMD EPYC 9B14`."""
    found = re.search(r"model name\s*: (.*)", proc("cpuinfo"))
    return found[1].strip() if found else platform.processor() or platform.machine()


def measure(config: Config, num_classes: int, most_images: int, world: World) -> Rounds:
    """Time forward and backward passes in both formats, round by round.

    In CPU time of one thread: other load on the machine hardly changes that.
    """
    size = config.data.image_size
    channels = config.data.channels
    formats = []

    def once(count: int) -> tuple[float, float]:
        fp32, bf16 = (step_seconds(*one, count, size, channels) / count for one in formats)
        return fp32, bf16

    def twice(count: int) -> Rounds:
        ends = perf_counter() + ROUND_SECONDS
        rounds = [once(count)]
        return rounds if perf_counter() >= ends else [*rounds, once(count)]

    with one_thread(), seeded(WEIGHTS, config.seed):  # leaves the random state as it was
        model = build_model(config.model, num_classes, size, channels).train()
        for name, network in (("fp32", model), ("bf16", with_small_weights(model))):
            precision = Precision(name, config.compute, config.optim, world.device)
            formats.append((precision, precision.place(network)))
        first = once(LEAST_IMAGES)  # builds the kernels, too
        if LEAST_IMAGES * sum(first) >= LONG_SECONDS:
            return [first]
        rounds = twice(LEAST_IMAGES)
        count = int(STEP_SECONDS / min(fp32 for fp32, _ in rounds))
        if DOUBTFUL < gain_of(rounds) < 1:
            count = max(count, DOUBTFUL_IMAGES)
        count = min(count, most_images)
        if count <= LEAST_IMAGES:
            return rounds
        once(count)
        return twice(count)


def with_small_weights(model: nn.Module) -> nn.Module:
    """A copy of `model` with the large weights in bf16, where autocast puts them in each step.

    Beside a whole batch that takes no time; beside the few images of a probe it would.
    """
    model = deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.weight.data = layer.weight.data.bfloat16()
    return model


def step_seconds(
    precision: Precision, model: nn.Module, count: int, size: int, channels: int
) -> float:
    """CPU seconds of a forward and a backward pass over `count` images of `size` pixels."""
    images = torch.rand(count, channels, size, size).to(memory_format=precision.memory_format)
    began = process_time()
    with precision.autocast():
        loss = only_logits(model(images)).float().square().mean()
    precision.backward(loss)
    seconds = process_time() - began
    model.zero_grad()
    return seconds
