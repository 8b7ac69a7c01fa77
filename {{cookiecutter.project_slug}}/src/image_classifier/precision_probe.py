"""Which number format trains this network fastest on this CPU: a few steps of it tell.

Whether a processor is faster in bf16 depends on its instructions and on the network: where the
convolutions of a ResNet gain, depthwise ones may lose. The measurement takes about a second, and up
to three for a network whose step is that long; it is made once for each network and machine, and
kept in `precision.json` in the folder of the dataset's cache.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter, process_time

import torch

from .config import Config, RunConfig
from .datasets.prepared import cache_folder
from .distributed import World
from .files import read_object
from .loader import TrainData
from .machine import cpu_name, usual_precision
from .models import build_model
from .precision import Precision
from .seeding import WEIGHTS, seeded
from .workers import recall, remember

NAMES = ("fp32", "bf16")
WORTH = 1.1  # times as fast as fp32, from which on bf16 is taken: a tie goes to more digits
STEP_SECONDS = 0.06  # of a step, about: with fewer images all formats take as long
PROBE_SECONDS = 0.3  # for the timed steps, about
LONG_SECONDS = 0.3  # of a step: it is not made more often than it has to be
MOST_ROUNDS = 5  # each of a step in every format
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
        gain, when = find_gain(config, data, world) if world.is_main else (0.0, "")
        name = NAMES[world.smallest(int(gain > WORTH) if world.is_main else len(NAMES))]
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
    verdicts = {one / other > WORTH for one, other in zip(*rounds.values(), strict=True)}
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
    formats = {name: Precision(name, plain, config.optim, world.device) for name in NAMES}
    size = config.data.image_size
    with one_thread(), seeded(WEIGHTS, config.seed):  # what is drawn here is missing nowhere
        model = formats["fp32"].place(build_model(config.model, num_classes, size)).train()

        def step(precision: Precision, count: int) -> float:
            images = torch.rand(count, 3, size, size).to(memory_format=precision.memory_format)
            began = process_time()
            with precision.autocast():
                loss = model(images).float().square().mean()
            precision.backward(loss)
            seconds = process_time() - began
            model.zero_grad()
            return seconds

        count = LEAST_IMAGES
        for _ in range(3):  # a guess from few images, which take longer each, is too low
            made = [step(precision, count) for precision in formats.values()]  # with its kernels
            if max(made) > LONG_SECONDS or count >= most_images:
                break
            wanted = int(count * STEP_SECONDS / step(formats["fp32"], count))
            if wanted <= count:
                break
            count = min(wanted, most_images)
        rounds: dict[str, list[float]] = {name: [] for name in NAMES}
        began = perf_counter()
        for _ in range(MOST_ROUNDS):
            for name, precision in formats.items():
                rounds[name].append(step(precision, count) / count)
            if perf_counter() - began > PROBE_SECONDS:
                break
    return rounds


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which torch computes with a single thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
