"""The optimizer Muon: https://kellerjordan.github.io/posts/muon/."""

import math
from collections import defaultdict
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import OptimConfig
from ...models import find_heads, find_matrices
from ...optim import AdamW
from ...runtime.machine import usual_precision

ITERATIONS = 5  # of Newton-Schulz
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of its polynomial
LONG = 2  # times as many columns as rows


def build_optimizer(
    optim: OptimConfig, model: nn.Module, groups: list[dict[str, Any]], kernels: dict[str, bool]
) -> "Muon":
    """Muon, for `groups` of the weights of `model`."""
    muon = Muon(groups, lr=optim.lr, betas=(optim.momentum, 0.999), **kernels)
    muon.hidden = find_hidden(model)
    device = next(model.parameters()).device
    if device.type == "cpu":  # which emulates bf16 if it has none, in 3 to 50 x the time of fp32
        is_fast = torch.tensor(int(usual_precision(device) == "bf16"))
        if dist.is_available() and dist.is_initialized():  # the same on every rank
            dist.all_reduce(is_fast, dist.ReduceOp.MIN)
        muon.is_bf16 = bool(is_fast)
    return muon


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


class Muon(AdamW):
    """Muon for hidden matrices and filters, AdamW for the first and last layer and the rest.

    Muon makes each update orthogonal (https://kellerjordan.github.io/posts/muon/). Scaled as in
    https://arxiv.org/abs/2502.16982 it takes AdamW's learning rate and weight decay. torch's own
    Muon refuses filters; here a filter counts as a matrix of (outputs, inputs x height x width).
    """

    hidden: set[nn.Parameter]  # the weights that are orthogonalized; AdamW updates the others
    is_bf16 = True  # whether that is done in bf16; else in fp32

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
        update = orthogonal(gradient.lerp(moved, beta), self.is_bf16)
        update *= -0.2 * math.sqrt(max(update.shape[1:])) * lr * is_taken
        torch._foreach_copy_(momenta, moved.unbind())
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"] * is_taken)
        torch._foreach_add_(weights, update.view(-1, *weights[0].shape).unbind())
        for weight in weights:
            weight.grad = None  # so AdamW, which comes next, skips it


def orthogonal(matrices: Tensor, is_bf16: bool) -> Tensor:
    """Matrices with about the same singular vectors, and singular values near 1.

    They are (count, rows, columns). The quintic Newton-Schulz iteration of
    https://kellerjordan.github.io/posts/muon/, in bf16 or in fp32.
    """
    x = matrices.bfloat16() if is_bf16 else matrices.float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = iterated(x) if is_bf16 or x.shape[2] < LONG * x.shape[1] else iterated_squares(x)
    return (x.mT if is_tall else x).to(matrices.dtype)


def iterated(x: Tensor) -> Tensor:
    """`x = (a + b y + c y @ y) @ x` of squares `y = x @ x.T`, ITERATIONS times."""
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def iterated_squares(x: Tensor) -> Tensor:
    """The same, by small squares alone: 0.4 x the time where there are 9 times as many columns.

    https://dao-ailab.github.io/blog/2026/gram-newton-schulz/; in bf16 it would be unstable.
    """
    a, b, c = COEFFICIENTS
    square = x @ x.mT
    product = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand_as(square)
    for _ in range(ITERATIONS):
        change = torch.baddbmm(square, square, square, beta=b, alpha=c)
        change.diagonal(dim1=1, dim2=2).add_(a)
        square = change @ square @ change
        product = change @ product
    return product @ x
