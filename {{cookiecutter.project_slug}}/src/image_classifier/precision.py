"""Number formats and memory layout: how the model's arithmetic is done on the device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .config import ComputeConfig, OptimConfig, UserError
from .runtime.phases import phase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision: weights stay float32, and what profits from fewer bits is computed in them.

    https://arxiv.org/abs/1710.03740
    """

    def __init__(
        self, name: str, compute: ComputeConfig, optim: OptimConfig, device: torch.device
    ) -> None:
        """Compute in the format `name`: fp32, bf16 or fp16; `precision_probe.py` settles `auto`."""
        if name == "fp16" and device.type == "cpu":
            raise UserError("--precision fp16 needs a GPU; on a CPU take bf16 or fp32")
        self.name, self.compute, self.device = name, compute, device
        self.clip_norm = optim.clip_norm
        self.dtype = DTYPES[name]
        channels_last = compute.channels_last
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        # fp16 has so small a range that gradients vanish unless the loss is scaled up.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        torch.set_float32_matmul_precision("high" if compute.tf32 else "highest")
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = compute.tf32
            deterministic = torch.are_deterministic_algorithms_enabled()
            torch.backends.cudnn.benchmark = compute.cudnn_benchmark and not deterministic

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, and steps that overflow are meant to be passed over."""
        return self.scaler.is_enabled()

    def place(self, model: nn.Module) -> nn.Module:
        """`model` on the device, in the layout and compiled as the config says."""
        model = model.to(self.device, memory_format=self.memory_format)
        if self.compute.compile:
            model.compile()  # in place: the names of the weights stay as they are
        return model

    def autocast(self) -> AbstractContextManager:
        """A block whose forward pass runs in the chosen format."""
        return phase("forward") if self.dtype == torch.float32 else self._mixed()

    @contextmanager
    def _mixed(self) -> Iterator[None]:
        with phase("forward"), torch.autocast(self.device.type, self.dtype):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to the weights'."""
        with phase("backward"):
            self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Clip the gradients if that is wanted, move the weights, and forget the gradients.

        Gradients that are inf or nan move nothing. Returns whether they were: () float32 on the
        device, 1 or 0. Nobody waits for it: the optimizer's kernel looks at it.
        """
        with phase("optimizer"):
            if self.clip_norm or self.scaler.is_enabled():
                self.scaler.unscale_(optimizer)
            if self.clip_norm:
                weights = [w for group in optimizer.param_groups for w in group["params"]]
                norm = nn.utils.clip_grad_norm_(weights, self.clip_norm)
            if self.scaler.is_enabled():  # it has looked at every gradient
                spoiled = sum(self.scaler._found_inf_per_device(optimizer).values()).clamp(max=1)
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                telling = norm if self.clip_norm else last_gradient(optimizer).sum()
                # What is not finite has no difference to itself. Each operation counts here.
                optimizer.found_inf = spoiled = (telling - telling).nan_to_num_(nan=1.0)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return spoiled

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without one."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved scaler."""
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def last_gradient(optimizer: torch.optim.Optimizer) -> Tensor:
    """The gradient of the last layer, which tells whether all are finite.

    It is the first that is computed from the loss: where that is inf or nan, so is it; and averaged
    over ranks, on each of them. To look at all of them would take a small network longer than to
    update its weights.
    """
    weights = (w for group in reversed(optimizer.param_groups) for w in reversed(group["params"]))
    return next(weight.grad for weight in weights if weight.grad is not None)
