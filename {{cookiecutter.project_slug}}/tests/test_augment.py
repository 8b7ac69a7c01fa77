"""Augmentation on whole batches does to each image what it would do to it alone."""

import random

import numpy as np
import pytest
import torch
from conftest import changed
from PIL import Image
from torch.nn.functional import pad
from torchvision.transforms import RandomResizedCrop

from image_classifier.augment import (
    Windows,
    build_augment,
    cutout,
    mixup_cutmix,
    resized_crop,
)
from image_classifier.config import AugmentConfig, Config
from image_classifier.data.datasets.source import Source
from image_classifier.data.decode import (
    BOX_DRAWS,
    centre_crop,
    crop,
    place_box,
    random_boxes,
    random_sides,
)
from image_classifier.data.loader import TrainData
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize, shift_and_flip
from image_classifier.runtime.distributed import join_world


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
    shifts = torch.randint(-margin, margin + 1, (6, 2))
    mirrored = torch.arange(6) % 2 == 1 if flip else None
    shifted = shift_and_flip(images, shifts, mirrored)
    for number, (image, (down, right)) in enumerate(zip(images, shifts, strict=True)):
        padded = pad(image.permute(2, 0, 1).float(), [margin] * 4, mode="reflect")
        top, left = margin + int(down), margin + int(right)
        padded = padded.flip(2) if flip and number % 2 else padded
        expected = padded[:, top : top + 12, left : left + 12].permute(1, 2, 0)
        assert torch.equal(shifted[number].float(), expected)


@pytest.mark.parametrize("flip", ["random", "alternating"])
def test_every_shift_and_both_sides_occur(config: Config, flip: str) -> None:
    config = changed(config, data__limit=600, data__batch_size=600)
    config = changed(config, data__image_size=16, augment__flip=flip)
    with join_world(config.compute) as world:
        data = TrainData(config, world)
        data.pixels = data.pixels[:1].repeat(600, 1, 1, 1)
        precision = Precision("fp32", config.compute, config.optim, world.device)
        normalize = Normalize(data.source, 32, precision)
        augment = build_augment(config.augment, data, normalize, world, config.seed)
        many, _ = augment(next(data.batches(0, 1)), 0)
    assert len(many.flatten(1).unique(dim=0)) == 5 * 5 * 2


def test_a_crop_of_all_of_the_image_is_the_image(images: torch.Tensor) -> None:
    whole = resized_crop(images, torch.full((6, BOX_DRAWS), 0.5), 12, 1.0)
    torch.testing.assert_close(whole, images.float(), atol=1e-3, rtol=0)


def test_boxes_lie_in_the_image_and_have_the_area_that_was_asked_for() -> None:
    boxes = random_boxes(draws(1000, BOX_DRAWS), height=60, width=100, min_area=0.3)
    top, left, height, width = boxes.T
    assert (boxes >= 0).all()
    assert (top + height <= 60.001).all()
    assert (left + width <= 100.001).all()
    area = height * width / 6000
    assert area.max() <= 1.001
    assert area[(height < 60) & (width < 100)].min() >= 0.3 - 1e-4


def test_boxes_are_as_large_as_torchvisions() -> None:
    image = torch.empty(3, 60, 100)
    torch.manual_seed(0)
    theirs = [RandomResizedCrop.get_params(image, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(2000)]
    boxes = random_boxes(draws(2000, BOX_DRAWS), height=60, width=100, min_area=0.08)
    sizes, their_sizes = boxes[:, 2:].log(), torch.tensor(theirs)[:, 2:].log()
    torch.testing.assert_close(sizes.mean(0), their_sizes.mean(0), atol=0.03, rtol=0)
    torch.testing.assert_close(sizes.std(0), their_sizes.std(0), atol=0.03, rtol=0)


def test_a_panorama_is_cropped_too() -> None:
    boxes = random_boxes(draws(50, BOX_DRAWS), height=10, width=100, min_area=0.9)
    assert (boxes[:, 2] == 10).all()
    assert (boxes[:, 3] < 100).all()


def test_a_photograph_is_cropped_like_a_batch(images: torch.Tensor) -> None:
    out = torch.empty(6, 6, 3, dtype=torch.uint8)
    crop(images[0], (2, 3, 6, 6), out)
    assert torch.equal(out, images[0, 2:8, 3:9])
    out = torch.empty(8, 8, 3, dtype=torch.uint8)
    centre_crop(images[0, :, :8], out)
    assert torch.equal(out, images[0, 2:10, :8])


def test_a_crop_is_what_pillow_makes_of_it() -> None:
    pixels = torch.randint(0, 256, (90, 120, 3), dtype=torch.uint8)
    out = torch.empty(48, 48, 3, dtype=torch.uint8)
    crop(pixels, (10, 7, 64, 101), out)
    image = Image.fromarray(pixels[10:74, 7:108].numpy())
    expected = np.asarray(image.resize((48, 48), Image.Resampling.BILINEAR))
    difference = np.abs(out.numpy().astype(int) - expected)
    assert difference.max() <= 1
    assert difference.mean() < 0.05


def test_workers_place_boxes_as_a_batch_does() -> None:
    uniform = draws(100, BOX_DRAWS)
    boxes = random_boxes(uniform, height=60, width=100, min_area=0.3)
    sides, places = random_sides(uniform[:, 2:], 0.3).tolist(), uniform[:, :2].tolist()
    placed = [place_box(*pair, 60, 100) for pair in zip(sides, places, strict=True)]
    assert (torch.tensor(placed) - boxes).abs().max() <= 1


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_windows_move_whole_rows_as_pixels_are_moved(pad: int, flip: bool) -> None:
    pixels = torch.randint(0, 256, (20, 9, 12, 3), dtype=torch.uint8)
    numbers, shifts = torch.randint(0, 20, (30,)), torch.randint(-pad, pad + 1, (30, 2))
    mirrored = torch.rand(30) < 0.5 if flip else None
    expected = shift_and_flip(pixels, shifts, mirrored, numbers)
    assert torch.equal(Windows(pixels, pad)(numbers, shifts, mirrored), expected)


def test_cutout_blanks_a_square_and_nothing_else() -> None:
    images = torch.ones(50, 3, 12, 12)
    cutout(images, draws(50, 2), 4)
    blank = (images == 0).sum(dim=(1, 2, 3)) / 3
    assert blank.max() == 16
    assert blank.min() >= 4  # a quarter, at a corner


def test_normalised_pixels_have_mean_0_and_deviation_1(images: torch.Tensor) -> None:
    pixels = images.float() / 255
    source = Source(
        labels=torch.zeros(6, dtype=torch.int64),
        classes=("a",),
        pixels=images,
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
        mixed, targets = mixup_cutmix(
            images, labels, AugmentConfig(**knobs), 4, random.Random(seed)
        )
        torch.testing.assert_close(targets.sum(1), torch.ones(4))
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), targets @ torch.arange(4.0))
        assert (targets[:2, 2:] == 0).all()  # pairs are neighbours
