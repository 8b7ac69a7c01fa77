"""Shifted and flipped images, gathered from a resident dataset in one pass."""

import torch
from torch import Tensor

from .arrays import take
from .autotune import fits_memory
from .loader import TrainData


def shift_and_flip(
    pixels: Tensor, shifts: Tensor, flipped: Tensor | None, rows: Tensor | None = None
) -> Tensor:
    """Images shifted by `shifts` (batch, 2) int64 up and left, and flipped if `flipped` (batch,).

    Takes the images at `rows` of `pixels`, or all, in one gather. Borders are reflected.
    """
    device = pixels.device
    height, width, channels = pixels.shape[1:]
    if rows is None:
        rows = torch.arange(len(pixels), device=device)
    # 32-bit indices where they suffice: indices are most of what is read here.
    whole = torch.int32 if pixels.numel() < channels * 2**31 else torch.int64
    rows = rows.to(whole)
    shifts = shifts.to(whole)
    y = torch.arange(height, dtype=whole, device=device) + shifts[:, :1]  # (batch, height)
    x = torch.arange(width, dtype=whole, device=device) + shifts[:, 1:]  # (batch, width)
    if flipped is not None:
        x = torch.where(flipped[:, None], width - 1 - x, x)
    y, x = rows[:, None] * height + reflect(y, height), reflect(x, width)
    indices = (y * width)[:, :, None] + x[:, None, :]
    # One flat index is 3.5 x faster on a CPU than three.
    shifted = take(pixels.reshape(-1, channels), indices.flatten())
    return shifted.view(len(rows), height, width, channels)


class Windows:
    """`shift_and_flip` for a dataset resident in CPU memory: copies whole rows of pixels.

    It stores all rows with reflected borders, flipped too, so that each row of a shifted image is
    contiguous: 3 x faster than a gather of pixels, for 2.5 x the memory.
    """

    def __init__(self, pixels: Tensor, pad: int) -> None:
        """Of `pixels`, (count, height, width, channels), for shifts of up to `pad`."""
        count, self.height, self.width, self.channels = pixels.shape
        self.pad = pad
        self.padded_width = self.width + 2 * pad
        columns = reflect(torch.arange(-pad, self.width + pad), self.width)
        padded = pixels.new_empty((2, count, self.height, self.padded_width, self.channels))
        for side, order in zip(padded, (columns, columns.flip(0)), strict=True):
            take(pixels, order, dim=2, out=side)
        self.flipped_from = count * self.height  # the row at which the flipped ones begin
        length = self.channels * self.width
        # Overlapping windows: one begins at each pixel.
        self.rows = padded.view(-1).as_strided(
            (padded.numel() // self.channels - self.width + 1, length), (self.channels, 1)
        )

    @staticmethod
    def serve(data: TrainData, pad: int) -> bool:
        """Whether to use it: the images are in CPU memory, and there is enough of it."""
        if data.where != "device" or data.world.device.type != "cpu":
            return False
        _, _, width, _ = data.pixels.shape
        needed = 2 * data.pixels.nbytes * (width + 2 * pad) // width
        return fits_memory(needed, data.world.device, data.world)

    def __call__(self, numbers: Tensor, shifts: Tensor, flipped: Tensor | None) -> Tensor:
        """The images `numbers` (batch,), shifted and flipped: (batch, height, width, channels)."""
        y = reflect(torch.arange(self.height) + shifts[:, :1], self.height)  # (batch, height)
        rows = numbers[:, None] * self.height + y
        x = self.pad + shifts[:, 1:]
        if flipped is not None:
            rows = rows + flipped[:, None] * self.flipped_from
        shifted = take(self.rows, (rows * self.padded_width + x).flatten())
        return shifted.view(len(numbers), self.height, self.width, self.channels)


def reflect(index: Tensor, count: int) -> Tensor:
    """Indices outside 0 .. count - 1 reflected into that range, without repeating the border."""
    return (count - 1) - ((count - 1) - index.abs()).abs()
