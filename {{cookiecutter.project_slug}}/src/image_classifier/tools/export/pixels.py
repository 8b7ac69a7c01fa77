"""What evaluation does with images, as one graph: from pixels of any size to probabilities.

It is for programs without this package. It scales by products of matrices, for which every runtime
has the operations: their own ways to resize differ from torch's, and from one another.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...preprocess import VIEWS, reflect

Answer = Callable[[Tensor], Tensor]  # a batch of images -> (batch, classes) of it

# torch resizes bytes with weights of fixed point, as Pillow does: in 16 bits with the sign.
LARGEST_WEIGHT, MOST_BITS = 2**15 - 0.5, 22


class FromPixels(nn.Module):
    """A model that takes images as they were decoded, and answers as evaluation does."""

    def __init__(
        self,
        model: nn.Module,
        side: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        tta: str,
    ) -> None:
        """Around `model`, which takes normalised images of `side` pixels; `tta` as evaluation."""
        super().__init__()
        self.model, self.side = model, side
        self.views = [view for _, *view in VIEWS[tta]]
        weights = torch.tensor([weight for weight, *_ in VIEWS[tta]])
        self.register_buffer("weights", weights.view(-1, 1, 1))
        self.register_buffer("scale", torch.tensor([1 / (255 * s) for s in std]).view(3, 1, 1))
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self.register_buffer("shift", torch.tensor(shift).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, height, width, 3) uint8 -> (batch, classes) float32 probabilities."""
        normal = middle_square(images, self.side) * self.scale + self.shift
        # All views at once, so that the model stands in the graph once.
        logits = self.model(torch.cat([moved(normal, *view) for view in self.views]))
        by_view = logits.unflatten(0, (len(self.views), -1))  # (views, batch, classes)
        return (self.weights * by_view).sum(0).softmax(dim=1)


class FromNormalised(nn.Module):
    """A model as it was trained, with a name for its input."""

    def __init__(self, model: nn.Module) -> None:
        """Around `model`."""
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, side, side) float32 -> (batch, classes) float32 logits."""
        return self.model(images)


def middle_square(images: Tensor, side: int) -> Tensor:
    """`decode.centre_crop` of a batch: (batch, 3, side, side), of float32 from 0 to 255.

    Nothing in it branches on the size of the images, so that one graph is for all. A byte differs
    by 1 where torch's weights, which are float64 before they are rounded, are others.
    """
    height, width = images.shape[1:3]
    square = torch.minimum(as_tensor(height), as_tensor(width))
    pixels = images.permute(0, 3, 1, 2).float()
    # In two passes with bytes between them, as torch does it.
    narrow = (pixels @ taps(width, square, side).T + 0.5).floor()
    return (taps(height, square, side) @ narrow + 0.5).floor()


def taps(length: int, square: Tensor, side: int) -> Tensor:
    """How much each of `length` pixels adds to each of `side`: (side, length) float32.

    `square` () is how many pixels in the middle are scaled; bilinear and antialiased.
    """
    start = ((as_tensor(length) - square) / 2).floor()
    scale = square / side
    centres = start + (torch.arange(side)[:, None] + 0.5) * scale
    places = torch.arange(length) + 0.5
    near = (1 - (places - centres).abs() / scale.clamp(min=1)).clamp(min=0)
    near = near * ((places > start) & (places < start + square))
    weights = near / near.sum(1, keepdim=True)
    one = 2 ** ((LARGEST_WEIGHT / weights.max()).log2().ceil() - 1).clamp(max=MOST_BITS)
    return (weights * one).round() / one


def as_tensor(length: int) -> Tensor:
    """A length as () float32, also while a graph is made and nobody knows it."""
    return torch.full((), length, dtype=torch.float32)


def moved(images: Tensor, shift: int, is_mirrored: bool) -> Tensor:
    """`augment.shift_and_flip` of a batch: all by the same, (batch, 3, side, side) in and out."""
    if not shift and not is_mirrored:
        return images
    side = images.shape[3]
    places = torch.arange(side) + shift
    columns = side - 1 - places if is_mirrored else places
    rows = images.index_select(2, reflect(places, side))
    return rows.index_select(3, reflect(columns, side))
