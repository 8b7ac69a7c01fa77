"""A policy draws what torchvision's draws, from the seed and the step alone."""

import signal

import numpy as np
import pytest
import torch
from conftest import changed, mixed, on_deep, run_alone, run_ranks, train_until
from test_order import assert_all_see_the_same, by_image, seen
from test_resume import assert_same, final
from torchvision.transforms import v2

from image_classifier import presets
from image_classifier.config import AugmentConfig
from image_classifier.runtime import seeding
from image_classifier.runtime.command_line import take_preset
from image_classifier.runtime.config_dict import (
    flatten,
    unflatten,
)
from image_classifier.tools.policies import policy as policies
from image_classifier.train import train

NOISE = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("name", "theirs", "bins", "rounds"),
    [
        ("trivialaugment", v2.TrivialAugmentWide(), range(31), 1),
        ("randaugment", v2.RandAugment(), [9], 2),
        ("randaugment-m30-n3", v2.RandAugment(), [30], 3),
    ],
)
def test_a_policy_draws_from_the_space_of_torchvisions(monkeypatch, name, theirs, bins, rounds):
    drawn = []
    record = lambda images, which, magnitudes: drawn.append((which, magnitudes)) or images  # noqa: E731
    monkeypatch.setattr(policies, "apply_grouped", record)
    policy = policies.Policy(name)
    images = torch.zeros((6, 12, 12, 3), dtype=torch.uint8)
    policy(images, torch.rand(40_000, policy.num_draws))
    assert len(drawn) == rounds
    which, magnitudes = drawn[-1]
    shares = which.bincount() / len(which)
    torch.testing.assert_close(shares, torch.full((14,), 1 / 14), atol=0.01, rtol=0)
    for number, (kind, (space, is_signed)) in enumerate(theirs._AUGMENTATION_SPACE.items()):
        found, every = magnitudes[which == number], space(31, 12, 12)
        found = found.round() if kind == "Posterize" else found
        every = torch.zeros(1) if every is None else every.float()[list(bins)]
        assert {*found.abs().tolist()} == {*every.tolist()}
        assert (found < 0).float().mean().item() == pytest.approx(0.5 * is_signed, abs=0.06)


def test_operations_on_color_and_bytes_are_left_to_images_that_have_them(monkeypatch):
    drawn = []
    record = lambda images, which, _: drawn.append(which.unique().tolist()) or images  # noqa: E731
    images = torch.from_numpy(NOISE.integers(256, size=(3, 16, 16, 6), dtype=np.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(policies, "apply_grouped", record)
        for channels, bits in ((3, 8), (6, 8), (3, 16), (1, 16)):
            policy = policies.Policy("trivialaugment", channels, bits)
            assert policy(images, torch.rand(9999, policy.num_draws)).is_floating_point() == (
                bits > 8
            )
    names = [operation.__name__ for operation, _ in policies.OPERATIONS]
    left_out = [{name for n, name in enumerate(names) if n not in found} for found in drawn]
    bytes_only = {"posterize", "solarize", "autocontrast", "equalize"}
    assert left_out == [set(), {"color"}, bytes_only, {"color"} | bytes_only]


@pytest.mark.parametrize("bits", [8, 16])
def test_numbers_are_rounded_before_they_are_changed(bits, monkeypatch):
    monkeypatch.setattr(policies, "apply_grouped", lambda images, *_: images)
    policy = policies.Policy("randaugment", 3, bits)
    found = policy(torch.full((2, 4, 4, 3), 99.6), torch.rand(2, policy.num_draws))
    assert (found == 100).all()


def test_its_draws_are_those_that_they_always_were(config, monkeypatch):
    drawn = []
    record = lambda _, images, draws: drawn.append(draws) or images  # noqa: E731
    monkeypatch.setattr(policies.Policy, "__call__", record)
    seen(changed(config, augment__policy="randaugment", seed=7), 3, 4)
    generator = seeding.generator_at(seeding.BATCH, 7, 3, 3)
    assert torch.equal(drawn[0], torch.rand(16, 6, generator=generator))


def test_each_epoch_changes_images_anew(config):
    plain = changed(config, data__workers=0, augment=AugmentConfig(crop="none", flip="none"))
    as_they_are = by_image(seen(plain))
    random = changed(plain, augment__policy="randaugment")
    first = by_image(seen(random, stop=4))
    second = by_image(seen(random, start=4))
    assert first.keys() == second.keys()
    for one, other in ((first, second), (first, as_they_are), (second, as_they_are)):
        assert len(one.items() & other.items()) <= 20  # of 64: some operations change nothing


@pytest.mark.parametrize(("size", "policy"), [(2, "randaugment"), (3, "trivialaugment")])
def test_all_see_the_same_from_memory_or_workers_from_any_step_on_any_rank(config, size, policy):
    config = changed(config, data__batch_size=12, augment__policy=policy)
    assert_all_see_the_same(config, size)


def assert_resumes(config, folder):
    """A run that is killed and resumed ends as an unbroken one, to the last bit."""
    unbroken = changed(config, run__dir=str(folder))
    train(unbroken)
    code, _ = run_alone(train_until, config, 4)
    assert code == -signal.SIGKILL
    train(config)
    assert_same(final(config), final(unbroken))


def test_a_killed_run_ends_as_an_unbroken_one(on_photos, tmp_path):
    config = changed(on_photos, data__workers=2, augment__crop="resized", **mixed(mixup=0.4))
    config = changed(config, augment__policy="trivialaugment", run__evaluate_every_epochs=1 / 3)
    assert_resumes(config, tmp_path / "unbroken")


def test_a_run_on_many_channels_of_16_bits_is_the_same_killed_and_on_two_ranks(
    config, satellite, tmp_path
):
    config = on_deep(config, satellite, 5, data__where="stream", data__workers=0)
    config = changed(config, augment__crop="resized", augment__policy="trivialaugment")
    assert_resumes(config, tmp_path / "unbroken")
    alone = seen(config, stop=3)
    first, second = run_ranks(2, seen, config, 0, 3)
    for whole, one, other in zip(alone, first, second, strict=True):
        assert whole[0] == one[0] + other[0]
        assert whole[1] == one[1] + other[1]


def test_the_preset_folder_has_trivialaugment_and_is_else_that_of_the_core():
    _, found = take_preset(["folder"], "")
    assert found.augment.policy == "trivialaugment"
    assert found.augment.crop == presets.folder().augment.crop
    assert found.data == presets.folder().data


@pytest.mark.parametrize(
    "policy", ["autoaugment", "randaugment-m31", "randaugment-n0", "Randaugment"]
)
def test_an_unknown_policy_is_refused_in_one_line(policy, refusal):
    line = refusal("train", "smoke", "--augment.policy", policy)
    assert f"--augment.policy '{policy}' is none of: none, trivialaugment, randaugment, " in line


def test_a_config_is_read_as_it_was_saved(config):
    for policy in ("none", "randaugment-m30-n10", "randaugment-m5", "randaugment-n3"):
        own = changed(config, augment__policy=policy)
        assert unflatten(flatten(own)) == own
