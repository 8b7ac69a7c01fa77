"""Networks by name: the face of this room, from which other rooms import.

To add a network: a function in a file of its own here, and its name in `MODELS`.

    def mine(model: ModelConfig, num_classes: int, image_size: int, channels: int) -> nn.Module:
        return nn.Sequential(...)

A tool adds networks in the same way. Any other name is looked up among torchvision's classification
models; `LIBRARY/NAME` is of a tool.
"""

from collections.abc import Callable
from types import ModuleType

from torch import nn

from ..config import ModelConfig
from ..errors import UserError
from ..extensions import chained, find_tool, find_tools, functions, joined
from .blocks import begin_at_zero, drop_before_head, find_head, find_heads, find_matrices, is_matrix
from .resnet9 import largest, resnet9, resnet9_gn
from .torchvision import HAS_AUX, adapted, load_weights, published_weights, size_misfit, torchvision

MODELS: dict[str, Callable[[ModelConfig, int, int, int], nn.Module]] = {
    "resnet9": resnet9,
    "resnet9_gn": resnet9_gn,
}


def models_by_name() -> dict[str, Callable[[ModelConfig, int, int, int], nn.Module]]:
    """`MODELS`, and those of the tools that are there."""
    return joined("model", MODELS, *(tool.MODELS for tool in find_tools("models").values()))


def find_library(name: str) -> ModuleType | None:
    """The tool with the models of another library: of `timm` for `timm/NAME`; None without it."""
    library, is_theirs, _ = name.partition("/")
    return find_tool("networks", library) if is_theirs else None


def build_model(
    model: ModelConfig, num_classes: int, image_size: int, channels: int = 3
) -> nn.Module:
    """The network that `model` names, with random weights, on the CPU.

    It maps (batch, channels, image_size, image_size) float32 to (batch, num_classes) logits.

    Raises:
        UserError: if there is no such model, or it can't be built so.
    """
    known = models_by_name()
    if networks := find_library(model.name):
        network = networks.build(model, num_classes, image_size, channels)
    elif model.name in known:
        if model.drop_path and model.name in MODELS:
            raise UserError(f"{model.name} has no stochastic depth: --model.drop-path 0")
        network = known[model.name](model, num_classes, image_size, channels)
    else:
        network = torchvision(model, num_classes, image_size, channels, tuple(known))
    for change_network in functions("network", "change_network"):
        change_network(network, model, image_size, channels)
    if model.dropout:
        drop_before_head(network, model.dropout)
    return chained("network", "wrap_network", network, model, channels)
