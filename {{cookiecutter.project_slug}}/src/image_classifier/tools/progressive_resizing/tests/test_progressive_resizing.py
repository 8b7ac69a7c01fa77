"""Images grow by the step of a run alone, on the device, and to sizes that the network takes."""

import pytest
import test_fake_gpu
import torch
from conftest import changed, mixed
from test_augment import augmented
from torch import nn
from torch.nn.functional import avg_pool2d

from image_classifier import train as train_module
from image_classifier.config import Config
from image_classifier.errors import UserError
from image_classifier.runtime.config_dict import (
    is_used,
    to_save,
    unflatten,
)
from image_classifier.tools.progressive_resizing.crops import (
    side_at,
)
from image_classifier.train import train

gpu = test_fake_gpu.gpu  # a fixture


def test_images_grow_in_a_run_wherever_it_resumes(config):
    config = changed(config, epochs=8, data__where="stream", data__workers=0, data__test_size=40)
    plain = changed(config, augment__min_size=16)
    growing = changed(plain, **mixed(cutout=8))
    images = augmented(growing, range(22, 29))
    assert [batch.shape[3] for batch in images] == [16, 16, 20, 20, 20, 20, 32]
    assert torch.equal(augmented(growing, range(23, 24))[0], images[1])
    (small, *_, large), full = (augmented(run, range(23, 29)) for run in (plain, config))
    assert torch.equal(large, full[-1])
    means = avg_pool2d(full[0], 2)
    assert (small - means).abs().mean() < 0.15  # the same images, smaller


def test_a_short_run_ends_with_images_of_full_size(config):
    growing = changed(config, epochs=3, augment__min_size=16)
    assert [batch.shape[3] for batch in augmented(growing, range(6, 10))] == [16, 16, 32, 32]
    longer = changed(growing, epochs=3.25)  # a step more, which is no epoch of its own
    assert [batch.shape[3] for batch in augmented(longer, range(6, 13))] == [16, 16] + [32] * 5
    longer = changed(growing, epochs=2.75)  # three steps more, which are the last epoch
    assert [batch.shape[3] for batch in augmented(longer, range(6, 11))] == [16, 16] + [32] * 3


def test_images_grow_on_the_device(gpu, config):
    growing = changed(config, epochs=10, augment__min_size=16)
    seen = [test_fake_gpu.augmented(gpu, growing, at, at + 1).images for at in (0, 32, 36)]
    assert [images.shape[2] for images in seen] == [16, 28, 32]


@pytest.mark.parametrize(("size", "most"), [(40, 32), (7, 32), (1, 16)])
def test_images_do_not_begin_larger_than_they_end(size, most):
    said = f"^--augment.min-size {size} is not in 8 .. {most}; 0: off$"
    with pytest.raises(UserError, match=said):
        changed(changed(Config(), data__image_size=most), augment__min_size=size)


def test_a_size_that_the_network_cannot_take_is_refused_before_the_first_step(config, monkeypatch):
    build = lambda *_, **__: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32**2, 10))  # noqa: E731
    monkeypatch.setattr(train_module, "build_model", build)
    with pytest.raises(UserError, match=r"images of 24 pixels, see --augment.min-size: .*mat1"):
        train(changed(config, augment__min_size=24))


def test_configs_of_before_are_read(config):
    growing = changed(config, augment__min_size=16)
    assert unflatten(to_save(growing)) == growing
    assert "augment.min_size" not in to_save(config)
    assert unflatten(to_save(config) | {"augment.min_size": 0}) == config
    assert not is_used("augment.min_size", 0)  # so it is read where this tool has gone


def test_large_images_grow_by_32_pixels_and_small_ones_by_4():
    assert [side_at(0.74, 64, most) for most in (128, 124)] == [96, 80]


@pytest.mark.parametrize(
    ("least", "most"),
    [(8, 32), (10, 30), (64, 124), (96, 224), (112, 272), (150, 299), (32, 384), (8, 4096)],
)
def test_a_run_has_no_more_sizes_than_torch_compiles(least, most):
    sizes = {side_at(done / 1000, least, most) for done in range(1001)}
    assert {least, most} <= sizes
    assert 3 <= len(sizes) <= 6  # and two of evaluations: torch.compile gives up after 8
