"""Networks by name. To add one: a function in a file of its own here, and its name in `MODELS`.

    def mine(model: ModelConfig, num_classes: int, image_size: int) -> nn.Module:
        return nn.Sequential(...)

Any other name is looked up among torchvision's classification models, and `timm/NAME` in timm.
"""

from collections.abc import Callable

from torch import Tensor, nn

from ..config import ModelConfig
from ..data import IMAGENET_MEAN, IMAGENET_STD
from .airbench import airbench, airbench96
from .resnet9 import resnet9
from .surgery import blur_before_strides, leave_out_branches
from .timm import PREFIX, pretrained_config, timm
from .torchvision import AUXILIARY, zoo
from .vit import vit_s

MODELS: dict[str, Callable[[ModelConfig, int, int], nn.Module]] = {
    network.__name__: network for network in (resnet9, airbench, airbench96, vit_s)
}
IMAGES_TO_FIT = 2000

Colours = tuple[float, float, float]  # of red, green and blue


def build_model(
    model: ModelConfig,
    num_classes: int,
    image_size: int,
    sample: Callable[[int], Tensor] | None = None,
) -> nn.Module:
    """The network that `model` names, with random weights.

    It maps (batch, 3, image_size, image_size) float32 to (batch, num_classes) logits. A network
    that takes first weights from training images asks `sample` for so many of them, normalised;
    without it, such weights must be loaded.

    Raises:
        UserError: for a name that neither `MODELS` nor torchvision has, or a knob it can't follow.
    """
    if model.name.startswith(PREFIX):
        network = timm(model, num_classes, image_size)
    elif model.name in MODELS:
        network = MODELS[model.name](model, num_classes, image_size)
    else:
        network = zoo(model, num_classes, image_size, own=tuple(MODELS))
    if model.stochastic_depth:
        leave_out_branches(network, model)
    if model.blurpool:
        blur_before_strides(network, model)
    if sample is not None and hasattr(network, "fit"):
        network.fit(sample(IMAGES_TO_FIT))
    return network


def published_normalisation(name: str) -> tuple[Colours, Colours] | tuple[None, None]:
    """Mean and deviation by which images were normalised for the weights that are published.

    None for a model of which nobody has published any.
    """
    if name in MODELS:
        return None, None
    if name.startswith(PREFIX):
        known = pretrained_config(name)
        if known is not None and known.mean:
            return tuple(known.mean), tuple(known.std)
    if name in AUXILIARY:  # torchvision's own models undo ImageNet's and do this
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    return IMAGENET_MEAN, IMAGENET_STD
