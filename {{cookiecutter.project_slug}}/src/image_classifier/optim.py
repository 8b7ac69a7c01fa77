"""Loss, optimizer and learning rate.

To add an optimizer: a branch of `build_optimizer` and its name in `OptimConfig`. To add a schedule:
a function from 0..1 to 0..1 in `SCHEDULES` and its name in `OptimConfig`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import OptimConfig
from .models.blocks import find_blocks, find_heads, find_matrices

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,  # https://arxiv.org/abs/1608.03983
    "triangle": lambda done: 1 - done,  # https://arxiv.org/abs/1506.01186
}


def build_loss(
    optim: OptimConfig, batch_size: int, class_weights: Tensor | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross entropy, of logits with labels or with probabilities of each class.

    Of a part of a batch, its share of the mean over all `batch_size` images: parts may differ. With
    `class_weights`, (classes,) float32, that of each image counts as its class does. An image with
    the label -1, or with no probability of any class, was not read and counts nothing.
    """
    smoothing = optim.label_smoothing
    total = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum", ignore_index=-1)
    single = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="none", ignore_index=-1)

    def weighted(logits: Tensor, targets: Tensor) -> Tensor:
        # torch's own weights divide by their sum over the batch, so that parts would not add up,
        # and weigh what label smoothing gives to other classes by those.
        mixed = targets.is_floating_point()
        weights = targets @ class_weights if mixed else class_weights[targets.clamp(min=0)]
        return (single(logits, targets) * weights).sum() / batch_size

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return total(logits, targets) / batch_size

    return loss_of if class_weights is None else weighted


