"""Optimizer and learning-rate schedule.

To add an optimizer: a branch of `build_optimizer`, and its name in `config.py`; or a tool has it:
`tools/<name>/optimizer.py`. To add a schedule: a function from 0..1 to 0..1 in `SCHEDULES`, and its
name in `OptimConfig`.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .config import OptimConfig
from .extensions import chained, find_tool
from .models import find_matrices
from .runtime.machine import leave_tracer_out, untraced

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,  # https://arxiv.org/abs/1608.03983
    "linear": lambda done: 1 - done,  # https://arxiv.org/abs/1506.01186
}

SGD = untraced(torch.optim.SGD)
AdamW = untraced(torch.optim.AdamW)


def build_schedule(
    optim: OptimConfig, steps_per_epoch: int, total_steps: int
) -> Callable[[int], float]:
    """The learning rate as a function of the step: linear warm-up, then decay to 0 at the end."""
    warmup_steps = min(round(optim.warmup_epochs * steps_per_epoch), total_steps - 1)

    def lr_at(step: int) -> float:
        if step < warmup_steps:
            return optim.lr * (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / (total_steps - warmup_steps)
        return optim.lr * SCHEDULES[optim.schedule](done)

    return lr_at


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all weights, scaled in some groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def build_optimizer(optim: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the weights of `model`, in fused kernels; on Apple's GPUs in foreach's."""
    leave_tracer_out(torch.optim.Optimizer)
    groups = param_groups(optim, model)
    # Fused kernels for Apple's GPUs refuse `found_inf` (SGD) or ignore it (AdamW):
    # https://github.com/pytorch/pytorch/pull/186360
    is_apple = next(model.parameters()).device.type == "mps"
    kernels = {"fused": not is_apple, "foreach": is_apple}
    if optim.name == "sgd":
        sgd = SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.momentum > 0, **kernels
        )
        # Left to itself, SGD allocates momentum in the first step, and leaves it uninitialized if
        # `found_inf` skips that step.
        for weight in (weight for group in groups for weight in group["params"] if optim.momentum):
            sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        return sgd
    if optim.name == "adamw":
        return AdamW(groups, lr=optim.lr, betas=(optim.momentum, 0.999), **kernels)
    return find_tool("optimizer", optim.name).build_optimizer(optim, model, groups, kernels)


def param_groups(optim: OptimConfig, model: nn.Module) -> list[dict[str, object]]:
    """Weights in groups: matrices and filters decay; biases, norms, scales, embeddings do not.

    `lr_scale` is a group's factor of the learning rate. Tools may divide the groups.
    """
    matrices = find_matrices(model)
    decaying = [weight for weight in model.parameters() if weight in matrices]
    others = [weight for weight in model.parameters() if weight not in matrices]
    groups = [
        {"params": decaying, "weight_decay": optim.weight_decay, "lr_scale": 1.0},
        {"params": others, "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    return chained("groups", "change_groups", groups, optim, model)


def set_training(model: nn.Module, optim: OptimConfig) -> None:
    """Put `model` into training mode, BatchNorm's statistics frozen if `optim` says so."""
    model.train()
    if optim.freeze_bn:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()
