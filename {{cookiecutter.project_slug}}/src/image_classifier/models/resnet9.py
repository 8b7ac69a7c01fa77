"""A small residual network for tiny images, after David Page's entry for DAWNBench.

https://myrtle.ai/learn/how-to-train-your-resnet/
"""

from collections.abc import Callable
from functools import partial
from math import gcd

from torch import Tensor, nn

from ..config import ModelConfig

LOGIT_SCALE = 0.25  # of the last layer, whose inputs are maxima: large learning rates diverge else

Norm = Callable[[int], nn.Module]  # a norm of so many channels


class ResNet9(nn.Module):
    """Eight convolutions, each with a norm and a ReLU, and a linear layer."""

    def __init__(self, model: ModelConfig, num_classes: int, channels: int, norm: Norm) -> None:
        """Four stages of `model.width` times 1, 2, 4 and 8 channels."""
        super().__init__()
        one = model.width
        two = model.width * 2
        four = model.width * 4
        eight = model.width * 8
        self.stem = conv(channels, one, norm)
        self.stage1 = nn.Sequential(conv(one, two, norm, pool=True), Residual(two, norm))
        self.stage2 = conv(two, four, norm, pool=True)
        self.stage3 = nn.Sequential(conv(four, eight, norm, pool=True), Residual(eight, norm))
        self.head = nn.Linear(eight, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, num_classes)."""
        features = self.stage3(self.stage2(self.stage1(self.stem(images))))
        return self.head(largest(features)) * LOGIT_SCALE


class Residual(nn.Module):
    """Two convolutions whose result is added to their input."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels, norm), conv(channels, channels, norm))

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, height, width), in and out."""
        return features + self.body(features)


def largest(features: Tensor) -> Tensor:
    """The largest value of each channel: (batch, channels, height, width) -> (batch, channels)."""
    # Not amax: in bf16, fused by the compiler, its gradient can be 0/0 where this one's index is
    # right (https://github.com/pytorch/pytorch/issues/195214). Channels last, so that the gradient
    # has the layout of the maps: else norms and activations read across two layouts, and a whole
    # step takes 1.05 to 1.08 times as long on a CPU.
    return features.permute(0, 2, 3, 1).flatten(1, 2).max(dim=1).values


def conv(inputs: int, outputs: int, norm: Norm, pool: bool = False) -> nn.Sequential:
    """A 3 x 3 convolution, a norm and a ReLU; `pool` halves height and width.

    Pooling comes before the norm, which then has a quarter of the work.
    """
    # The norm has a bias of its own, so the convolution needs none.
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)]
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, norm(outputs), nn.ReLU(inplace=True))


def resnet9(
    model: ModelConfig,
    num_classes: int,
    _image_size: int,
    channels: int,
    norm: Norm = nn.BatchNorm2d,
) -> nn.Module:
    """The network; it takes images of any size, and 32 pixels suit it best."""
    return ResNet9(model, num_classes, channels, norm)


# With GroupNorm the result does not depend on how a batch is divided; 12 channels have 4 groups.
resnet9_gn = partial(resnet9, norm=lambda channels: nn.GroupNorm(gcd(8, channels), channels))
