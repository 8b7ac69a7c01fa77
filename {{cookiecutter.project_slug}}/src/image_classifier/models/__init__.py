"""Networks by name. To add one: a function in a file of its own here, and its name in `MODELS`.

    def mine(model: ModelConfig, num_classes: int, image_size: int) -> nn.Module:
        return nn.Sequential(...)

Any other name is looked up among torchvision's classification models.
"""

from collections.abc import Callable

from torch import nn

from ..config import ModelConfig
from .resnet9 import resnet9
from .zoo import zoo

MODELS: dict[str, Callable[[ModelConfig, int, int], nn.Module]] = {
    network.__name__: network for network in (resnet9,)
}


def build_model(model: ModelConfig, num_classes: int, image_size: int) -> nn.Module:
    """The network that `model` names, with random weights.

    It maps (batch, 3, image_size, image_size) float32 to (batch, num_classes) logits.

    Raises:
        UserError: for a name that neither `MODELS` nor torchvision has, or a knob it can't follow.
    """
    if model.name in MODELS:
        return MODELS[model.name](model, num_classes, image_size)
    return zoo(model, num_classes, image_size, own=tuple(MODELS))
