"""Batches of images on the device, from memory or from files.

Resident images are one uint8 tensor, and a batch is a gather. Streamed images are decoded by
worker processes for every batch anew. Either way the place in the run alone decides which images
a batch has: `batches(start, stop)` can start anywhere, and yields the same on any number of
processes and workers.
"""

import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..config import Config, DataConfig, RunConfig
from ..errors import UserError
from ..runtime import seeding
from ..runtime.distributed import World
from ..runtime.profiler import phase
from .autotune import (
    check_batch_size,
    choose_depth,
    choose_where,
    choose_workers,
    common_side,
    fits_device,
)
from .bad_images import BadImages
from .datasets import open_dataset
from .datasets.source import Source
from .resident import load, load_shared
from .samples import LEFT_OUT, Samples
from .shared_memory import HostBatch, SharedMemoryLoader


@dataclass
class Batch:
    """Images and their labels; a batch of training images is this rank's part of the global one."""

    pixels: Tensor  # (count, height, width, 3) uint8: the images, or all that a dataset has
    labels: Tensor  # (batch,) int64; LEFT_OUT of an image that can't be read
    indices: Tensor | None = None  # (batch,) int64, their numbers; only of training images
    rows: Tensor | None = None  # (batch,) int64, where in `pixels` they are, if it has others too

    @property
    def images(self) -> Tensor:
        """(batch, 3, height, width) uint8, channels_last."""
        pixels = self.pixels if self.rows is None else self.pixels.index_select(0, self.rows)
        return as_nchw(pixels)


