"""Crops that the device cuts from images in memory are those of workers, but for rounding."""

import pytest
import test_fake_gpu
import torch
from conftest import changed, on_deep
from test_augment import IMAGES
from test_fake_gpu import augmented
from test_order import seen
from torch.utils._python_dispatch import TorchDispatchMode

from image_classifier.data import crops
from image_classifier.tools.device_crops.crops import (
    crop_by_products,
    crop_on_device,
    random_boxes,
)

gpu = test_fake_gpu.gpu  # a fixture


@pytest.mark.parametrize("size", [(60, 100), (300, 20), (9, 9)])
def test_boxes_are_those_of_workers(size):
    torch.manual_seed(0)
    uniform, least = torch.rand(2000, crops.BOX_DRAWS), 0.35
    boxes = random_boxes(uniform, *size, least)
    sides, places = crops.random_sides(uniform[:, 2:], least).tolist(), uniform[:, :2].tolist()
    placed = [crops.place_box(*pair, *size) for pair in zip(sides, places, strict=True)]
    is_same = (torch.tensor(placed) == boxes).all(1)
    assert is_same.float().mean() > 0.995  # they round half a pixel otherwise
    assert (torch.tensor(placed) - boxes).abs().max() <= 1


def test_a_crop_of_the_whole_image_is_the_image():
    whole = crop_on_device(IMAGES, torch.full((6, crops.BOX_DRAWS), 0.5), 12, 1.0)
    assert torch.equal(whole, IMAGES)


@pytest.mark.parametrize("side", [96, 24, 7])  # larger and smaller than the boxes
@pytest.mark.parametrize("bits", [8, 16])
def test_pixels_are_those_of_workers_but_for_rounding(side, bits):
    noise, kind = torch.Generator().manual_seed(0), (torch.uint8, torch.uint16)[bits > 8]
    images = torch.randint(2**bits, (100, 37, 61, 3), generator=noise).to(kind)
    draws = torch.rand((100, crops.BOX_DRAWS), generator=noise)
    draws[:, :2] = draws[:, :2].round() * 0.999  # boxes in the corners, too
    boxes = random_boxes(draws, 37, 61, 0.35).int().tolist()
    by_one = crop_on_device(images, draws, side, 0.35)
    together = crop_by_products(images, random_boxes(draws, 37, 61, 0.35), side)  # as on a GPU
    for image, box, one, other in zip(images, boxes, by_one, together, strict=True):
        expected = torch.empty((side, side, 3), dtype=kind)
        crops.crop(image, tuple(box), expected)
        assert torch.equal(one, expected)
        assert (other - expected.float()).abs().max() < 1.01


def test_crops_are_the_same_from_any_step_and_in_either_memory(config):
    config = changed(config, augment__crop="resized", augment__flip="alternating")
    resident = seen(changed(config, data__where="device"))
    assert len({digest for _, digests in resident for digest in digests}) == 8 * 16
    assert seen(changed(config, data__where="device"), 5) == resident[5:]
    assert seen(changed(config, data__where="host"), 3) == resident[3:]


def test_a_crop_keeps_as_much_of_an_image_as_is_asked_for(config):
    config = changed(config, augment__crop="resized", data__where="device")
    small, large = (seen(changed(config, augment__min_scale=n), stop=1) for n in (0.1, 0.9))
    assert small != large


def test_crops_stay_on_the_device(gpu, config, satellite):
    knobs = {"augment__crop": "resized", "augment__flip": "alternating"}
    assert augmented(gpu, changed(config, **knobs)).images.shape == (16, 3, 32, 32)
    deep = on_deep(config, satellite, 5, augment__crop="resized")
    assert augmented(gpu, deep).images.shape == (8, 5, 32, 32)


def test_products_of_crops_are_not_rounded_as_training_lets_a_gpu_round_others():
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operation, _, words=(), knobs=None):
            if operation is torch.ops.aten.bmm.default:
                found.append(torch.get_float32_matmul_precision())
            return operation(*words, **(knobs or {}))

    found = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as `Precision` does
    with Products():
        crop_by_products(torch.zeros(1, 9, 9, 3), torch.tensor([[0.0, 0.0, 9.0, 9.0]]), 8)
    after = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    assert (found, after) == (["highest", "highest"], "high")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", [8, 16])
def test_a_gpu_cuts_the_pixels_of_a_cpu_though_training_lets_it_round_products(bits):
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(2**bits, (100, 37, 61, 3), generator=noise).float()
    boxes = random_boxes(torch.rand((100, crops.BOX_DRAWS), generator=noise), 37, 61, 0.35)
    here = crop_by_products(images, boxes, 24)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32, as `Precision` does
    there = crop_by_products(images.cuda(), boxes.cuda(), 24).cpu()
    torch.set_float32_matmul_precision(precision)
    # TF32 would move 8 bits by 0.4 at most, and 16 bits by 50 to 140.
    assert (there - here).abs().max() < 0.5
