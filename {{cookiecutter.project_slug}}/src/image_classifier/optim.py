"""Loss, optimizer and learning rate.

To add an optimizer: a branch of `build_optimizer` and its name in `OptimConfig`. To add a schedule:
a function from 0..1 to 0..1 in `SCHEDULES` and its name in `OptimConfig`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import OptimConfig

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,  # https://arxiv.org/abs/1608.03983
    "triangle": lambda done: 1 - done,  # https://arxiv.org/abs/1506.01186
}


def build_loss(optim: OptimConfig, batch_size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross entropy, of logits with labels or with probabilities of each class.

    Of a part of a batch, its share of the mean over all `batch_size` images: parts may differ.
    """
    mean = nn.CrossEntropyLoss(label_smoothing=optim.label_smoothing)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        loss = mean(logits, targets)
        return loss if len(logits) == batch_size else loss * (len(logits) / batch_size)

    return loss_of


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
    """Make `lr` the learning rate of all weights, and return it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def build_optimizer(optim: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `model`'s weights, fused into a few kernels where that exists."""
    groups = weight_groups(optim, model)
    if optim.name == "sgd":
        sgd = torch.optim.SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.momentum > 0, fused=True
        )
        # Left to itself, SGD takes memory for it in the first step, and leaves there what it finds
        # if that step is passed over for gradients that are not finite.
        for weight in model.parameters() if optim.momentum else ():
            sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        return sgd
    betas = (optim.momentum, 0.999)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True)
    return Muon(groups, lr=optim.lr, betas=betas)


def weight_groups(optim: OptimConfig, model: nn.Module) -> list[dict[str, object]]:
    """Matrices and filters, which decay, and biases, norms and embeddings, which don't."""
    decaying, others = [], []
    for name, weight in model.named_parameters():
        is_matrix = weight.ndim > 1 and not any(w in name for w in ("embedding", "token", "bias"))
        (decaying if is_matrix else others).append(weight)
    return [
        {"params": decaying, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


class Muon(torch.optim.AdamW):
    """Muon for hidden matrices and filters, AdamW for the first and last layer and the rest.

    Muon makes each update orthogonal (https://kellerjordan.github.io/posts/muon/). Scaled as in
    https://arxiv.org/abs/2502.16982 it takes AdamW's learning rate and weight decay. torch's own
    Muon refuses filters; here a filter counts as a matrix of (outputs, inputs x height x width).
    """

    def __init__(
        self, groups: list[dict[str, object]], lr: float, betas: tuple[float, float]
    ) -> None:
        """`groups` as of `weight_groups`: the first has the matrices."""
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        matrices = self.param_groups[0]["params"]
        self.hidden = {id(weight) for weight in matrices[1:-1]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all weights from their gradients; not at all if `found_inf` is 1, as AdamW."""
        group = self.param_groups[0]
        spoiled = getattr(self, "found_inf", None)
        for weight in group["params"]:
            if id(weight) not in self.hidden or weight.grad is None:
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