class TrainData:
    """The training images, in an order that depends on the seed and the epoch alone."""

    def __init__(self, config: Config, world: World) -> None:
        """Open the dataset, and load it into memory if it is to be resident.

        Raises:
            UserError: if the images or the batch size are unusable.
            FaultError: if too many images that are to be in memory can't be read.
        """
        data, augment = config.data, config.augment
        self.data, self.world, self.seed = data, world, config.seed
        self.source = open_source(data, "train", world)
        self.bad_images = BadImages(self.source, data, config.run.dir)
        self.batch_size = data.batch_size
        check_batch_size(data.batch_size, len(self.source), world.size, config.optim.accumulate)
        self.steps_per_epoch = len(self.source) // self.batch_size
        self.total_steps = self.steps_in(config.epochs)
        side = common_side(self.source)
        self.where, self.reason = choose_where(data, augment, self.source, side, world)
        # Where batches are gathered, and so where the order of an epoch is kept.
        self.home = world.device if self.where == "device" else torch.device("cpu")
        self.crops_in_workers = augment.crop == "resized" and self.where == "stream"
        if self.where == "stream":
            samples = Samples(self.source, data, config.seed, augment)
            self.workers, why = choose_workers(data, samples, world)
            workers = f"{self.workers} workers" if self.workers != 1 else "1 worker"
            self.reason += f"; {workers}: {why}"
            depth, why = choose_depth(data, self.workers, world)
            self.reason += why
            self.loader = SharedMemoryLoader(
                samples,
                data.batch_size // world.size,
                self.workers,
                depth,
                pins(world),
                note=self.bad_images.note,
                timeout_seconds=config.run.timeout_seconds,
            )
        else:
            side = (augment.crop == "resized" and side) or data.image_size
            pixels, bad = load_shared(self.source, side, world, self.bad_images.note)
            self.pixels = pixels.to(self.home)
            self.labels = self.source.labels.masked_fill(bad, LEFT_OUT).to(self.home)
        self.order: tuple[int, Tensor] | None = None  # of the epoch that is under way
        self.drawn = torch.empty(0)  # the same, with other numbers for images that come again
        self.warnings: list[str] = []  # about batches
        self.waited_seconds = 0.0  # that the loop waited for batches

    def __len__(self) -> int:
        """How many training images there are."""
        return len(self.source)

    @property
    def num_classes(self) -> int:
        """How many classes the images have."""
        return len(self.source.classes)

    @property
    def class_weights(self) -> Tensor | None:
        """How much the loss of an image of each class counts: (classes,) float32; None: as all.

        In inverse proportion to the images of the class, and 1 in the mean over all images.
        """
        if self.data.balance != "loss":
            return None
        sizes = self.source.labels.bincount(minlength=self.num_classes)
        weights = len(self) / (sizes.count_nonzero() * sizes.clamp(min=1))
        return torch.where(sizes > 0, weights, 0.0).to(self.world.device)

    @property
    def ceiling(self) -> float | None:
        """Images per second that this rank's workers could make; None if it is not theirs to do."""
        if self.where != "stream" or not self.loader.num_filled:
            return None
        return max(1, self.workers) * self.loader.num_filled / self.loader.busy_seconds

    def steps_in(self, epochs: float) -> int:
        """How many steps `epochs` take; at least one."""
        return max(1, round(epochs * self.steps_per_epoch))

    def global_indices_at(self, step: int) -> Tensor:
        """The images of batch `step` over all ranks: (data.batch_size,) int64."""
        return self._part(self._order(step // self.steps_per_epoch), step)

    def indices_at(self, step: int) -> Tensor:
        """This rank's images of batch `step`: (batch,) int64."""
        return self.global_indices_at(step)[self.world.local_slice(self.batch_size)]

    def places(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Epoch and images of each step from `start` up to, not including, `stop`.

        The numbers of images that come again in an epoch are those of `balanced_order_at`.
        """
        for step in range(start, stop):
            epoch = step // self.steps_per_epoch
            self._order(epoch)
            yield epoch, self._part(self.drawn, step)[self.world.local_slice(self.batch_size)]

    def sample(self, count: int) -> Tensor:
        """Up to `count` images spread evenly, as evaluation sees them, the same on every rank.

        (count, 3, size, size) uint8, channels_last, on the device.
        """
        count = min(count, len(self))
        numbers = torch.arange(count) * len(self) // count
        size, note = self.data.image_size, self.bad_images.note
        pixels, bad = load(self.source, numbers, size, self.world, note)
        pixels = pixels[~bad] if bad.any() else pixels
        return as_nchw(pixels.to(self.world.device))

    def _part(self, order: Tensor, step: int) -> Tensor:
        """Batch `step` in the order of its epoch."""
        k = step % self.steps_per_epoch
        return order[k * self.batch_size : (k + 1) * self.batch_size]

    def _order(self, epoch: int) -> Tensor:
        """The order of the epoch, kept for its steps."""
        if self.order is None or self.order[0] != epoch:
            if self.data.balance == "sampling":
                self.drawn = seeding.balanced_order_at(self.seed, epoch, self.source.labels)
                order = self.drawn % len(self)
            else:
                self.drawn = order = seeding.order_at(self.seed, epoch, len(self.source))
            order = order.pin_memory() if self.home.type == "cuda" else order
            self.order = epoch, order.to(self.home, non_blocking=True)
        return self.order[1]

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """This rank's part of each global batch from step `start` up to, not including, `stop`.

        Raises:
            UserError: if an image can't be read and such are not to be skipped.
            FaultError: if too many can't be read, or a data worker was killed or hangs.
        """
        steps = range(start, stop)
        if self.where == "stream":
            host_batches: Iterable[HostBatch] = self.loader.batches(self.places(start, stop))
            batches: Iterator[Batch] = CopyAhead(host_batches, self.world, self.warnings)
        elif self.where == "host":
            batches = CopyAhead(map(self._gathered, steps), self.world, self.warnings)
        else:
            batches = map(self._resident, steps)
        while True:
            began = time.perf_counter()
            with phase("wait for data"):
                batch = next(batches, None)
            self.waited_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _resident(self, step: int) -> Batch:
        """No more than indices: augmentation gathers, in the pass in which it moves pixels."""
        indices = self.indices_at(step)
        return Batch(self.pixels, self.labels[indices], indices, rows=indices)

    def _gathered(self, step: int) -> HostBatch:
        """A gather in pinned host memory."""
        indices, pin = self.indices_at(step), pins(self.world)
        shape = (len(indices), *self.pixels.shape[1:])
        images = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
        torch.index_select(self.pixels, 0, indices, out=images)
        labels = self.labels[indices]
        return images, *((labels.pin_memory(), indices.pin_memory()) if pin else (labels, indices))

    def close(self) -> None:
        """End the workers."""
        if self.where == "stream":
            self.loader.close()


class EvalData:
    """The images of a split, each once over all ranks: rank r has images r, r + size, ..."""

    def __init__(
        self,
        data: DataConfig,
        split: str,
        world: World,
        run: RunConfig | None = None,
        batch_size: int = 0,
    ) -> None:
        """Open the dataset; its images are loaded when they are first asked for.

        They are `data.eval_size` pixels wide and come in batches of `batch_size`, by default this
        rank's share of `data.batch_size`.

        Raises:
            UserError: if there are none, or no memory for a batch of them.
        """
        data = replace(data, image_size=data.eval_size)
        self.data, self.world, self.run = data, world, run or RunConfig()
        self.batch_size = batch_size or max(1, data.batch_size // world.size)
        self.source = open_source(data, split, world)
        self.bad_images = BadImages(self.source, data, self.run.dir)
        if len(self.source) == 0:
            raise UserError(f"{split}: there are no images to evaluate on")
        self.indices = torch.arange(len(self.source))[world.rank :: world.size]
        self.labels = self.source.labels[self.indices].to(world.device)
        self.pixels: Tensor | None = None
        self.loader: SharedMemoryLoader | None = None  # once it was needed, to the end of the run
        needed = len(self.indices) * data.image_size**2 * 3
        self.is_resident = fits_device(needed, world) and data.where != "stream"
        if not self.is_resident:  # asked now, as there may be less memory later
            workers = 1 if data.workers == "auto" else data.workers
            self.depth, _ = choose_depth(data, workers, world)

    def __len__(self) -> int:
        """How many images there are, over all ranks."""
        return len(self.source)

    def batches(self) -> Iterator[Batch]:
        """This rank's images in order; the last batch may be smaller.

        Raises:
            UserError: if one can't be read and such are not to be skipped.
            FaultError: if too many can't be read, or a data worker was ended.
        """
        size = self.batch_size
        if self.is_resident:
            # Their crop is always the same, so even photographs need decoding only once.
            if self.pixels is None:
                side, note = self.data.image_size, self.bad_images.note
                with torch.inference_mode(False):  # which threads that fill a tensor are not in
                    pixels, bad = load(self.source, self.indices, side, self.world, note)
                    self.labels.masked_fill_(bad.to(self.world.device), LEFT_OUT)
                self.pixels = pixels.to(self.world.device)
            for start in range(0, len(self.indices), size):
                part = slice(start, start + size)
                yield Batch(self.pixels[part], self.labels[part])
            return
        if self.loader is None:
            samples = Samples(self.source, self.data)
            workers, _ = choose_workers(self.data, samples, self.world)
            self.loader = SharedMemoryLoader(
                samples,
                size,
                workers,
                self.depth,
                pins(self.world),
                note=self.bad_images.note,
                timeout_seconds=self.run.timeout_seconds,
            )
        places = ((0, part) for part in self.indices.split(size) if len(part))
        for batch in CopyAhead(self.loader.batches(places), self.world):
            yield Batch(batch.pixels, batch.labels)

    def close(self) -> None:
        """End the workers, if there are any."""
        if self.loader is not None:
            self.loader.close()


def open_source(data: DataConfig, split: str, world: World) -> Source:
    """A split of the dataset; one process opens it before the others, as it may download it."""
    with world.local_main_first():
        return open_dataset(data, split)


class CopyAhead:
    """Batches on the device, each copied there while the one before it is computed with."""

    def __init__(
        self, batches: Iterable[HostBatch], world: World, warnings: list[str] | None = None
    ) -> None:
        """Copy `batches`, each of which may be overwritten when the next is asked for.

        `warnings` gets what is said of them.
        """
        self.batches, self.world = iter(batches), world
        self.warnings = [] if warnings is None else warnings
        self.ahead: tuple[Tensor, ...] | None = None
        if world.device.type == "cuda":
            self.side_stream = torch.cuda.Stream(world.device)
            self.copied = torch.cuda.Event()
        self.has_begun = False

    def __iter__(self) -> "CopyAhead":
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch; on a GPU the copy of the one after it has then begun."""
        device = self.world.device
        if device.type != "cuda":
            return Batch(*(tensor.to(device) for tensor in next(self.batches)))
        if not self.has_begun:
            self.has_begun, self.ahead = True, self.copy_next()
        if (here := self.ahead) is None:
            raise StopIteration
        # Computing waits for the copy; and the memory, which belongs to the side stream, is not
        # used for another copy before computing is through with it.
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(self.side_stream)
        for tensor in here:
            tensor.record_stream(computing)
        # The next batch may be put where this one was. Its copy began a step ago, and is through.
        self.copied.synchronize()
        self.ahead = self.copy_next()
        return Batch(*here)

    def copy_next(self) -> tuple[Tensor, ...] | None:
        """Begin to copy the next batch; None after the last."""
        host = next(self.batches, None)
        if host is None:
            return None
        if self.ahead is None and not all(tensor.is_pinned() for tensor in host):
            self.warnings.append(say_not_pinned(self.world))
        with torch.cuda.stream(self.side_stream), phase("copy"):
            copies = tuple(tensor.to(self.world.device, non_blocking=True) for tensor in host)
            self.copied.record()
        return copies


@cache
def say_not_pinned(world: World) -> str:
    """Say, once in a run, that batches are not page-locked: `non_blocking` then promises nothing.

    Returns what is said.

    https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_limited = limit != resource.RLIM_INFINITY
    why = f"raise `ulimit -l`, now {limit // 1024:,} KB" if is_limited else "see `pins`"
    warning = f"batches are not page-locked: the GPU waits for each to be copied; {why}"
    if world.is_main:
        print(f"warning: {warning}")
    return warning


def pins(world: World) -> bool:
    """Whether batches go to page-locked memory, from which a GPU copies without the CPU's help."""
    return world.device.type == "cuda"


def as_nchw(pixels: Tensor) -> Tensor:
    """(batch, height, width, 3) seen as (batch, 3, height, width): channels_last, nothing moves."""
    return pixels.permute(0, 3, 1, 2)
