"""Single images as training and evaluation see them.

What becomes of an image depends on the seed, the epoch and its number alone, so any number of
workers makes the same; and so does what stands in for one that can't be read.
"""

import contextlib
import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..config import AugmentConfig, DataConfig, UserError
from ..runtime import seeding
from .datasets.source import Source
from .decode import (
    BOX_DRAWS,
    BadImageError,
    centre_crop,
    crop,
    pixels_to_keep,
    place_box,
    random_sides,
)

STAND_IN_TRIES = 20  # images that are tried in place of one that can't be read
LEFT_OUT = -1  # in place of label and index, if none may stand in


class Samples:
    """Single images as training sees them: decoded, cropped to the model's size, uint8."""

    def __init__(
        self, source: Source, data: DataConfig, seed: int = 0, augment: AugmentConfig | None = None
    ) -> None:
        """Samples of side `data.image_size` pixels, augmented if `augment` is given."""
        self.source, self.size, self.seed = source, data.image_size, seed
        self.keep = pixels_to_keep(data, data.image_size)
        self.is_skipping, self.is_training = data.on_bad_image == "skip", augment is not None
        # Where workers crop they flip too; else the device does both, to all images of a batch.
        crops = augment if augment and augment.crop == "resized" else None
        self.min_area, self.flip = (crops.min_scale, crops.flip) if crops else (None, "none")
        alternates = self.flip == "alternating"
        self.sides = seeding.sides_at(seed, len(source)).numpy() if alternates else None
        # Built before workers are forked: each would take seconds to import torchvision.
        self.policy = build_policy(augment) if augment else None

    def fill(self, out: Tensor, epoch: int, indices: np.ndarray) -> dict[int, int]:
        """Write the images at `indices` as `epoch` has them to `out`, (count, size, size, 3) uint8.

        An index may have a multiple of the number of images added to it: then it is an image that
        the epoch has several times, each of them cropped in another way.

        Returns what stands in for those that can't be read and may be skipped: index by row.

        Raises:
            UserError: if the file of one can't be read, naming it.
        """
        stand_ins: dict[int, int] = {}
        if self.min_area is not None:
            key = (seeding.SAMPLE, self.seed, epoch)
            draws = torch.from_numpy(seeding.draws_at(*key, indices=indices, count=BOX_DRAWS + 1))
            sides = random_sides(draws[:, 2:-1], self.min_area).tolist()
            corners, flips = draws[:, :2].tolist(), draws[:, -1].tolist()
        for row, (drawn, place) in enumerate(zip(indices.tolist(), out, strict=True)):
            index = drawn % len(self.source)
            try:
                pixels = self.source.read(index, self.keep)
            except BadImageError as error:
                stand_ins[row], pixels = self.stand_in(epoch, index, error)
            if self.min_area is None:
                centre_crop(pixels, place)
            else:
                box = place_box(sides[row], corners[row], *pixels.shape[:2])
                crop(pixels, box, place, self.is_mirrored(index, epoch, flips[row]))
            if self.policy is not None:
                with seeding.seeded(seeding.SAMPLE, self.seed, epoch, drawn, 1):
                    changed = self.policy(place.permute(2, 0, 1))
                place.copy_(changed.permute(1, 2, 0))
        return stand_ins

    def stand_in(self, epoch: int, index: int, error: BadImageError) -> tuple[int, Tensor]:
        """Another image for the place of one that can't be read: its index and pixels.

        It is cropped and mirrored as that one would have been. For an evaluation there is none:
        `LEFT_OUT`, and black.

        Raises:
            UserError: if bad images are not to be skipped, or those that were tried are bad too.
        """
        if not self.is_skipping:
            raise error
        if not self.is_training:
            return LEFT_OUT, torch.zeros((1, 1, 3), dtype=torch.uint8)
        for attempt in range(STAND_IN_TRIES):
            other = seeding.stand_in_at(self.seed, epoch, index, attempt, len(self.source))
            with contextlib.suppress(BadImageError):
                return other, self.source.read(other, self.keep)
        raise none_stands_in(error)

    def is_mirrored(self, index: int, epoch: int, draw: float) -> bool:
        """Whether an image is mirrored in `epoch`; `draw` is from 0 to 1."""
        if self.sides is not None:
            return bool(self.sides[index]) != epoch % 2
        return self.flip == "random" and draw < 0.5


def none_stands_in(error: BadImageError) -> UserError:
    """What to raise if an image can't be read, nor any of those that were tried in its place."""
    return UserError(f"{error}; nor can the {STAND_IN_TRIES} others that were tried in its place")


def build_policy(augment: AugmentConfig) -> Callable[[Tensor], Tensor] | None:
    """One of torchvision's augmentation policies for single images, (3, height, width) uint8."""
    if augment.policy == "none":
        return None
    from torchvision.transforms import v2

    if augment.policy == "trivialaugment":
        return v2.TrivialAugmentWide()
    strength = dict(re.findall(r"-([mn])(\d+)", augment.policy))
    return v2.RandAugment(int(strength.get("n", 2)), int(strength.get("m", 9)))
