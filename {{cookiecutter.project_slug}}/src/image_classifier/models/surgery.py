"""Changes to any network that keep the names of its weights, so that pretrained ones still fit."""

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, dropout

from ..config import ModelConfig
from ..errors import UserError
from .blocks import find_head

BLURRED_CHANNELS = 16  # input channels from which to blur: the first convolution sees sharp pixels


def blur_before_strides(network: nn.Module, model: ModelConfig) -> None:
    """Blur the input of each strided convolution, so that a shift by a pixel changes less.

    https://arxiv.org/abs/1904.11486

    Raises:
        UserError: if the network has no such convolutions.
    """
    filters = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    inner = [layer for layer in filters if layer.in_channels >= BLURRED_CHANNELS]
    strided = [layer for layer in inner if max(layer.stride) > 1]
    if not strided:
        raise UserError(f"--model.blurpool: {model.name} has no convolution to blur before")
    for layer in strided:
        layer.register_forward_pre_hook(blurred)


def blurred(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Features after a 1-2-1 filter in both directions: (batch, channels, height, width)."""
    # Two average-poolings of 2 x 2 are that filter, without weights.
    return avg_pool2d(avg_pool2d(inputs[0], 2, stride=1, padding=1), 2, stride=1)


def drop_before_head(network: nn.Module, probability: float) -> None:
    """Put dropout before the last layer."""
    _, head = find_head(network)
    head.register_forward_pre_hook(partial(dropped, probability))


def dropped(probability: float, layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Features, in training with some of them 0: (batch, ...), in and out."""
    return dropout(inputs[0], probability, layer.training)
