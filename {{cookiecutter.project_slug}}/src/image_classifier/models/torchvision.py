"""torchvision's classification models by name, fitted to small images and any number of classes."""

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import OF_TOOLS, UserError, did_you_mean
from ..runtime.console import first_line

SMALL_IMAGE = 64  # pixels, up to which the first layers keep full resolution
HAS_AUX = ("googlenet", "inception_v3")  # would return more than logits in training


def torchvision(
    model: ModelConfig, num_classes: int, image_size: int, channels: int, others: tuple[str, ...]
) -> nn.Module:
    """Torchvision's model `model.name`, for images of `channels`, with a head for `num_classes`.

    `others` are the names of models that are not torchvision's, for the error message.

    Raises:
        UserError: if torchvision has no such model, or it can't take such images.
    """
    from torchvision import models

    names = models.list_models(module=models)
    if model.name not in names:
        raise UserError(
            f"no model {model.name!r}; there are: {', '.join(others)}, and "
            "torchvision's, such as resnet18, vit_b_16"
            f"{did_you_mean(model.name, [*others, *names])}{OF_TOOLS}"
        )
    options: dict[str, object] = {"num_classes": num_classes}
    if model.name in HAS_AUX:
        options |= {"aux_logits": False, "init_weights": True}
    if model.name.startswith("vit_"):
        options["image_size"] = image_size
    if model.name.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    try:
        network = models.get_model(model.name, weights=None, **options)
    except (ValueError, AssertionError) as error:  # a transformer whose patches don't fit the image
        raise UserError(size_misfit(model, image_size, error)) from error
    if model.drop_path:
        change_stochastic_depth(network, model)
    take_channels(network, channels)
    return adapted(network, model, image_size, channels)


def adapted(network: nn.Module, model: ModelConfig, image_size: int, channels: int) -> nn.Module:
    """A network for photographs, fitted to small images; it is tried on one of that size.

    Where it can't take full resolution (RepVGG, CoAtNet, LeViT), its first layers stay.

    Raises:
        UserError: if it can't take such images.
    """
    if image_size <= SMALL_IMAGE:
        fine = deepcopy(network)
        keep_resolution(fine)
        if size_error(fine, image_size, channels) is None:
            return fine.train()
    if (error := size_error(network, image_size, channels)) is not None:
        raise UserError(size_misfit(model, image_size, error)) from error
    return network.train()


def size_error(network: nn.Module, image_size: int, channels: int) -> Exception | None:
    """The exception that a network raises for an image of that size; evaluation mode stays on."""
    try:
        with torch.inference_mode():
            network.eval()(torch.zeros(1, channels, image_size, image_size))
    except Exception as error:  # of a library: halved until nothing is left, divided by zero
        return error
    return None


def load_weights(
    network: nn.Module, weights: dict[str, Tensor], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """`network.load_state_dict`: the names that are missing, and those that are not expected.

    MNASNet takes no weights without its version; what else a file says of them is not used. Nor are
    auxiliary heads that the network lacks: those of GoogLeNet and Inception v3, for training.
    """
    known = OrderedDict(weights)
    for name in weights.keys() - network.state_dict().keys():
        if name.lower().startswith("aux"):
            del known[name]
    layers = [pair for pair in network.named_modules() if type(pair[1]).__name__ == "MNASNet"]
    known._metadata = {name: {"version": layer._version} for name, layer in layers}
    return network.load_state_dict(known, strict=strict)


def size_misfit(model: ModelConfig, image_size: int, error: Exception) -> str:
    """What to say when a network can't take images of that size."""
    return f"{model.name} can't take images of --data.image-size {image_size}: {first_line(error)}"


def change_stochastic_depth(network: nn.Module, model: ModelConfig) -> None:
    """Let `model.drop_path` of the images skip the last block, and fewer the blocks below."""
    layers = [layer for layer in network.modules() if type(layer).__name__ == "StochasticDepth"]
    if not (most := max((layer.p for layer in layers), default=0.0)):
        raise UserError(f"{model.name} has no stochastic depth: --model.drop-path 0")
    for layer in layers:
        layer.p *= model.drop_path / most


def take_channels(network: nn.Module, channels: int) -> None:
    """Give the first layer, where it sees other channels, new filters that see `channels`."""
    name, stem = next(pair for pair in network.named_modules() if isinstance(pair[1], nn.Conv2d))
    if stem.in_channels == channels:
        return
    options = {"stride": stem.stride, "padding": stem.padding, "bias": stem.bias is not None}
    new = nn.Conv2d(channels, stem.out_channels, stem.kernel_size, **options)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    network.set_submodule(name, new)


def keep_resolution(network: nn.Module) -> None:
    """Make the first layers of a convolutional network keep full resolution, as CIFAR's nets do.

    The first convolution gets stride 1, and at most 3 x 3 filters; a max-pooling right after it is
    removed (https://arxiv.org/abs/1512.03385, section 4.2). A network that begins by cutting
    patches stays as it is.
    """
    layers = [(name, m) for name, m in network.named_modules() if not list(m.children())]
    first, stem = layers[0]
    if not isinstance(stem, nn.Conv2d) or stem.stride != (2, 2):
        return
    size = min(stem.kernel_size[0], 3)
    has_bias = stem.bias is not None
    small = nn.Conv2d(stem.in_channels, stem.out_channels, size, padding=size // 2, bias=has_bias)
    nn.init.kaiming_normal_(small.weight, mode="fan_out", nonlinearity="relu")
    network.set_submodule(first, small)
    for name, layer in layers[1:4]:
        if isinstance(layer, nn.MaxPool2d):
            network.set_submodule(name, nn.Identity())
            return


def published_weights(name: str) -> Any:  # noqa: ANN401 - an entry of torchvision's enum
    """The best weights that torchvision publishes for the model `name`; None if there are none."""
    from torchvision import models

    is_known = name in models.list_models(module=models)
    return models.get_model_weights(name).DEFAULT if is_known else None
