"""LoRA: beside each frozen matrix W learns a product B A of low rank, and the layer has W + B A.

https://arxiv.org/abs/2106.09685. By torch's parametrizations: what a layer reads as its weight is
the sum, so networks that pass weights to a function have it too, such as those of `nn.Multihead-
Attention`, of torchvision's Swin or of timm's BEiT. The layers of peft are passed by there.
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from ...config import Config
from ...models import find_heads, find_matrices

MARK = ".parametrizations."  # in the names that torch gives W, A and B


class LowRank(nn.Module):
    """Adds B A to a weight, a matrix of (outputs, inputs x height x width)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        """B begins with zeros, so the first step has the pretrained network."""
        super().__init__()
        outputs, inputs = weight.flatten(1).shape
        rank = min(rank, outputs, inputs)
        self.a = nn.Parameter(torch.empty(rank, inputs).uniform_(-1, 1) / math.sqrt(inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the layer computes with, of the same shape."""
        return weight + (self.b @ self.a).view(weight.shape)


def change_training(model: nn.Module, config: Config, *_: object) -> None:
    """Freeze `model` but for its last layer, and let all matrices and filters learn by `LowRank`.

    With `--model.lora-rank` only. It takes the weights of the network without adapters, too.
    """
    if rank := config.model.lora_rank:
        add_adapters(model, rank)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Add adapters of this rank to `model`, and freeze all but these and its last layer."""
    heads = find_heads(model)
    owners = Counter(w for layer in model.modules() for w in layer.parameters(recurse=False))
    learn = {w for w, count in owners.items() if w.requires_grad and count == 1}  # of one layer
    matrices = [(w, x) for w, x in find_matrices(model).items() if w in learn]
    model.requires_grad_(False)
    for layer in heads:
        layer.requires_grad_(True)
    for weight, layer in matrices:
        if layer not in heads:
            names = {own: name for name, own in layer.named_parameters(recurse=False)}
            register_parametrization(layer, names[weight], LowRank(weight, rank))
    model.register_load_state_dict_pre_hook(take_plain)


def take_plain(model: nn.Module, weights: dict[str, Tensor], *_: Any) -> None:  # noqa: ANN401
    """Rename weights of a network without adapters in place; the adapters keep their values."""
    for name, own in model.state_dict().items():
        layer, is_adapted, rest = name.partition(MARK)
        plain = f"{layer}.{rest.partition('.')[0]}"
        if is_adapted and not name.endswith(".original"):
            weights.setdefault(name, own)
        elif is_adapted and plain in weights:
            weights[name] = weights.pop(plain)


def plain_weights(weights: dict[str, Tensor], knobs: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a run as its network has them by itself: those of adapters are added in."""
    return merged(weights) if knobs.get("model.lora_rank") else weights


def merged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a network without adapters that computes the same.

    Raises:
        LookupError, RuntimeError: if an adapter is missing, or of another shape.
    """
    plain = {}
    for name, weight in weights.items():
        layer, is_adapted, rest = name.partition(MARK)
        if not is_adapted:
            plain[name] = weight
        elif name.endswith(".original"):
            own = name.removesuffix("original")
            # In place, so that a file can't ask for a product that is larger than the matrix.
            total = weight.flatten(1).clone().addmm_(weights[f"{own}0.b"], weights[f"{own}0.a"])
            plain[f"{layer}.{rest.partition('.')[0]}"] = total.view(weight.shape)
    return plain
