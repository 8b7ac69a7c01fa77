"""Transforms on a GPU: no hidden waits, and pixels as those of a CPU."""

import pytest
import test_gpu
import torch
from conftest import changed
from test_gpu import allow_sync_debug, assert_resumes_wherever_its_images_are, train_without_waits

from image_classifier.config import AugmentConfig
from image_classifier.tools.transforms.policy import (
    NUM_DRAWS,
    open_policy,
)

pytestmark = test_gpu.pytestmark
on_gpu = test_gpu.on_gpu  # a fixture
KNOBS = {"vertical_flip": True, "turns": True, "jitter": 0.4, "grayscale": 0.5, "blur": 0.5}


@allow_sync_debug
@pytest.mark.parametrize("where", ["device", "stream"])
def test_no_transform_makes_a_step_wait_for_the_device(on_gpu, monkeypatch, where):
    config = changed(on_gpu, data__where=where, data__limit=160, data__workers=2)
    train_without_waits(monkeypatch, changed(config, augment=AugmentConfig(**KNOBS)))


def test_a_deterministic_run_resumes_to_the_last_bit_wherever_its_images_are(on_gpu, tmp_path):
    exact = changed(on_gpu, deterministic=True, data__workers=2, augment=AugmentConfig(**KNOBS))
    assert_resumes_wherever_its_images_are(exact, tmp_path)


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize(("bits", "kind"), [(8, torch.uint8), (16, torch.uint16)])
def test_pixels_are_those_of_a_cpu(knob, bits, kind):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(2**bits, (16, 65, 65, 3), generator=draw).to(kind)
    draws = torch.rand(16, NUM_DRAWS, generator=draw)
    change = open_policy(AugmentConfig(**{knob: KNOBS[knob]}), 3, bits)
    theirs, ours = change(images, draws).float(), change(images.cuda(), draws).cpu().float()
    assert (ours - theirs).abs().max() <= (1 if knob in ("jitter", "grayscale", "blur") else 0)
    assert (ours != theirs).float().mean() < 0.01
