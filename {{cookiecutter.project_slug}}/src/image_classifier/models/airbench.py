"""The network of airbench, which learns CIFAR-10 in the fewest seconds.

https://arxiv.org/abs/2404.00498, section 3; it descends from `resnet9`.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from ..config import ModelConfig, UserError
from .resnet9 import largest

PATCH = 2  # side of the patches that the first layer looks at, in pixels
WHITEN_EPS = 5e-4  # added to variances: directions with next to none are noise
SMALLEST_IMAGE = 9  # pixels, of which three halvings leave one
LOGIT_SCALE = 1 / 9  # of the last layer, whose inputs are maxima


class Airbench(nn.Module):
    """A whitening layer that is not trained, three stages of convolutions and a linear layer."""

    def __init__(self, model: ModelConfig, num_classes: int, num_convs: int) -> None:
        """Stages of `model.width` times 1, 4 and 4 channels, and `num_convs` convolutions each."""
        super().__init__()
        filters = 2 * 3 * PATCH**2
        self.whiten = nn.Conv2d(3, filters, PATCH)
        self.whiten.weight.requires_grad_(False)
        self.stages = nn.Sequential(
            nn.GELU(),
            stage(filters, model.width, num_convs),
            stage(model.width, 4 * model.width, num_convs),
            stage(4 * model.width, 4 * model.width, num_convs),
        )
        self.dropout = nn.Dropout(model.dropout)
        self.head = nn.Linear(4 * model.width, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) -> (batch, num_classes)."""
        features = self.stages(self.whiten(images))
        return self.head(self.dropout(largest(features))) * LOGIT_SCALE

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Make the outputs of the first layer uncorrelated and of variance 1 over `images`.

        Its filters are the principal components of the patches, scaled, and their negatives:
        https://myrtle.ai/learn/how-to-train-your-resnet-8-bag-of-tricks/. `images` is
        (count, 3, height, width), normalised.
        """
        # On the CPU in float64: the smallest variances are lost to a GPU's rounding.
        patches = unfold(images.cpu(), PATCH).double()  # (count, 3 x PATCH x PATCH, places)
        covariance = (patches @ patches.mT).mean(0) / patches.shape[2]
        variances, directions = torch.linalg.eigh(covariance)
        filters = (directions / (variances + WHITEN_EPS).sqrt()).T.unflatten(1, (3, PATCH, PATCH))
        self.whiten.weight.copy_(torch.cat((filters, -filters)))
        self.whiten.bias.zero_()


class Residual(nn.Module):
    """Two convolutions whose result is added to their input, before the last GELU."""

    def __init__(self, channels: int) -> None:
        """Both keep the number of channels."""
        super().__init__()
        self.body = nn.Sequential(
            conv(channels, channels),
            norm(channels),
            nn.GELU(),
            conv(channels, channels),
            norm(channels),
        )
        self.gelu = nn.GELU()

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, height, width), in and out."""
        return self.gelu(features + self.body(features))


def stage(inputs: int, outputs: int, num_convs: int) -> nn.Sequential:
    """2 or 3 convolutions, each with a norm and a GELU; after the first, height and width halve.

    Of 3, the last two are a residual branch.
    """
    first = [conv(inputs, outputs), nn.MaxPool2d(2), norm(outputs), nn.GELU()]
    if num_convs == 3:
        return nn.Sequential(*first, Residual(outputs))
    return nn.Sequential(*first, conv(outputs, outputs), norm(outputs), nn.GELU())


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    """A 3 x 3 convolution, the first filters of which begin by handing on their input."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def norm(channels: int) -> nn.BatchNorm2d:
    """BatchNorm with a bias alone, whose statistics follow a short run of few, large batches."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def airbench(model: ModelConfig, num_classes: int, image_size: int) -> nn.Module:
    """The network, before its `fit`; its proportions are made for 32 pixels.

    Raises:
        UserError: if the images are too small.
    """
    check_image_size("airbench", image_size)
    return Airbench(model, num_classes, num_convs=2)


def airbench96(model: ModelConfig, num_classes: int, image_size: int) -> nn.Module:
    """The deeper one, with residual branches, of the paper's recipe for 96 %; its width is 128.

    Raises:
        UserError: if the images are too small.
    """
    check_image_size("airbench96", image_size)
    return Airbench(model, num_classes, num_convs=3)


def check_image_size(name: str, image_size: int) -> None:
    """Refuse images of which three halvings leave nothing."""
    if image_size < SMALLEST_IMAGE:
        raise UserError(
            f"{name} can't take images of --data.image-size {image_size}; "
            f"from {SMALLEST_IMAGE} on it can"
        )
