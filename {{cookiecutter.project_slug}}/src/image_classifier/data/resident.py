"""Images decoded once, to stay in memory; each rank decodes its part of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..runtime.distributed import World
from ..runtime.machine import num_cores
from .crops import center_crop
from .datasets.source import Source
from .decode import BadImageError

LOADED_TOGETHER = 64  # images that a thread decodes between two looks at its queue
SHARED_TOGETHER = 4096  # images that ranks exchange at once


def load_shared(
    source: Source, side: int, world: World, note: Callable[[int, str], object]
) -> tuple[Tensor, Tensor]:
    """All images, of which each rank decodes its part, and which of them can't be read: `load`.

    Raises:
        UserError: if one can't be read and `note` refuses it.
        FaultError: if too many can't be read.
    """
    count = len(source)
    if source.pixels is not None or world.size == 1:
        return load(source, torch.arange(count), side, world, note)
    pixels = torch.empty((count, side, side, 3), dtype=torch.uint8)
    bad = torch.zeros(count, dtype=torch.int32)
    for numbers in torch.arange(count).split(SHARED_TOGETHER):
        shared = torch.zeros((len(numbers), side, side, 3), dtype=torch.uint8, device=world.device)
        own = numbers[world.rank :: world.size]
        mine, is_bad = load(source, own, side, world, note)
        bad[own] = is_bad.int()
        shared[world.rank :: world.size] = mine.to(world.device)
        pixels[numbers] = world.all_reduce_sum(shared).cpu()
    return pixels, world.all_reduce_sum(bad.to(world.device)).cpu().bool()


def load(
    source: Source,
    indices: Tensor,
    side: int,
    world: World,
    note: Callable[[int, str], object],
) -> tuple[Tensor, Tensor]:
    """The images at `indices`, their middle squares scaled: (count, side, side, 3) uint8.

    And which can't be read, (count,) bool: they are black, and `note` is told of them: the index
    and why. It may raise.

    Raises:
        UserError: if one can't be read and `note` refuses it.
        FaultError: if too many can't be read.
    """
    bad = torch.zeros(len(indices), dtype=torch.bool)
    if source.pixels is not None and source.pixels.shape[1:3] == (side, side):
        whole = len(indices) == len(source)
        return source.pixels if whole else source.pixels[indices], bad
    pixels = torch.empty((len(indices), side, side, 3), dtype=torch.uint8)

    def fill(part: Tensor, is_bad: Tensor, numbers: Tensor) -> None:
        for row, (place, number) in enumerate(zip(part, numbers.tolist(), strict=True)):
            try:
                center_crop(source.read(number), place)
            except BadImageError as error:
                note(number, error.reason)
                place.zero_()
                is_bad[row] = True

    # Decoders do not hold the interpreter's lock, so threads do; but they would share what draws
    # random numbers.
    num_threads = 1 if source.is_random else max(1, num_cores() // world.local_size)
    with ThreadPoolExecutor(num_threads) as threads:
        parts = (tensor.split(LOADED_TOGETHER) for tensor in (pixels, bad, indices))
        list(threads.map(fill, *parts))
    return pixels, bad