def build_schedule(
    optim: OptimConfig, steps_per_epoch: int, total_steps: int
) -> Callable[[int], float]:
    """The learning rate as a function of the step: up to `optim.lr`, then down to 0 at the end."""
    warmup_steps = min(round(optim.warmup_epochs * steps_per_epoch), total_steps - 1)

    def lr_at(step: int) -> float:
        if step < warmup_steps:
            return optim.lr * (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / (total_steps - warmup_steps)
        return optim.lr * SCHEDULES[optim.schedule](done)

    return lr_at


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Make `lr` the learning rate of all weights, of lower blocks their part, and return it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    return lr


def build_optimizer(optim: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `model`'s weights, fused into a few kernels where that exists."""
    groups = weight_groups(optim, model)
    if optim.name == "sgd":
        sgd = torch.optim.SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.momentum > 0, fused=True
        )
        begin_momentum(sgd)
        return sgd
    betas = (optim.momentum, 0.999)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True)
    return Muon(groups, find_hidden(model), lr=optim.lr, betas=betas)


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Let SGD remember the weights that learn from now on.

    Left to itself, it takes memory for it in the first step, and leaves there what it finds if that
    step is passed over for gradients that are not finite.
    """
    if not isinstance(optimizer, torch.optim.SGD) or not optimizer.defaults["momentum"]:
        return
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        if weight.requires_grad and weight not in optimizer.state:
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def state_shapes(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, torch.Size]:
    """The shapes of what an optimizer remembers of a weight, by its names for them."""
    if isinstance(optimizer, Muon) and weight in optimizer.hidden:
        return {"step": torch.Size(), "momentum": weight.flatten(1).shape}
    if isinstance(optimizer, torch.optim.AdamW):
        names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * optimizer.defaults["amsgrad"]]
        return {"step": torch.Size(), **dict.fromkeys(names, weight.shape)}
    return {"momentum_buffer": weight.shape} if optimizer.defaults["momentum"] else {}


def check_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any], step: int) -> None:
    """Refuse a state that is not one of `optimizer` after `step`, which torch takes all the same.

    Of an optimizer that we don't know, nothing is said.

    Raises:
        ValueError: saying what is wrong.
    """
    groups = optimizer.state_dict()["param_groups"]
    if [list(group["params"]) for group in saved["param_groups"]] != [g["params"] for g in groups]:
        raise ValueError("its optimizer has other groups of weights")
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.AdamW):
        return
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if step and not saved["state"] and state_shapes(optimizer, weights[0]):
        raise ValueError("its optimizer remembers nothing")
    for number, state in saved["state"].items():
        shapes = {name: kept.shape for name, kept in state.items() if kept is not None}
        if not 0 <= number < len(weights) or shapes != state_shapes(optimizer, weights[number]):
            raise ValueError(f"its optimizer remembers of weight {number} what this one does not")


def weight_groups(optim: OptimConfig, model: nn.Module) -> list[dict[str, object]]:
    """Matrices and filters, which decay, and biases, norms, scales and embeddings, which don't.

    Two groups, or two for each block of the network, from the first to the last: what is below
    learns more slowly, as what it knows is of use for all images (https://arxiv.org/abs/1801.06146,
    https://arxiv.org/abs/2106.08254). `scale` is a group's part of the learning rate.
    """
    matrices = find_matrices(model)
    blocks = find_blocks(model) if optim.layer_decay < 1 else [list(model.parameters())]
    groups: list[dict[str, object]] = []
    for above, block in zip(reversed(range(len(blocks))), blocks, strict=True):
        decaying = [weight for weight in block if weight in matrices]
        others = [weight for weight in block if weight not in matrices]
        scale = optim.layer_decay**above
        groups += [
            {"params": decaying, "weight_decay": optim.weight_decay, "scale": scale},
            {"params": others, "weight_decay": 0.0, "scale": scale},
        ]
    return groups


def find_hidden(model: nn.Module) -> set[nn.Parameter]:
    """The matrices and filters between the images and the logits, each of which mixes all inputs.

    Filters in groups don't, depthwise ones least of all: each group has channels of its own, and
    to make it orthogonal to the others means nothing.
    """
    matrices, heads = find_matrices(model), find_heads(model)
    # What sees the colours of the images; in a network without such filters the first matrix.
    stems = [weight for weight, layer in matrices.items() if getattr(layer, "in_channels", 0) == 3]
    hidden = matrices.keys() - (stems or list(matrices)[:1])
    return {
        weight
        for weight in hidden
        if matrices[weight] not in heads and getattr(matrices[weight], "groups", 1) == 1
    }


class Muon(torch.optim.AdamW):
    """Muon for hidden matrices and filters, AdamW for the first and last layer and the rest.

    Muon makes each update orthogonal (https://kellerjordan.github.io/posts/muon/). Scaled as in
    https://arxiv.org/abs/2502.16982 it takes AdamW's learning rate and weight decay. torch's own
    Muon refuses filters; here a filter counts as a matrix of (outputs, inputs x height x width).
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        hidden: set[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
    ) -> None:
        """`groups` as of `weight_groups`, and which of their weights are `hidden`."""
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        self.hidden = hidden

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all weights from their gradients; not at all if `found_inf` is 1, as AdamW."""
        spoiled = getattr(self, "found_inf", None)
        pairs = [(group, w) for group in self.param_groups for w in group["params"]]
        for group, weight in pairs:
            if weight not in self.hidden or weight.grad is None:
                continue
            gradient = weight.grad.flatten(1)  # (outputs, inputs)
            state = self.state[weight]
            if not state:
                # AdamW looks for its count of steps in the state of every weight.
                state |= {"step": torch.tensor(0.0), "momentum": torch.zeros_like(gradient)}
            momentum = state["momentum"]
            moved = momentum.lerp(gradient, 1 - group["betas"][0])
            update = orthogonal(gradient.lerp(moved, group["betas"][0]))
            scale = 0.2 * math.sqrt(max(update.shape))
            turned = weight * (1 - group["lr"] * group["weight_decay"])
            turned.add_(update.view(weight.shape), alpha=-group["lr"] * scale)
            if spoiled is not None:
                moved = torch.where(spoiled > 0, momentum, moved)
                turned = torch.where(spoiled > 0, weight, turned)
            momentum.copy_(moved)
            weight.copy_(turned)
            weight.grad = None  # AdamW, which comes now, passes it over
        super().step(closure)


def orthogonal(matrix: Tensor, iterations: int = 5) -> Tensor:
    """A matrix with about the same singular vectors, and singular values near 1: (rows, columns).

    The quintic Newton-Schulz iteration of https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    x = x / (x.norm() + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if is_tall else x).to(matrix.dtype)
