"""Augmentation of whole batches does to each image what it would do to it alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import changed
from PIL import Image
from test_order import opened
from torchvision import transforms

from image_classifier import augment
from image_classifier.config import (
    AugmentConfig,
    Config,
    DataConfig,
)
from image_classifier.data import Source, crops, shift_and_flip
from image_classifier.data.loader import EvalData
from image_classifier.data.samples import Samples
from image_classifier.errors import UserError
from image_classifier.precision import Precision
from image_classifier.preprocess import VIEWS, Normalize
from image_classifier.runtime import seeding
from image_classifier.runtime.distributed import World

CPU = World(torch.device("cpu"))
PRECISION = Precision("fp32", Config().compute, Config().optim, CPU.device)
# Six images of noise, and their mean and deviation.
IMAGES = torch.randint(256, (6, 12, 12, 3), generator=torch.Generator().manual_seed(0)).byte()
FLAT = IMAGES.flatten(0, 2) / 255
SOURCE = SimpleNamespace(mean=FLAT.mean(0).tolist(), std=FLAT.std(0).tolist(), bits=8)


@pytest.mark.parametrize(("margin", "flip"), [(0, True), (3, False), (3, True)])
def test_an_image_is_padded_cropped_and_mirrored(margin, flip):
    shifts = torch.randint(-margin, margin + 1, (6, 2))
    mirrored = torch.arange(6) % 2 == 1 if flip else None
    shifted = shift_and_flip(IMAGES, shifts, mirrored)
    for number, (down, right) in enumerate(shifts.tolist()):
        padded = np.pad(IMAGES[number], [(margin, margin)] * 2 + [(0, 0)], mode="reflect")
        padded = padded[:, ::-1] if flip and number % 2 else padded
        top, left = margin + down, margin + right
        assert np.array_equal(shifted[number], padded[top : top + 12, left : left + 12])
    rows = torch.tensor([5, 0, 3, 3, 1, 2])
    picked = shift_and_flip(IMAGES, shifts, mirrored, rows)
    assert torch.equal(picked, shift_and_flip(IMAGES[rows], shifts, mirrored))


def augmented(config, steps):
    """The images of these steps, as a model sees them."""
    data, _, apply = opened(config, CPU)
    batches = zip(steps, data.batches(steps.start, steps.stop), strict=True)
    return [apply(batch, step)[0] for step, batch in batches]


def test_each_policy_of_a_tool_applies_in_turn_with_draws_of_its_own(config, monkeypatch):
    config = changed(config, augment=AugmentConfig(crop="none", flip="none"), seed=5)
    seen = []

    def policy_of(key, count):
        def change(images, draws):
            seen.append((key, images.clone(), draws))
            return images // 2 + key

        change.key, change.num_draws = key, count
        return lambda *_: change

    opened_by = [policy_of(3, 4), lambda *_: None, policy_of(5, 2)]
    monkeypatch.setattr(augment, "functions", lambda *_: opened_by)
    (found,) = augmented(config, range(2, 3))
    data, normalize, _ = opened(config, CPU)
    first = next(data.batches(2, 3)).images.permute(0, 2, 3, 1)
    second = first // 2 + 3
    assert torch.equal(found, normalize((second // 2 + 5).permute(0, 3, 1, 2)))
    for (key, images, draws), count, given in zip(seen, (4, 2), (first, second), strict=True):
        generator = seeding.generator_at(seeding.BATCH, 5, 2, key)
        assert torch.equal(draws, torch.rand(16, count, generator=generator))
        assert torch.equal(images, given)


def test_evaluation_sees_images_of_the_size_it_asks_for(photos):
    for size, expected in ((48, 48), (0, 32)):
        data = changed(Config().data, name="folder", root=str(photos), test_size=size)
        (batch,) = EvalData(data, "val", CPU).batches()
        assert batch.images.shape == (4, 3, expected, expected)
    with pytest.raises(UserError, match=r"--data.test-size 5 is not in 8 .. 4096; 0: off"):
        changed(Config(), data__test_size=5)


def test_boxes_lie_in_the_image_and_are_as_large_as_torchvisions():
    torch.manual_seed(0)
    uniform, least = torch.rand(2000, crops.BOX_DRAWS), 0.08
    sides, places = crops.random_sides(uniform[:, 2:], least).tolist(), uniform[:, :2].tolist()
    boxes = torch.tensor(
        [crops.place_box(*pair, 60, 100) for pair in zip(sides, places, strict=True)]
    )
    assert (boxes >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor((60, 100))).all()
    image, get = torch.empty(3, 60, 100), transforms.RandomResizedCrop.get_params
    theirs = torch.tensor([get(image, (least, 1), (3 / 4, 4 / 3)) for _ in range(2000)])
    for moment in (torch.mean, torch.std):
        sizes, their_sizes = (moment(found[:, 2:].log(), 0) for found in (boxes, theirs))
        torch.testing.assert_close(sizes, their_sizes, atol=0.03, rtol=0)


def test_workers_cut_boxes_of_the_share_that_was_asked_for_and_mirror_them_wherever_they_lie():
    numbers = torch.arange(256).byte().expand(256, 256)
    image = torch.stack((numbers.T, numbers, numbers), dim=2)  # a pixel says where it is
    source = Source(torch.zeros(200).long(), ("ant",), reader=lambda _: image)
    how = AugmentConfig(crop="resized", min_scale=0.25, flip="random")
    boxes = source.empty(200, 32)
    Samples(source, DataConfig(image_size=32), crops=how).fill(boxes, 0, np.arange(200))
    boxes = boxes.float()
    # From row 8 to row 24 is half of the box, and so are columns.
    heights = 2 * (boxes[:, 24, 16, 0] - boxes[:, 8, 16, 0])
    widths = 2 * (boxes[:, 16, 24, 1] - boxes[:, 16, 8, 1])
    areas = heights * widths.abs() / 256**2
    assert 0.22 < areas.min() < 0.3
    assert 0.9 < areas.max() < 1.05
    mirrored = boxes[widths < 0, 16, 16]
    beyond_the_middle = (mirrored[:, :2] > 128).float().mean(0)
    assert len(mirrored) == pytest.approx(100, abs=30)
    torch.testing.assert_close(beyond_the_middle, torch.full((2,), 0.5), atol=0.2, rtol=0)


def test_each_place_of_a_box_is_as_probable():
    uniform = (torch.arange(400) + 0.5) / 400
    tops = [crops.place_box([[0.7, 0.7]], [draw, 0.0], 10, 10)[0] for draw in uniform.tolist()]
    assert torch.tensor(tops).bincount().tolist() == [100] * 4  # 7 of 10 pixels


@pytest.mark.parametrize("size", [(20, 200), (200, 20), (7, 1000)])
def test_a_box_of_a_long_image_is_no_longer_than_4_to_3(size):
    torch.manual_seed(0)
    uniform = torch.rand(500, crops.BOX_DRAWS)
    sides = crops.random_sides(uniform[:, 2:], 0.35).tolist()
    for pair in zip(sides, uniform[:, :2].tolist(), strict=True):
        top, left, height, width = crops.place_box(*pair, *size)
        assert max(height, width) / min(height, width) <= 4 / 3 + 0.5 / min(size)  # whole pixels
        assert min(height, width) == min(size)
        assert top + height <= size[0]
        assert left + width <= size[1]


def test_crops_are_those_of_pillow():
    pixels, out = torch.randint(0, 256, (90, 120, 3)).byte(), torch.empty(48, 48, 3).byte()
    crops.crop(pixels, (10, 7, 64, 101), out)
    image = Image.fromarray(pixels[10:74, 7:108].numpy())
    expected = np.asarray(image.resize((48, 48), Image.Resampling.BILINEAR))
    difference = np.abs(out.numpy().astype(int) - expected)
    assert difference.max() <= 1
    assert difference.mean() < 0.05
    crops.fit_square(pixels[:48, :60], out, "crop", ())
    assert torch.equal(out, pixels[:48, 6:54])


@pytest.mark.parametrize("tta", VIEWS)
def test_an_image_and_its_mirror_image_get_one_prediction(tta):
    images = IMAGES.permute(0, 3, 1, 2)
    normalize = Normalize(SOURCE, 12, PRECISION, tta)
    views, weights = zip(*normalize.views(images), strict=True)
    assert sum(weights) == 1
    assert torch.equal(views[0], normalize(images))
    pairs = zip(views, normalize.views(images.flip(3)), weights, strict=True)
    difference = sum(weight * (view - other) for view, (other, _), weight in pairs)
    assert (difference.abs().max() < 1e-5) == (tta != "none")


def test_normalized_pixels_have_mean_0_and_deviation_1():
    normal = Normalize(SOURCE, 12, PRECISION)(IMAGES.permute(0, 3, 1, 2)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(normal.mean(1), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std(1), torch.ones(3), atol=1e-4, rtol=0)


def test_a_box_is_placed_by_a_draw_for_each_side():
    assert crops.place_box([[0.2, 0.2]], [0.0, 0.99], 50, 50) == (0, 40, 10, 10)
