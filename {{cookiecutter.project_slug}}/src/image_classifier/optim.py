"""Optimizer and learning-rate schedule.

To add an optimizer: a branch of `build_optimizer`, and its name in `OptimConfig`. To add a
schedule: a function from 0..1 to 0..1 in `SCHEDULES`, and its name in `OptimConfig`.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .config import OptimConfig
from .models import find_blocks, find_heads, find_matrices
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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Set the learning rate of all weights, in lower blocks scaled by layer decay; return it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    return lr


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
    betas = (optim.momentum, 0.999)
    if optim.name == "adamw":
        return AdamW(groups, lr=optim.lr, betas=betas, **kernels)
    muon = Muon(groups, lr=optim.lr, betas=betas, **kernels)
    muon.hidden = find_hidden(model)
    return muon


def param_groups(optim: OptimConfig, model: nn.Module) -> list[dict[str, object]]:
    """Weights in groups: matrices and filters decay; biases, norms, scales, embeddings do not.

    With layer decay, two groups for each block, from the first to the last: lower blocks, whose
    features are more general, learn more slowly (https://arxiv.org/abs/1801.06146,
    https://arxiv.org/abs/2106.08254). `lr_scale` is a group's factor of the learning rate.
    """
    matrices = find_matrices(model)
    blocks = find_blocks(model) if optim.layer_decay < 1 else [list(model.parameters())]
    groups: list[dict[str, object]] = []
    for above, block in zip(reversed(range(len(blocks))), blocks, strict=True):
        decaying = [weight for weight in block if weight in matrices]
        others = [weight for weight in block if weight not in matrices]
        scale = optim.layer_decay**above
        groups += [
            {"params": decaying, "weight_decay": optim.weight_decay, "lr_scale": scale},
            {"params": others, "weight_decay": 0.0, "lr_scale": scale},
        ]
    return groups


def find_hidden(model: nn.Module) -> set[nn.Parameter]:
    """The matrices and filters that Muon updates: all but the first and last layer.

    Grouped and depthwise filters are excluded: an orthogonal update across groups, which share no
    inputs, has no meaning.
    """
    matrices = find_matrices(model)
    heads = find_heads(model)
    # The layers that see the images: the first, and convolutions after it of as many channels.
    channels = [getattr(layer, "in_channels", 0) for layer in matrices.values()]
    stems = list(takewhile(lambda count: 0 < count == channels[0], channels))
    hidden = list(matrices)[max(1, len(stems)) :]
    return {
        weight
        for weight in hidden
        if matrices[weight] not in heads and getattr(matrices[weight], "groups", 1) == 1
    }


def set_training(model: nn.Module, optim: OptimConfig) -> None:
    """Put `model` into training mode, BatchNorm's statistics frozen if `optim` says so."""
    model.train()
    if optim.freeze_bn:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()


class Muon(AdamW):
    """Muon for hidden matrices and filters, AdamW for the first and last layer and the rest.

    Muon makes each update orthogonal (https://kellerjordan.github.io/posts/muon/). Scaled as in
    https://arxiv.org/abs/2502.16982 it takes AdamW's learning rate and weight decay. torch's own
    Muon refuses filters; here a filter counts as a matrix of (outputs, inputs x height x width).
    """

    hidden: set[nn.Parameter]  # the weights that are orthogonalized; AdamW updates the others

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all weights from their gradients; none if `found_inf` is 1, like fused AdamW."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                if weight in self.hidden and weight.grad is not None:
                    alike[weight.shape].append(weight)
            for weights in alike.values():
                self.update_hidden(weights, group)
        super().step(closure)

    def update_hidden(self, weights: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update hidden weights of one shape, all at once: fewer kernels for a GPU to launch."""
        found_inf = getattr(self, "found_inf", None)
        loss_scale = getattr(self, "grad_scale", None)
        # (weights, outputs, inputs)
        gradient = torch.stack([weight.grad for weight in weights]).flatten(2)
        gradient = gradient if loss_scale is None else gradient / loss_scale
        is_taken = 1.0
        if found_inf is not None:  # on the device, so that the host does not wait for it
            is_taken = (found_inf == 0).float()
            gradient = torch.where(found_inf == 0, gradient, 0.0)
        states = [self.state[weight] for weight in weights]
        for state in states:
            if not state:
                # AdamW expects its step count in the state of every weight.
                state |= {"step": torch.tensor(0.0), "momentum": torch.zeros_like(gradient[0])}
        momenta = [state["momentum"] for state in states]
        beta = group["betas"][0]
        lr = group["lr"]
        moved = torch.stack(momenta).lerp(gradient, (1 - beta) * is_taken)
        update = orthogonal(gradient.lerp(moved, beta))
        update *= -0.2 * math.sqrt(max(update.shape[1:])) * lr * is_taken
        torch._foreach_copy_(momenta, moved.unbind())
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"] * is_taken)
        torch._foreach_add_(weights, update.view(-1, *weights[0].shape).unbind())
        for weight in weights:
            weight.grad = None  # so AdamW, which comes next, skips it


def orthogonal(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Matrices with about the same singular vectors, and singular values near 1.

    They are (count, rows, columns). The quintic Newton-Schulz iteration of
    https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    for _ in range(iterations):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)
