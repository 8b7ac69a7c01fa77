"""Batches of images on the device, from memory or from files.

Resident images are one tensor of whole numbers, and a batch is a gather. Streamed images are
decoded by worker processes for every batch. Either way the step alone decides which images a batch
has: `batches(start, stop)` can start at any step, whatever the number of processes and workers.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..config import Config, DataConfig, ModelConfig, RunConfig
from ..extensions import chained
from ..runtime import seeding
from ..runtime.distributed import World
from ..runtime.phases import phase
from .arrays import take
from .autotune import (
    check_batch_size,
    choose_where,
    common_side,
    fits_memory,
    open_loader,
    who_crops,
)
from .batch import Batch, prefetched
from .samples import LEFT_OUT, Samples, load, load_shared
from .shared_memory import HostBatch
from .splits import MeanStd, load_spread, open_split

MOST_IMAGES = 1024  # that are evaluated at once, unless a caller says how many


class TrainData:
    """The training images, in an order that depends on the seed and the epoch alone."""

    def __init__(self, config: Config, world: World, mean_std: MeanStd | None = None) -> None:
        """Open the dataset, and load it into memory if it is to be resident.

        `mean_std` is by what to normalize, if not by the dataset's own: see `open_split`.

        Raises:
            UserError: if the images or the batch size are unusable.
            FaultError: if too many resident images are unreadable.
        """
        data = config.data
        augment = config.augment
        self.data = data
        self.run = config.run
        self.world = world
        self.seed = config.seed
        self.source, self.note = open_split(
            data, "train", world, self.run.dir, task=config.model.task, mean_std=mean_std
        )
        self.batch_size = data.batch_size
        check_batch_size(data.batch_size, len(self.source), world.size, config.optim.accumulate)
        self.steps_per_epoch = len(self.source) // self.batch_size
        self.total_steps = self.steps_in(config.epochs) if config.epochs else 0
        self.where, self.reason = choose_where(data, augment.crop, self.source, world)
        # The device on which batches are gathered.
        self.home = world.device if self.where == "device" else torch.device("cpu")
        self.cropper = who_crops(augment.crop, self.where)
        if self.where == "stream":
            crops = augment if self.cropper == "workers" else None
            samples = Samples(self.source, data, config.seed, crops)
            self.loader, why = open_loader(samples, data, world, self.note, self.run)
            self.workers = self.loader.num_workers
            self.data = replace(data, workers=self.workers)  # evaluation has as many
            self.reason += why
        else:
            # The device cuts random boxes from whole images, if these are equal squares.
            side = (self.cropper == "device" and common_side(self.source)) or data.image_size
            pixels, bad = load_shared(self.source, replace(data, image_size=side), self.note, world)
            self.pixels = pixels.to(self.home)
            labels = self.source.labels.clone()
            labels[bad] = LEFT_OUT
            self.labels = labels.to(self.home)
        self.weights = self.image_weights()
        self.epoch = -1  # of the last step
        self.orders = (torch.empty(0), torch.empty(0))
        self.waited_seconds = 0.0  # time that the training loop waited for batches

    def __len__(self) -> int:
        return len(self.source)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.source.classes)

    def image_weights(self) -> Tensor | None:
        """How much each image counts in the loss, (count,) float32 of mean 1; None: all alike."""
        weights = self.source.weights
        weights = chained("order", "change_weights", weights, self.data, self.source)
        return weights if weights is None else (weights / weights.mean()).to(self.world.device)

    def steps_in(self, epochs: float) -> int:
        """The number of steps in `epochs`, at least 1."""
        return max(1, round(epochs * self.steps_per_epoch))

    def indices_at(self, step: int) -> Tensor:
        """This rank's images of batch `step`: (batch,) int64."""
        return self._part(self._orders(step // self.steps_per_epoch)[0], step)

    def places(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Epoch and images of each step in `range(start, stop)`.

        Images that an epoch repeats have numbers of their own: see `seeding.images_of`.
        """
        for step in range(start, stop):
            epoch = step // self.steps_per_epoch
            yield epoch, self._part(self._orders(epoch)[1], step)

    def sample(self, count: int) -> Tensor:
        """Up to `count` evenly spread images, preprocessed for evaluation, equal on all ranks.

        (count, channels, size, size) uint8 or uint16, channels_last, on the device.
        """
        pixels = load_spread(self.source, count, self.data, self.note, self.world)
        return pixels.to(self.world.device).permute(0, 3, 1, 2)

    def open_split(self, split: str, batch_size: int = 0) -> "EvalData":
        """The images of a split for evaluation, as these are for training: see `EvalData`."""
        how = {"task": self.source.task, "mean_std": (self.source.mean, self.source.std)}
        return EvalData(self.data, split, self.world, self.run, batch_size, **how)

    def _part(self, order: Tensor, step: int) -> Tensor:
        """This rank's part of batch `step` in the order of its epoch."""
        first = step % self.steps_per_epoch * self.batch_size
        part = self.world.local_slice(self.batch_size)
        return order[first + part.start : first + part.stop]

    def _orders(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The order of the epoch, and the same with distinct numbers for repeated images."""
        if self.epoch != epoch:
            place = self.seed, epoch
            drawn = seeding.order_at(*place, len(self.source))
            drawn = chained("order", "change_order", drawn, self.data, self.source, *place)
            order = seeding.images_of(drawn, len(self))
            is_cuda = self.home.type == "cuda"  # Apple's GPUs would copy what is freed by then
            order = order.pin_memory() if is_cuda else order
            self.epoch = epoch
            self.orders = (order.to(self.home, non_blocking=is_cuda), drawn)
        return self.orders

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """This rank's part of each global batch in `range(start, stop)`.

        Raises:
            UserError: if an image is unreadable and `data.on_bad_image` is stop.
            FaultError: if too many images are unreadable, or a worker was killed or hangs.
        """
        if self.where == "device":
            batches = map(self._resident, range(start, stop))
        elif self.where == "host":
            batches = prefetched(map(self._gathered, range(start, stop)), self.world)
        else:
            batches = prefetched(self.loader.begin(self.places(start, stop)), self.world)
        while True:
            began = time.perf_counter()
            with phase("wait for data"):
                batch = next(batches, None)
            self.waited_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _resident(self, step: int) -> Batch:
        """Indices only: augmentation gathers in the pass in which it moves pixels."""
        indices = self.indices_at(step)
        return Batch(self.pixels, self.labels.index_select(0, indices), indices, rows=indices)

    def _gathered(self, step: int) -> HostBatch:
        """A gather in pinned host memory."""
        indices = self.indices_at(step)
        pin = self.world.device.type == "cuda"
        shape = (len(indices), *self.pixels.shape[1:])
        images = torch.empty(shape, dtype=self.pixels.dtype, pin_memory=pin)
        take(self.pixels, indices, out=images)
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
        *,
        task: str = ModelConfig.task,
        mean_std: MeanStd | None = None,
        classes: tuple[str, ...] = (),
    ) -> None:
        """Open the dataset; the first pass loads its images or starts its workers.

        Images are `data.eval_size` pixels wide, in batches of `batch_size`, by default this rank's
        share of `data.batch_size`, at most 1,024. `mean_std` and `classes` are as `open_split` has.

        Raises:
            UserError: if the split is empty, or there is no memory for a batch.
        """
        data = replace(data, image_size=data.eval_size)
        run = run or RunConfig()
        self.data = data
        self.world = world
        self.batch_size = batch_size or min(MOST_IMAGES, max(1, data.batch_size // world.size))
        self.source, self.note = open_split(
            data, split, world, run.dir, task=task, mean_std=mean_std, classes=classes
        )
        self.indices = torch.arange(len(self.source))[world.rank :: world.size]
        self.labels = self.source.labels[self.indices].to(world.device)
        self.pixels: Tensor | None = None
        self.loader = None
        needed = len(self.indices) * data.image_size**2 * self.source.pixel_bytes
        if data.where == "stream" or not fits_memory(needed, world.device, world):
            data = replace(data, batch_size=self.batch_size * world.size)
            self.loader, _ = open_loader(Samples(self.source, data), data, world, self.note, run)

    def __len__(self) -> int:
        """The number of images over all ranks."""
        return len(self.source)

    def batches(self) -> Iterator[Batch]:
        """This rank's images in order; the last batch may be smaller.

        Raises:
            UserError: if an image is unreadable and `data.on_bad_image` is stop.
            FaultError: if too many images are unreadable, or a worker was killed or hangs.
        """
        if self.loader is not None:
            places = ((0, part) for part in self.indices.split(self.batch_size) if len(part))
            for batch in prefetched(self.loader.begin(places), self.world):
                yield Batch(batch.pixels, batch.labels)
            return
        if self.pixels is None:  # their crop is always the same: they are decoded only once
            with torch.inference_mode(False):  # it does not reach the threads that fill a tensor
                pixels, bad = load(self.source, self.indices, self.data, self.note, self.world)
                self.labels[bad.to(self.world.device)] = LEFT_OUT
            self.pixels = pixels.to(self.world.device)
        for start in range(0, len(self.indices), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield Batch(self.pixels[part], self.labels[part])

    def close(self) -> None:
        """End the workers, if there are any."""
        if self.loader is not None:
            self.loader.close()
