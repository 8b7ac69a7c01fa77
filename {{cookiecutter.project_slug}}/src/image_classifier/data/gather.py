"""Shifted and flipped images, gathered from a resident dataset in one pass."""

import torch
from torch import Tensor

from .arrays import take


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
    steps = torch.arange(max(height, width), dtype=whole, device=device)
    y = steps[:height] + shifts[:, :1]  # (batch, height)
    x = steps[:width] + shifts[:, 1:]  # (batch, width)
    if flipped is not None:
        x = torch.where(flipped[:, None], width - 1 - x, x)
    lines = torch.add(reflect(y, height), rows[:, None], alpha=height)
    indices = torch.add(reflect(x, width)[:, None, :], lines[:, :, None], alpha=width)
    # One flat index is 3.5 x faster on a CPU than three.
    shifted = take(pixels.reshape(-1, channels), indices.flatten())
    return shifted.view(len(rows), height, width, channels)


def reflect(index: Tensor, count: int) -> Tensor:
    """Indices outside 0 .. count - 1 reflected into that range, without repeating the border."""
    distance = index.abs()
    return torch.minimum(distance, 2 * (count - 1) - distance)
