"""How images become the input of the model: normalized, and in evaluation from several views.

A deployed model needs this module and no other of the input path.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from .data import shift_and_flip
from .precision import Precision

CACHED = 2**18  # float32 numbers that fit into a core's cache beside others
# Views of an image in evaluation: weight, shift in pixels along the diagonal, whether flipped.
# https://arxiv.org/abs/2404.00498
VIEWS = {
    "none": [(1.0, 0, False)],
    "flip": [(0.5, 0, False), (0.5, 0, True)],
    "shift": [
        (0.25, 0, False),
        (0.25, 0, True),
        (0.125, -1, False),
        (0.125, -1, True),
        (0.125, 1, False),
        (0.125, 1, True),
    ],
}


class Pixels(Protocol):
    """What is normalized: images of a dataset, or those that a model was trained on."""

    mean: tuple[float, ...]  # of each channel, from 0 to 1
    std: tuple[float, ...]
    bits: int  # of each number


class Normalize:
    """Scales pixels, whole numbers, to mean 0 and standard deviation 1 of each channel."""

    def __init__(self, source: Pixels, size: int, precision: Precision, tta: str = "none") -> None:
        """For images of up to `size` pixels, in the memory format of the model.

        `tta` says which views evaluation averages: see `VIEWS`.
        """
        self.tta = tta
        device = precision.device
        self.memory_format = precision.memory_format
        largest = 2**source.bits - 1
        # Rows rather than single pixels: a last dimension of 3 is too short for vector units.
        scale = [1 / (largest * s) for s in source.std]
        self.scale = torch.tensor(scale, device=device).repeat(size)
        shift = [-m / s for m, s in zip(source.mean, source.std, strict=True)]
        self.shift = torch.tensor(shift, device=device).repeat(size)

    def __call__(self, images: Tensor) -> Tensor:
        """(batch, channels, size, size), channels_last uint8, uint16 or float -> float32."""
        rows = images.permute(0, 2, 3, 1).flatten(2)
        width = rows.shape[2]  # in numbers: one for each channel of a pixel
        normal = torch.empty(rows.shape, device=rows.device)
        # On a CPU a few images at a time, so that they are still in its cache for the second pass.
        together = max(1, CACHED // rows[0].numel()) if rows.device.type == "cpu" else len(rows)
        for part, target in zip(rows.split(together), normal.split(together), strict=True):
            torch.addcmul(self.shift[:width], part.float(), self.scale[:width], out=target)
        images = normal.unflatten(2, (-1, images.shape[1])).permute(0, 3, 1, 2)
        return images.contiguous(memory_format=self.memory_format)

    def views(self, images: Tensor) -> Iterator[tuple[Tensor, float]]:
        """The views of evaluation, normalized, each with its weight; the weights add up to 1.

        (batch, channels, size, size), channels_last uint8 or uint16 -> float32.
        """
        for weight, shift, is_mirrored in VIEWS[self.tta]:
            view = images
            if shift or is_mirrored:
                shifts = torch.full((len(images), 2), shift, device=images.device)
                flipped = torch.full((len(images),), is_mirrored, device=images.device)
                view = shift_and_flip(images.permute(0, 2, 3, 1), shifts, flipped)
                view = view.permute(0, 3, 1, 2)
            yield self(view), weight
