"""Convolutions of small maps on a CPU with AMX: gradients of their weights from strips of images.

The gradient of a weight is a sum over all places of all maps. oneDNN takes it row by row, and AMX
adds up 32 products of 16 bits at once: of a row of 4, seven eighths of them are of nothing. A strip
is several images of a batch side by side, with a column of zeros between two of them: the same sum,
from rows that are full. What it buys on a machine is a row of `bench`.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import conv2d

WIDEST = 8  # columns of a map: in strips, wider ones take longer than by themselves
STRIP = 48  # columns, about

UNIT = [1, 1]  # stride, padding and dilation of a 3 x 3 convolution that keeps height and width


class StripConv2d(nn.Conv2d):
    """A convolution that learns from strips where its maps are small; the same gradients."""

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width), in and out."""
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        if not learns or not torch.is_autocast_enabled("cpu") or images.shape[3] > WIDEST:
            return super().forward(images)
        dtype = torch.get_autocast_dtype("cpu")
        return Convolve.apply(images.to(dtype), self.weight.to(dtype))


class Convolve(torch.autograd.Function):
    """`conv2d` with a gradient of the weights of its own."""

    @staticmethod
    def forward(ctx: FunctionCtx, images: Tensor, weight: Tensor) -> Tensor:
        """(batch, inputs, height, width), (outputs, inputs, 3, 3): both of 16 bits."""
        ctx.save_for_backward(images, weight)
        return conv2d(images, weight, padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gradients of both from that of the result."""
        images, weight = ctx.saved_tensors
        of_images = None
        if ctx.needs_input_grad[0]:
            of_images = gradients(gradient, images, weight, [True, False, False])[0]
        of = [False, True, False]
        return of_images, gradients(strips(gradient), strips(images), weight, of)[1]


def gradients(gradient: Tensor, images: Tensor, weight: Tensor, of: list[bool]) -> tuple:
    """Those of the images, of the weights and of the bias that are asked for."""
    return torch.ops.aten.convolution_backward(
        gradient, images, weight, None, UNIT, UNIT, UNIT, False, [0, 0], 1, of
    )


def strips(maps: Tensor) -> Tensor:
    """(batch, channels, height, width) -> (strips, channels, height, about `STRIP`).

    The last one is filled up with zeros.
    """
    images = maps.permute(0, 2, 3, 1)
    batch, height, width, channels = images.shape
    count = max(1, round(STRIP / (width + 1)))
    full, rest = divmod(batch, count)
    laid = images.new_empty(full + bool(rest), height, count, width + 1, channels)
    laid[..., width, :] = 0
    places = laid.transpose(1, 2)[..., :width, :]  # (strips, count, height, width, channels)
    places[:full] = images[: batch - rest].unflatten(0, (full, count))
    if rest:
        places[full, :rest] = images[batch - rest :]
        places[full, rest:] = 0
    return laid.flatten(2, 3).permute(0, 3, 1, 2)


def learn_from_strips(network: nn.Module, does: bool = True) -> None:
    """Let the convolutions of `network` that can learn from strips do so, or do so no more."""
    before, after = (nn.Conv2d, StripConv2d) if does else (StripConv2d, nn.Conv2d)
    for layer in network.modules():
        if type(layer) is before and is_plain(layer):
            layer.__class__ = after


def is_plain(layer: nn.Conv2d) -> bool:
    """Whether it is 3 x 3, looks at every place and channel, and has no bias."""
    steps = layer.stride, layer.padding, layer.dilation
    rest = layer.groups, layer.padding_mode, layer.bias
    return layer.kernel_size == (3, 3) and steps == ((1, 1),) * 3 and rest == (1, "zeros", None)
