"""Augmentation on whole batches does to each image what it would do to it alone."""

import random

import pytest
import torch
from torch.nn.functional import pad

from image_classifier.augment import (
    Normalize,
    cutout,
    mix_pairs,
    resized_crop,
    shift_and_flip,
)
from image_classifier.config import AugmentConfig, Config
from image_classifier.datasets.source import Source
from image_classifier.decode import (
    centre_crop,
    crop,
    random_boxes,
)
from image_classifier.precision import Precision


@pytest.fixture
def images() -> torch.Tensor:
    """Six images of noise: (6, 12, 12, 3) uint8."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (6, 12, 12, 3), dtype=torch.uint8, generator=generator)


def draws(count: int, width: int) -> torch.Tensor:
    """Numbers from 0 to 1: (count, width)."""
    return torch.rand((count, width), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("margin", [0, 3])
def test_an_image_is_padded_cropped_and_mirrored(
    images: torch.Tensor, margin: int, flip: bool
) -> None:
    chance = draws(6, 3)
    shifted = shift_and_flip(images, chance, margin, flip)
    for image, (coin, down, right), found in zip(images, chance, shifted, strict=True):
        padded = pad(image.permute(2, 0, 1).float(), [margin] * 4, mode="reflect")
        top, left = int(down * (2 * margin + 1)), int(right * (2 * margin + 1))
        if flip and coin < 0.5:
            padded = padded.flip(2)
            left = 2 * margin - left
        expected = padded[:, top : top + 12, left : left + 12].permute(1, 2, 0)
        assert torch.equal(found.float(), expected)


def test_every_shift_and_both_sides_occur() -> None:
    image = torch.arange(12 * 12 * 3, dtype=torch.uint8).view(1, 12, 12, 3)
    many = shift_and_flip(image.expand(600, -1, -1, -1), draws(600, 3), 2, flip=True)
    assert len(many.flatten(1).unique(dim=0)) == 5 * 5 * 2


def test_a_crop_of_all_of_the_image_is_the_image(images: torch.Tensor) -> None:
    whole = resized_crop(images, torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(6, 4), 12, 1.0)
    torch.testing.assert_close(whole, images.float(), atol=1e-3, rtol=0)


def test_boxes_lie_in_the_image_and_have_the_area_that_was_asked_for() -> None:
    boxes = random_boxes(draws(1000, 4), height=60, width=100, min_area=0.3)
    top, left, height, width = boxes.T
    assert (boxes >= 0).all()
    assert (top + height <= 60.001).all()
    assert (left + width <= 100.001).all()
    area = height * width / 6000
    assert area.max() <= 1.001
    assert area[(height < 60) & (width < 100)].min() >= 0.3 - 1e-4


def test_a_photograph_is_cropped_like_a_batch(images: torch.Tensor) -> None:
    box = torch.tensor([2.0, 3.0, 6.0, 6.0])
    assert torch.equal(crop(images[0], box, 6), images[0, 2:8, 3:9])
    assert centre_crop(images[0, :, :8], 8).shape == (8, 8, 3)
    assert torch.equal(centre_crop(images[0, :, :8], 8), images[0, 2:10, :8])


def test_cutout_blanks_a_square_and_nothing_else() -> None:
    images = torch.ones(50, 3, 12, 12)
    cutout(images, draws(50, 2), 4)
    blank = (images == 0).sum(dim=(1, 2, 3)) / 3
    assert blank.max() == 16
    assert blank.min() >= 4  # a quarter, at a corner


def test_normalised_pixels_have_mean_0_and_deviation_1(images: torch.Tensor) -> None:
    pixels = images.float() / 255
    source = Source(
        labels=torch.zeros(6),
        classes=("a",),
        mean=tuple(pixels.mean(dim=(0, 1, 2)).tolist()),
        std=tuple(pixels.std(dim=(0, 1, 2)).tolist()),
    )
    config = Config()
    precision = Precision("fp32", config.compute, config.optim, torch.device("cpu"))
    normal = Normalize(source, 12, precision)(images.permute(0, 3, 1, 2))
    assert normal.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(normal.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-4, rtol=0)


@pytest.mark.parametrize("knobs", [{"mixup": 1.0}, {"cutmix": 1.0}, {"mixup": 1.0, "cutmix": 1.0}])
def test_labels_are_mixed_as_the_images_are(knobs: dict[str, float]) -> None:
    labels = torch.arange(4)
    for seed in range(20):
        # An image of class c has the value c everywhere, so the share of a value can be counted.
        images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 12, 12).clone()
        mixed, targets = mix_pairs(images, labels, AugmentConfig(**knobs), 4, random.Random(seed))
        torch.testing.assert_close(targets.sum(1), torch.ones(4))
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), targets @ torch.arange(4.0))
        assert (targets[:2, 2:] == 0).all()  # pairs are neighbours
