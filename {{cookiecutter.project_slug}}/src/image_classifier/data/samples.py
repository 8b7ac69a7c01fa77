"""Single images as training and evaluation see them.

What becomes of an image depends on the seed, the epoch and its number alone, so any number of
workers makes the same.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..config import AugmentConfig, DataConfig
from ..runtime import seeding
from ..runtime.distributed import World
from ..runtime.machine import num_cores
from .arrays import take
from .crops import BOX_DRAWS, crop, fit_square, place_box, random_sides
from .datasets.source import Source
from .decode import BadImageError

LOADED_TOGETHER = 64  # images that a thread decodes between two looks at its queue
PROBED = 17  # images that tell how many threads are of use
LOCKED_SECONDS = 1e-4  # of an image's, in which a thread holds the interpreter's lock, roughly
SHARED_TOGETHER = 4096  # images that ranks exchange at once
LEFT_OUT = -1  # the label of an image that can't be read, which the loss and the scores ignore
# Is called with the index of an unreadable image and the reason; it may raise.
Note = Callable[[int, str], object]


class Samples:
    """Single images as training sees them: decoded, cropped to the model's size, in whole numbers.

    The numbers are uint8, or uint16 where the source has 16 bits.
    """

    def __init__(
        self, source: Source, data: DataConfig, seed: int = 0, crops: AugmentConfig | None = None
    ) -> None:
        """Samples of the size in `data`, cropped and flipped as `crops` says if it is given."""
        self.source = source
        self.size = data.image_size
        self.seed = seed
        self.fit = partial(fit_square, fit=data.fit, mean=source.mean)
        # Where workers crop they flip too; else the device does both, to all images of a batch.
        self.min_area, self.flip = (crops.min_scale, crops.flip) if crops else (None, "none")
        alternates = self.flip == "alternating"
        self.starts_flipped = seeding.sides_at(seed, len(source)).numpy() if alternates else None

    def fill(self, out: Tensor, epoch: int, indices: np.ndarray) -> dict[int, str]:
        """Write the images at `indices` as `epoch` has them to `out`, which `Source.empty` made.

        An index is that of an order, in which images may repeat: see `seeding.images_of`. Each time
        an image is cropped in another way.

        Returns, by row, why an image can't be read; that row is black.
        """
        unreadable: dict[int, str] = {}
        self.source.prefetch(seeding.images_of(indices, len(self.source)))
        if self.min_area is not None:
            key = (seeding.SAMPLE, self.seed, epoch)
            draws = torch.from_numpy(seeding.draws_at(*key, indices=indices, count=BOX_DRAWS + 1))
            box_sizes = random_sides(draws[:, 2:-1], self.min_area).tolist()
            corners = draws[:, :2].tolist()
            flips = draws[:, -1].tolist()
        for row, (drawn, place) in enumerate(zip(indices.tolist(), out, strict=True)):
            index = seeding.images_of(drawn, len(self.source))
            try:
                pixels = self.source.read(index, self.seed, epoch, drawn)
            except BadImageError as error:
                unreadable[row] = error.reason
                place.zero_()
                continue
            if self.min_area is None:
                self.fit(pixels, place)
            else:
                box = place_box(box_sizes[row], corners[row], *pixels.shape[:2])
                crop(pixels, box, place, self.is_mirrored(index, epoch, flips[row]))
        return unreadable

    def is_mirrored(self, index: int, epoch: int, draw: float) -> bool:
        """Whether an image is mirrored in `epoch`; `draw` is from 0 to 1."""
        if self.starts_flipped is not None:
            return bool(self.starts_flipped[index]) != epoch % 2
        return self.flip == "random" and draw < 0.5


def load_shared(
    source: Source, data: DataConfig, note: Note, world: World
) -> tuple[Tensor, Tensor]:
    """All images, of which each rank decodes its part, and which of them are unreadable: `load`."""
    numbers = torch.arange(len(source))
    if source.pixels is not None or world.size == 1:
        return load(source, numbers, data, note, world)
    pixels = source.empty(len(source), data.image_size).zero_()
    bad = torch.zeros(len(source), dtype=torch.int32)
    own = slice(world.rank, None, world.size)
    parts = (tensor.split(SHARED_TOGETHER) for tensor in (numbers, pixels, bad))
    for part, images, is_bad in zip(*parts, strict=True):
        images[own], is_bad[own] = load(source, part[own], data, note, world)
        content = images.view(torch.uint8)  # gloo adds no numbers of 16 bits
        content.copy_(world.all_reduce_sum(content.to(world.device)))
    return pixels, world.all_reduce_sum(bad.to(world.device)).cpu().bool()


def load(
    source: Source, indices: Tensor, data: DataConfig, note: Note, world: World
) -> tuple[Tensor, Tensor]:
    """The images at `indices`, made squares as `data` says: (count, side, side, channels).

    And which are unreadable, (count,) bool: these are black, and `note` is called for each.
    """
    side = data.image_size
    bad = torch.zeros(len(indices), dtype=torch.bool)
    if source.pixels is not None and source.pixels.shape[1:3] == (side, side):
        whole = len(indices) == len(source)
        return source.pixels if whole else take(source.pixels, indices), bad
    pixels = source.empty(len(indices), side)
    samples = Samples(source, data)

    def fill(first: int, stop: int) -> float:
        began = time.perf_counter()
        part = slice(first, stop)
        for row, reason in samples.fill(pixels[part], 0, indices[part].numpy()).items():
            note(int(indices[first + row]), reason)
            bad[first + row] = True
        return time.perf_counter() - began

    # Decoders do not hold the interpreter's lock, so threads do; but no more of them than find it
    # free. They would share what draws random numbers.
    fill(0, 1)  # imports decoders
    busy = fill(1, PROBED) / (PROBED - 1) / LOCKED_SECONDS
    most = 1 if source.is_random else min(num_cores() // world.local_size, round(busy))
    firsts = range(PROBED, len(indices), LOADED_TOGETHER)
    with ThreadPoolExecutor(max(1, most)) as threads:
        list(threads.map(lambda first: fill(first, first + LOADED_TOGETHER), firsts))
    return pixels, bad
