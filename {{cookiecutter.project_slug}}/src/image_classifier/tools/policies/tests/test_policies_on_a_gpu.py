"""Policies on a GPU: no hidden waits, and the same images wherever they are."""

import pytest
import test_gpu
from conftest import changed
from test_gpu import (
    EVERYTHING,
    allow_sync_debug,
    assert_resumes_wherever_its_images_are,
    train_without_waits,
)

from image_classifier.train import train

pytestmark = test_gpu.pytestmark
on_gpu = test_gpu.on_gpu  # a fixture


@allow_sync_debug
@pytest.mark.parametrize("where", ["device", "stream"])
@pytest.mark.parametrize("policy", ["trivialaugment", "randaugment"])
def test_no_policy_makes_a_step_wait_for_the_device(on_gpu, monkeypatch, policy, where):
    config = changed(on_gpu, data__where=where, data__limit=160, data__workers=2, **EVERYTHING)
    train_without_waits(monkeypatch, changed(config, augment__policy=policy))


def test_a_deterministic_run_resumes_to_the_last_bit_wherever_its_images_are(on_gpu, tmp_path):
    exact = changed(on_gpu, deterministic=True, data__workers=2, augment__policy="randaugment")
    assert_resumes_wherever_its_images_are(exact, tmp_path)


def test_photographs_train_on_the_device(on_gpu, photos):
    config = changed(on_gpu, data__name="folder", data__root=str(photos), data__batch_size=4)
    train(changed(config, augment__crop="resized", augment__policy="randaugment"))
