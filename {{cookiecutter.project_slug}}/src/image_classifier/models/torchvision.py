"""torchvision's classification models by name, fitted to small images and any number of classes."""

from difflib import get_close_matches

import torch
from torch import nn

from ..config import ModelConfig, UserError
from .blocks import find_head

SMALL_IMAGE = 64  # pixels, up to which `stem = auto` keeps full resolution
AUXILIARY = ("googlenet", "inception_v3")  # would return more than logits in training


def zoo(
    model: ModelConfig, num_classes: int, image_size: int, own: tuple[str, ...] = ()
) -> nn.Module:
    """The torchvision model `model.name`, with a head for `num_classes`; `own` names are others'.

    Raises:
        UserError: if torchvision has none of that name, or it has no first layers to make small.
    """
    from torchvision import models

    names = models.list_models(module=models)
    if model.name not in names:
        near = get_close_matches(model.name, [*own, *names], n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"no model {model.name!r}{hint} There are {', '.join(own)} and torchvision's "
            f"{len(names)}, such as resnet18, convnext_tiny, efficientnet_v2_s, vit_b_16"
        )
    options: dict[str, object] = {"num_classes": num_classes}
    if model.name in AUXILIARY:
        options |= {"aux_logits": False, "init_weights": True}
    if model.name.startswith("vit_"):
        options["image_size"] = image_size
    if model.name.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    try:
        network = models.get_model(model.name, weights=None, **options)
    except (ValueError, AssertionError) as error:  # a transformer whose patches don't fit the image
        raise UserError(size_misfit(model, image_size, error)) from error
    network = adapted(network, model, image_size)
    if model.dropout:
        drop_before_head(network, model.dropout)
    return network


def adapted(network: nn.Module, model: ModelConfig, image_size: int) -> nn.Module:
    """A `network` for photographs, made to take images of that size, which is tried.

    Raises:
        UserError: if it can't be.
    """
    if model.stem == "small" or (model.stem == "auto" and image_size <= SMALL_IMAGE):
        network.enlarged = keep_resolution(network)
        if model.stem == "small" and network.enlarged == 1:
            raise UserError(f"--model.stem small: {model.name} has no stem that could be smaller")
    try:
        with torch.inference_mode():
            network.eval()(torch.zeros(1, 3, image_size, image_size))
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # halved until nothing is left
        raise UserError(size_misfit(model, image_size, error)) from error
    return network.train()


def size_misfit(model: ModelConfig, image_size: int, error: Exception) -> str:
    """What to say when a network can't take images of that size."""
    reason = str(error).splitlines()[0]
    return f"{model.name} can't take images of --data.image-size {image_size}: {reason}"


def keep_resolution(network: nn.Module) -> int:
    """Make the first layers of a convolutional network keep full resolution, as CIFAR's nets do.

    The first convolution gets stride 1, and 3 x 3 filters where they were larger; a max-pooling
    right after it goes (https://arxiv.org/abs/1512.03385, section 4.2). Returns how many times as
    wide all features are then: 1 if the network does not begin that way, as its first layer cuts
    patches, for example.
    """
    layers = [(name, m) for name, m in network.named_modules() if not list(m.children())]
    first, stem = layers[0]
    if not isinstance(stem, nn.Conv2d) or stem.stride != (2, 2):
        return 1
    size = min(stem.kernel_size[0], 3)
    small = nn.Conv2d(
        stem.in_channels,
        stem.out_channels,
        kernel_size=size,
        padding=size // 2,
        bias=stem.bias is not None,
    )
    nn.init.kaiming_normal_(small.weight, mode="fan_out", nonlinearity="relu")
    network.set_submodule(first, small)
    for name, layer in layers[1:4]:
        if isinstance(layer, nn.MaxPool2d):
            network.set_submodule(name, nn.Identity())
            return 2 * stem.stride[0]
    return stem.stride[0]


def drop_before_head(network: nn.Module, probability: float) -> None:
    """Put dropout before the last linear layer or, in networks that end so, 1 x 1 convolution."""
    name, head = find_head(network)
    network.set_submodule(name, nn.Sequential(nn.Dropout(probability), head))
