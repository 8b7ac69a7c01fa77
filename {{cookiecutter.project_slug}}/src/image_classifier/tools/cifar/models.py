"""The network of airbench, the fastest to learn CIFAR-10; it descends from `resnet9`.

https://arxiv.org/abs/2404.00498, section 3.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from ...config import ModelConfig
from ...errors import UserError
from ...models import largest

PATCH = 2  # side of the filters of the first layer, in pixels
WHITEN_EPS = 5e-4  # added to variances: directions with almost no variance are noise
SMALLEST_IMAGE = 9  # pixels; three halvings leave one
LOGIT_SCALE = 1 / 9  # of the last layer, whose inputs are maxima


class Airbench(nn.Module):
    """A fixed whitening layer, three stages of convolutions and a linear layer."""

    def __init__(self, model: ModelConfig, num_classes: int, channels: int, num_convs: int) -> None:
        """Stages of `model.width` times 1, 4 and 4 channels, and `num_convs` convolutions each."""
        super().__init__()
        filters = 2 * channels * PATCH**2
        self.whiten = nn.Conv2d(channels, filters, PATCH)
        self.whiten.weight.requires_grad_(False)
        self.stages = nn.Sequential(
            nn.GELU(),
            stage(filters, model.width, num_convs),
            stage(model.width, 4 * model.width, num_convs),
            stage(4 * model.width, 4 * model.width, num_convs),
        )
        self.head = nn.Linear(4 * model.width, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, num_classes)."""
        return self.head(largest(self.stages(self.whiten(images)))) * LOGIT_SCALE

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Compute the whitening filters from normalized `images`, (count, channels, height, width).

        They are the principal components of the patches, scaled to variance 1, and their negatives:
        https://myrtle.ai/learn/how-to-train-your-resnet-8-bag-of-tricks/.
        """
        # On the CPU in float64: a GPU would round the smallest variances away.
        patches = unfold(images.cpu(), PATCH).double()  # (count, channels x PATCH x PATCH, places)
        covariance = (patches @ patches.mT).mean(0) / patches.shape[2]
        variances, directions = torch.linalg.eigh(covariance)
        filters = (directions / (variances + WHITEN_EPS).sqrt()).T.unflatten(1, (-1, PATCH, PATCH))
        self.whiten.weight.copy_(torch.cat((filters, -filters)))
        self.whiten.bias.zero_()


class Residual(nn.Module):
    """Two convolutions with a residual connection, before the last GELU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first = conv(channels, channels)
        last = conv(channels, channels)
        self.body = nn.Sequential(first, norm(channels), nn.GELU(), last, norm(channels))
        self.gelu = nn.GELU()

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, height, width), in and out."""
        return self.gelu(features + self.body(features))


def stage(inputs: int, outputs: int, num_convs: int) -> nn.Sequential:
    """2 or 3 convolutions, each with a norm and a GELU; the first is followed by max-pooling.

    With 3, the last two are a residual branch.
    """
    first = [conv(inputs, outputs), nn.MaxPool2d(2), norm(outputs), nn.GELU()]
    if num_convs == 3:
        return nn.Sequential(*first, Residual(outputs))
    return nn.Sequential(*first, conv(outputs, outputs), norm(outputs), nn.GELU())


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    """A 3 x 3 convolution whose first filters are initialized to the identity."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def norm(channels: int) -> nn.BatchNorm2d:
    """BatchNorm with a bias only, and a momentum for short runs of few, large batches."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def airbench(
    model: ModelConfig, num_classes: int, image_size: int, channels: int, num_convs: int = 2
) -> nn.Module:
    """The network of the paper's 94 % recipe, for images of 32 pixels.

    Raises:
        UserError: if the images are too small, or it should have stochastic depth.
    """
    if model.drop_path:
        raise UserError(f"{model.name} has no stochastic depth: --model.drop-path 0")
    if image_size < SMALLEST_IMAGE:
        raise UserError(
            f"{model.name} takes a --data.image-size from {SMALLEST_IMAGE} on, not {image_size}"
        )
    return Airbench(model, num_classes, channels, num_convs)


# The deeper, residual network of the paper's 96 % recipe, there with a width of 128.
airbench96 = partial(airbench, num_convs=3)

MODELS = {"airbench": airbench, "airbench96": airbench96}
