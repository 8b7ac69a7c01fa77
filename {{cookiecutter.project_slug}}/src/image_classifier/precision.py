"""Mixed precision: the number format of the arithmetic, and the optimizer's step in it."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .config import ComputeConfig, Config, OptimConfig
from .data import TrainData
from .errors import UserError
from .runtime.distributed import World
from .runtime.machine import usual_precision
from .runtime.phases import phase
from .runtime.tools import find_tool

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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

    @cached_property
    def found_inf_and_scale(self) -> tuple[Tensor, Tensor]:
        """For a step without a GradScaler: room for whether to skip it, and 1. On the device."""
        return torch.tensor((0.0, 1.0), device=self.device).unbind()

    def autocast(self) -> AbstractContextManager:
        """A block whose forward pass runs in this precision."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

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
            groups = [group["params"] for group in optimizer.param_groups]
            if self.clip_norm:
                self.scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_([*chain(*groups)], self.clip_norm)
            if self.scaler.is_enabled():
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                # The gradient of the last layer is the first that is computed from the loss: where
                # that is not finite, so is it. To check all takes small networks longer than to
                # update their weights, and to list all costs a cache miss for each.
                backwards = chain(*map(reversed, reversed(groups)))
                last = next(w.grad for w in backwards if w.grad is not None)
                checked = norm if self.clip_norm else last
                if hasattr(checked, "full_tensor"):  # FSDP: all ranks check all of it
                    checked = checked.full_tensor()
                found_inf, scale = self.found_inf_and_scale
                # What GradScaler does; the scale is 1.
                torch._amp_foreach_non_finite_check_and_unscale_(
                    [checked], found_inf.zero_(), scale
                )
                optimizer.found_inf = found_inf
                optimizer.step()
            for weight in chain(*groups):  # what `zero_grad` does, without a note for a profiler
                weight.grad = None


def settle_precision(
    config: Config, data: TrainData, world: World, saved: dict[str, Any] | None = None
) -> tuple[Config, str]:
    """`config` with a number format in place of `auto`, the same on every rank, and the reason.

    A run that resumes from the checkpoint `saved` keeps the format that it began with. On a CPU the
    tool `cpu_precision` measures which one is faster.
    """
    if config.precision != "auto":
        return config, "as --precision says"
    name = saved and saved["config"].get("precision")
    if name in DTYPES:
        return replace(config, precision=name), "as this run began"
    if world.device.type == "cuda":
        name, why = usual_precision(world.device), "fast on this device"
    elif world.device.type == "cpu" and (probe := find_tool("probe", "cpu-precision")):
        gain, when = probe.find_gain(config, data, world) if world.is_main else (math.inf, "")
        name = ("fp32", "bf16")[world.all_reduce_min(int(gain > 1))]
        why = f"bf16 is {gain:.2g} x as fast as fp32 here, {when}"
    else:
        name, why = "fp32", "right on every device; bf16 may be faster"
    return replace(config, precision=name), why
