"""Crops that the device cuts from images in memory are those of workers, but for rounding."""

import test_fake_gpu
import torch
from conftest import changed, on_deep
from test_augment import IMAGES
from test_fake_gpu import augmented
from test_order import seen
from torch.nn import functional

from image_classifier.data import crops
from image_classifier.tools.device_crops.crops import (
    crop_on_device,
    random_boxes,
)

gpu = test_fake_gpu.gpu  # a fixture


def test_boxes_are_those_of_workers():
    torch.manual_seed(0)
    uniform, least = torch.rand(2000, crops.BOX_DRAWS), 0.08
    boxes = random_boxes(uniform, 60, 100, least)
    assert (boxes >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor((60.001, 100.001))).all()
    # Those are in whole pixels.
    sides, places = crops.random_sides(uniform[:, 2:], least).tolist(), uniform[:, :2].tolist()
    placed = [crops.place_box(*pair, 60, 100) for pair in zip(sides, places, strict=True)]
    assert (torch.tensor(placed) - boxes).abs().max() <= 1


def test_a_crop_of_the_whole_image_is_the_image():
    whole = crop_on_device(IMAGES, torch.full((6, crops.BOX_DRAWS), 0.5), 12, 1.0)
    torch.testing.assert_close(whole, IMAGES.float(), atol=1e-3, rtol=0)


def test_a_crop_repeats_the_outermost_pixels_at_the_border():
    noise, sides = torch.Generator().manual_seed(0), (37, 61)
    images = torch.randint(256, (200, *sides, 3), generator=noise).byte()
    draws = torch.rand((200, crops.BOX_DRAWS), generator=noise)
    draws[:, :2] = draws[:, :2].round()  # boxes in the corners
    found = crop_on_device(images, draws, 96, 0.08)
    boxes = random_boxes(draws, *sides, 0.08)
    for image, (top, left, height, width), crop in zip(images, boxes, found, strict=True):
        centers = (torch.arange(96) + 0.5) / 96
        y = ((top + height * centers) * (2 / sides[0]) - 1)[:, None].expand(96, 96)
        x = ((left + width * centers) * (2 / sides[1]) - 1).expand(96, 96)
        pixels, grid = image.permute(2, 0, 1)[None].float(), torch.stack((x, y), dim=2)[None]
        whole = functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
        torch.testing.assert_close(crop, whole[0].permute(1, 2, 0), atol=0.01, rtol=0)


def test_crops_are_the_same_from_any_step_and_in_either_memory(config):
    config = changed(config, augment__crop="resized", augment__flip="alternating")
    resident = seen(changed(config, data__where="device"))
    assert len({digest for _, digests in resident for digest in digests}) == 8 * 16
    assert seen(changed(config, data__where="device"), 5) == resident[5:]
    assert seen(changed(config, data__where="host"), 3) == resident[3:]


def test_crops_stay_on_the_device(gpu, config, satellite):
    knobs = {"augment__crop": "resized", "augment__flip": "alternating"}
    assert augmented(gpu, changed(config, **knobs)).images.shape == (16, 3, 32, 32)
    deep = on_deep(config, satellite, 5, augment__crop="resized")
    assert augmented(gpu, deep).images.shape == (8, 5, 32, 32)
