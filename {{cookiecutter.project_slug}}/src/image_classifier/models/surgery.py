"""Changes to any network that keep the names of its weights, so that pretrained ones still fit."""

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, dropout

from ..config import ModelConfig
from ..errors import UserError
from .blocks import find_head

# Residual blocks by the name of their class, and the last layer of each of their branches: ours;
# torchvision's ResNet, RegNet and ViT.
BRANCHES = {
    "Residual": ("body",),
    "TransformerBlock": ("attention", "mlp"),
    "BasicBlock": ("bn2",),
    "Bottleneck": ("bn3",),
    "ResBottleneckBlock": ("f",),
    "EncoderBlock": ("dropout", "mlp"),
}
READY = "StochasticDepth"  # the layer that does it in torchvision's later networks
BLURRED_CHANNELS = 16  # input channels from which to blur: the first convolution sees sharp pixels


def leave_out_branches(network: nn.Module, model: ModelConfig) -> None:
    """Drop residual branches at random in training, per image: https://arxiv.org/abs/1603.09382.

    Block l of L is dropped with probability l/L x `model.stochastic_depth`.

    Raises:
        UserError: if the network has no residual branches, or none that are known.
    """
    ready = [layer for layer in network.modules() if type(layer).__name__ == READY]
    for number, layer in enumerate(ready, start=1):
        layer.p = model.stochastic_depth * number / len(ready)
    if ready:
        return
    blocks = [block for block in network.modules() if type(block).__name__ in BRANCHES]
    if not blocks:
        raise UserError(
            f"--model.stochastic-depth {model.stochastic_depth:g}: {model.name} has no residual "
            "branches that could be left out"
        )
    for number, block in enumerate(blocks, start=1):
        leaves_out = partial(leave_out, model.stochastic_depth * number / len(blocks))
        for name in BRANCHES[type(block).__name__]:
            block.get_submodule(name).register_forward_hook(leaves_out)


def leave_out(probability: float, layer: nn.Module, _: tuple[Tensor], branch: Tensor) -> Tensor:
    """The output of a layer, in training 0 for some images: (batch, ...), in and out."""
    if not layer.training:
        return branch
    share = branch.new_ones((len(branch), *(1,) * (branch.ndim - 1)))
    return branch * dropout(share, probability)


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
