"""What transforms ask of a GPU, on any machine: tensors that are together, and no hidden waits."""

import pytest
import test_fake_gpu
import torch
from conftest import changed, on_deep
from test_fake_gpu import GPU, augmented

from image_classifier.config import AugmentConfig
from image_classifier.tools.transforms import mine
from image_classifier.tools.transforms.policy import (
    NUM_DRAWS,
    open_policy,
)

pytestmark = test_fake_gpu.pytestmark
gpu = test_fake_gpu.gpu  # a fixture
KNOBS = {"vertical_flip": True, "turns": True, "jitter": 0.4, "grayscale": 0.5, "blur": 0.5}


def test_transforms_stay_on_the_device(gpu, config, satellite):
    every = changed(config, augment=AugmentConfig(crop="pad", **KNOBS))
    assert augmented(gpu, every).images.shape == (16, 3, 32, 32)
    deep = on_deep(config, satellite, 5)
    deep = changed(deep, augment=AugmentConfig(vertical_flip=True, turns=True, blur=0.5))
    assert augmented(gpu, deep).images.shape == (8, 5, 32, 32)


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.float32])
def test_each_of_them_stays_on_the_device(gpu, knob, kind):
    images = torch.zeros((16, 32, 32, 3), device=GPU, dtype=kind)
    bits = 16 if kind == torch.uint16 else 8
    change = open_policy(AugmentConfig(**{knob: KNOBS[knob]}), 3, bits)
    with gpu.waits(0):
        found = change(images, torch.rand(16, NUM_DRAWS))
    assert found.shape == images.shape
    assert found.device == GPU


def test_those_of_the_user_wait_once(gpu, monkeypatch):
    monkeypatch.setattr(mine, "TRANSFORMS", (lambda image: image,))
    images = torch.zeros((4, 32, 32, 3), device=GPU, dtype=torch.uint8)
    with gpu.waits(1):
        found = open_policy(AugmentConfig(), 3, 8)(images, torch.rand(4, NUM_DRAWS))
    assert found.device == GPU
