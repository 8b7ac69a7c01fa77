"""Augmentation of whole batches on the device.

All random numbers are drawn for the global batch from (seed, step), and each rank takes its slice:
a run sees the same pixels on any number of processes. Images are (batch, height, width, channels)
here.
To add an augmentation: a function of images and draws, a line in `build_augment`, and a knob in
`config.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .config import AugmentConfig
from .data import Augmented, Batch, TrainData, shift_and_flip, take
from .extensions import chained, functions
from .preprocess import Normalize
from .runtime import seeding
from .runtime.phases import phase

CPU = torch.device("cpu")
NUM_DRAWS = 9  # per image: 1 for the flip, 2 for the shift; of tools, 4 for a crop, 2 for cutout


def build_augment(
    augment: AugmentConfig, data: TrainData, normalize: Normalize, seed: int
) -> Callable[[Batch, int], Augmented]:
    """The augmentation of a run, a function of a batch and its step."""
    crop_and_flip = build_crop_and_flip(augment, data, seed)
    # Each policy of a tool changes pixels by draws of its own `key`, `num_draws` for each image.
    of_source = data.source.channels, data.source.bits
    policies = [open_one(augment, *of_source) for open_one in functions("policy", "open_policy")]
    is_random = augment.crop != "none" or augment.flip != "none"

    def apply(batch: Batch, step: int) -> Augmented:
        with phase("augment"):
            draws = local_draws(seed, step, count=NUM_DRAWS, data=data) if is_random else None
            pixels = crop_and_flip(batch, draws, step)
            for one in filter(None, policies):
                drawn = local_draws(seed, step, one.key, count=one.num_draws, data=data, on=CPU)
                pixels = one(pixels, drawn)
            images = normalize(pixels.permute(0, 3, 1, 2))
            weights = None if data.weights is None else data.weights[batch.indices]
            return Augmented(images, batch.labels, weights)

    return chained("batches", "change_batches", apply, augment, data, seed)


def build_crop_and_flip(
    augment: AugmentConfig, data: TrainData, seed: int
) -> Callable[[Batch, Tensor | None, int], Tensor]:
    """Crop and flip, a function of a batch, its draws and its step.

    The draws are (batch, NUM_DRAWS) from 0 to 1, or None if nothing is random. It returns
    (batch, size, size, channels) whole numbers or float32 images, which tools may have changed.
    """
    pad = data.data.image_size // 8 if augment.crop == "pad" else 0
    moves = pad > 0 or (augment.flip != "none" and data.cropper != "workers")  # who flip too
    alternates = augment.flip == "alternating"
    sides = seeding.sides_at(seed, len(data)).to(data.world.device) if alternates else None

    def crop_and_flip(batch: Batch, draws: Tensor | None, step: int) -> Tensor:
        pixels = batch.pixels
        rows = batch.rows
        if not moves:
            return pixels if rows is None else take(pixels, rows)
        shifts = (draws[:, 1:3] * (2 * pad + 1)).long() - pad
        flips = draws[:, 0] < 0.5 if augment.flip == "random" else None
        if sides is not None:  # in each epoch the other side
            flips = sides[batch.indices] ^ bool(step // data.steps_per_epoch % 2)
        return shift_and_flip(pixels, shifts, flips, rows)

    return chained("crops", "change_crops", crop_and_flip, augment, data)


def local_draws(*place: int, count: int, data: TrainData, on: torch.device | None = None) -> Tensor:
    """This rank's slice of the global batch's draws with a key: (batch, count), from 0 to 1."""
    device = on or data.world.device
    generator = seeding.generator_at(seeding.BATCH, *place, device=device)
    draws = torch.rand((data.batch_size, count), generator=generator, device=device)
    return draws[data.world.local_slice(data.batch_size)]
