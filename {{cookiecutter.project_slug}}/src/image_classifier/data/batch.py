"""A batch of images on the device, and how it gets there."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.distributed import World
from ..runtime.phases import phase
from .arrays import take
from .shared_memory import HostBatch, refusals


@dataclass
class Batch:
    """Images and labels; a training batch is this rank's part of the global batch."""

    pixels: Tensor  # (count, height, width, channels) uint8 or uint16: the images, or all images
    labels: Tensor  # (batch,) int64, or (batch, classes) int8 if an image may have several:
    # LEFT_OUT for an unreadable image
    indices: Tensor | None = None  # (batch,) int64: numbers of training images
    rows: Tensor | None = None  # (batch,) int64: rows of `pixels`, if it has all images

    @property
    def images(self) -> Tensor:
        """(batch, channels, height, width) uint8 or uint16, channels_last."""
        pixels = self.pixels if self.rows is None else take(self.pixels, self.rows)
        return pixels.permute(0, 3, 1, 2)


class Augmented(NamedTuple):
    """This rank's part of a batch, or of a micro-batch, as the model learns from it."""

    images: Tensor  # (batch, channels, size, size) float32
    labels: Tensor  # as `Batch` has them; with mixup or CutMix (batch, classes) float32 shares, of
    # several labels -1 where one is unknown
    weights: Tensor | None = None  # (batch,) float32: how much each image counts; None: all alike

    def part(self, start: int, stop: int) -> "Augmented":
        """Images `start` to `stop`, which is not in it."""
        return Augmented(*(None if one is None else one[start:stop] for one in self))


def prefetched(host_batches: Iterator[HostBatch], world: World) -> Iterator[Batch]:
    """Batches on the device; a GPU copies each batch while it computes with the one before.

    Those in host memory may be overwritten when the next is asked for.
    """
    device = world.device
    if device.type != "cuda":
        for host in host_batches:
            yield Batch(*(tensor.to(device) for tensor in host))
        return
    side_stream = copy_stream(device)
    copied = torch.cuda.Event()
    ahead: tuple[Tensor, ...] | None = None  # the next batch, on the GPU

    def copy_next() -> tuple[Tensor, ...] | None:
        """Begin to copy the next batch in the side stream; None after the last."""
        if (host := next(host_batches, None)) is None:
            return None
        if ahead is None and not all(tensor.is_pinned() for tensor in host):
            warn_not_pinned(world)
        with torch.cuda.stream(side_stream), phase("copy"):
            copies = tuple(tensor.to(device, non_blocking=True) for tensor in host)
            copied.record()
        return copies

    ahead = copy_next()
    while (here := ahead) is not None:
        # Computing waits for the copy; and the memory, which belongs to the side stream, is not
        # used for another copy before computing is through with it.
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(side_stream)
        for tensor in here:
            tensor.record_stream(computing)
        # The next batch may overwrite this one in host memory. This copy began a step ago.
        copied.synchronize()
        ahead = copy_next()
        yield Batch(*here)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all copies to a GPU: torch keeps freed memory for each stream on its own.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
    """
    return torch.cuda.Stream(device)


@cache
def warn_not_pinned(world: World) -> None:
    """Warn, once in a run, that batches are not page-locked, so no copy overlaps computing.

    https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
    """
    if world.is_main:
        why = f" ({refusals[-1]})" if refusals else ""
        print(f"warning: batches are not page-locked{why}: the GPU waits for each copy")
