"""Images that worker processes decode, crop and augment, anew for every batch.

What becomes of an image depends on the seed, the epoch and its number alone, so any number of
workers makes the same.
"""

import signal
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from . import seeding
from .config import AugmentConfig, DataConfig, UserError
from .datasets.source import Source
from .decode import centre_crop, crop, random_boxes
from .distributed import World
from .machine import num_cores

WORKER_TIMEOUT_SECONDS = 300  # without a batch, after which a worker counts as hung


class Samples(Dataset):
    """Single images as the workers make them: decoded, cropped to the model's size, uint8."""

    def __init__(self, source: Source, size: int, augment: AugmentConfig | None, seed: int) -> None:
        """Samples of side `size` pixels; augmented if `augment` is given."""
        self.source, self.size, self.augment, self.seed = source, size, augment, seed
        # Built before workers are forked: each would take seconds to import torchvision.
        self.policy = build_policy(augment.policy) if augment else None

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Image and label at `place`, which is (epoch, index): (size, size, 3) uint8, () int64."""
        epoch, index = place
        pixels, label = self.source.read(index), self.source.labels[index]
        if self.augment is None or self.augment.crop != "resized":
            pixels = centre_crop(pixels, self.size)
        else:
            generator = seeding.generator_at(seeding.SAMPLE, self.seed, epoch, index)
            draws = torch.rand((1, 4), generator=generator)
            height, width = pixels.shape[:2]
            boxes = random_boxes(draws, height, width, self.augment.min_area)
            pixels = crop(pixels, boxes[0], self.size)
        if self.policy is not None:
            with seeding.seeded(seeding.SAMPLE, self.seed, epoch, index, 1):
                pixels = self.policy(pixels.permute(2, 0, 1)).permute(1, 2, 0)
        return pixels.contiguous(), label


def stream(
    samples: Samples,
    places: Iterable[list[tuple[int, int]]],
    workers: int,
    data: DataConfig,
    world: World,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in host memory, pinned if a GPU is to copy them: (batch, size, size, 3), (batch,).

    Raises:
        UserError: if a worker met an image that can't be read.
    """
    loader = DataLoader(
        samples,
        batch_sampler=places,
        num_workers=workers,
        prefetch_factor=data.prefetch_batches if workers else None,
        pin_memory=pins(world),
        timeout=WORKER_TIMEOUT_SECONDS if workers else 0,
        worker_init_fn=start_worker,
    )
    try:
        yield from loader
    except UserError as error:
        # A worker's error arrives with its whole traceback as text; the last line is what it said.
        raise UserError(str(error).strip().splitlines()[-1].split("UserError: ")[-1]) from None


def start_worker(_: int) -> None:
    """Leave Ctrl-C to the main process, which says what was saved; the workers end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def pins(world: World) -> bool:
    """Whether batches go to page-locked memory, from which a GPU copies without the CPU's help."""
    return world.device.type == "cuda"


def num_workers(data: DataConfig, world: World) -> int:
    """Workers per training process: as asked for, else its cores, or half if the model needs them.

    On a CPU the model needs them too.
    """
    if data.workers != "auto":
        return data.workers
    cores = num_cores() // world.local_size
    return max(1, cores // 2 if world.device.type == "cpu" else cores)


def build_policy(name: str) -> Callable[[Tensor], Tensor] | None:
    """One of torchvision's augmentation policies for single images, (3, height, width) uint8."""
    if name == "none":
        return None
    from torchvision.transforms import v2

    return {"randaugment": v2.RandAugment, "trivialaugment": v2.TrivialAugmentWide}[name]()
