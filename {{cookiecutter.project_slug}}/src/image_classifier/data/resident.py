"""Images decoded once, to stay in memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..runtime.machine import num_cores
from .datasets.source import Source
from .samples import Samples

LOADED_TOGETHER = 64  # images that a thread decodes between two looks at its queue


def load(
    source: Source, indices: Tensor, side: int, note: Callable[[int, str], object], sharers: int
) -> tuple[Tensor, Tensor]:
    """The images at `indices`, their middle squares scaled: (count, side, side, 3) uint8.

    And which are unreadable, (count,) bool: they are black, and `note` is called with the index of
    each and the reason; it may raise. `sharers` is the number of processes that share the cores.
    """
    bad = torch.zeros(len(indices), dtype=torch.bool)
    if source.pixels is not None and source.pixels.shape[1:3] == (side, side):
        whole = len(indices) == len(source)
        return source.pixels if whole else source.pixels[indices], bad
    pixels = torch.empty((len(indices), side, side, 3), dtype=torch.uint8)
    samples = Samples(source, side)

    def fill(part: Tensor, is_bad: Tensor, numbers: Tensor) -> None:
        for row, reason in samples.fill(part, 0, numbers.numpy()).items():
            note(int(numbers[row]), reason)
            is_bad[row] = True

    # Decoders do not hold the interpreter's lock, so threads do; but they would share what draws
    # random numbers.
    num_threads = 1 if source.is_random else max(1, num_cores() // sharers)
    with ThreadPoolExecutor(num_threads) as threads:
        parts = (tensor.split(LOADED_TOGETHER) for tensor in (pixels, bad, indices))
        list(threads.map(fill, *parts))
    return pixels, bad
