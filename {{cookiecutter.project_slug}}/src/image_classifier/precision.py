"""Mixed precision: the number format of the arithmetic, and the optimizer's step in it.

On a CPU, `--precision auto` times a few steps in fp32 and bf16: ResNets gain from bf16, depthwise
convolutions may lose. That takes up to two seconds, once per network and machine:
`precision.json` in the dataset's cache folder keeps the result.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from .config import ComputeConfig, Config, OptimConfig
from .data import TrainData, cache_folder
from .errors import UserError
from .models import build_model
from .runtime.distributed import World
from .runtime.files import read_object, write_json
from .runtime.machine import cpu_name, one_thread, usual_precision
from .runtime.profiler import phase
from .runtime.seeding import WEIGHTS, seeded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEP_SECONDS = 0.06  # target length of a step: with fewer images all formats take as long
LONG_SECONDS = 0.9  # if the first step of both formats takes longer, it alone decides
ROUND_SECONDS = 0.25  # if a round takes longer, it is not repeated
LEAST_IMAGES = 2  # in a step: BatchNorm in training needs two
DOUBTFUL = 0.77  # a bf16 that is this fast with two images may be faster than fp32 with more
DOUBTFUL_IMAGES = 8  # which then decide

Rounds = list[tuple[float, float]]  # seconds per image of each round, at most two: fp32, bf16


class Precision:
    """Automatic mixed precision: weights stay float32, matrix products use fewer bits.

    https://arxiv.org/abs/1710.03740
    """

    def __init__(
        self, name: str, compute: ComputeConfig, optim: OptimConfig, device: torch.device
    ) -> None:
        """Compute in `name`: fp32 (TF32 on a GPU), bf16 or fp16; `settle_precision` replaces auto.

        Raises:
            UserError: for fp16 on a CPU.
        """
        if name == "fp16" and device.type == "cpu":
            raise UserError("--precision fp16 needs a GPU; on a CPU take bf16 or fp32")
        self.name, self.dtype, self.device = name, DTYPES[name], device
        self.clip_norm = optim.clip_norm
        layout = torch.channels_last if compute.channels_last else torch.contiguous_format
        self.memory_format = layout
        # Gradients underflow in fp16 unless the loss is scaled up.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        torch.set_float32_matmul_precision("high")  # TF32: products of 19-bit inputs, on a GPU
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = True
            # Time cuDNN's algorithms once per shape, and keep the fastest.
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """A block whose forward pass runs in this precision."""
        is_mixed = self.dtype != torch.float32
        autocast = torch.autocast(self.device.type, self.dtype) if is_mixed else nullcontext()
        with phase("forward"), autocast:
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, scaled in fp16, to those of the weights."""
        with phase("backward"):
            self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients, update the weights, and clear the gradients.

        Gradients that are inf or nan update nothing. The host does not wait for that: fused
        optimizers read `found_inf` on the device.
        """
        with phase("optimizer"):
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            if self.clip_norm:
                self.scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(weights, self.clip_norm)
            if self.scaler.is_enabled():
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                # The gradient of the last layer is the first that is computed from the loss: where
                # that is not finite, so is it. To check all takes small networks longer than to
                # update their weights.
                last = next(w.grad for w in reversed(weights) if w.grad is not None)
                checked = norm if self.clip_norm else last.sum()
                optimizer.found_inf = (checked - checked).nan_to_num_(nan=1.0)  # 1 if it is not
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def settle_precision(
    config: Config, data: TrainData, world: World, saved: dict[str, Any] | None = None
) -> tuple[Config, str]:
    """`config` with a number format in place of `auto`, the same on every rank, and the reason.

    A run that resumes from the checkpoint `saved` keeps the format that it began with.
    """
    if config.precision != "auto":
        return config, "as --precision says"
    name = saved and saved["config"].get("precision")
    if name in DTYPES:
        return replace(config, precision=name), "as this run began"
    if world.device.type != "cpu":
        name, why = usual_precision(world.device), "fast on this device"
    else:
        gain, when = find_gain(config, data, world) if world.is_main else (math.inf, "")
        name = ("fp32", "bf16")[world.all_reduce_min(int(gain > 1))]
        why = f"bf16 is {gain:.2g} x as fast as fp32 here, {when}"
    return replace(config, precision=name), why


def find_gain(config: Config, data: TrainData, world: World) -> tuple[float, str]:
    """How many times as fast as fp32 bf16 is, and when that was measured."""
    memory, key, known = cache_folder(config.data) / "precision.json", machine_key(config), {}
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
    return f"{cpu_name()}, {limit}, torch {torch.__version__}, {network}, {layout}"


def measure(config: Config, num_classes: int, most_images: int, world: World) -> Rounds:
    """Time forward and backward passes in both formats, round by round.

    In CPU time of one thread: other load on the machine hardly changes that.
    """
    size, formats = config.data.image_size, []

    def once(count: int) -> tuple[float, float]:
        fp32, bf16 = (step_seconds(*one, count, size) / count for one in formats)
        return fp32, bf16

    def twice(count: int) -> Rounds:
        ends, rounds = perf_counter() + ROUND_SECONDS, [once(count)]
        return rounds if perf_counter() >= ends else [*rounds, once(count)]

    with one_thread(), seeded(WEIGHTS, config.seed):  # leaves the random state as it was
        model = build_model(config.model, num_classes, size).train()
        for name, network in (("fp32", model), ("bf16", with_small_weights(model))):
            precision = Precision(name, config.compute, config.optim, world.device)
            formats.append((precision, network.to(memory_format=precision.memory_format)))
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
