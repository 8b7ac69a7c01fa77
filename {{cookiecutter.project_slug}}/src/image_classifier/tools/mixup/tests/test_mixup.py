"""Images are mixed in pairs, and what is known of their labels alike."""

import random
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import changed
from test_order import opened
from torch.nn.functional import one_hot

from image_classifier.config import AugmentConfig, OptimConfig
from image_classifier.data import LEFT_OUT, Augmented
from image_classifier.errors import UserError
from image_classifier.runtime.command_line import take_preset
from image_classifier.runtime.distributed import World
from image_classifier.tasks import TASKS
from image_classifier.tools.mixup.batches import (
    change_batches,
    mix_several,
    mixup_cutmix,
)


@pytest.mark.parametrize("knobs", [{"mixup": 1.0}, {"cutmix": 1.0}, {"mixup": 1.0, "cutmix": 1.0}])
def test_labels_are_mixed_as_the_images_are(knobs):
    for seed in range(20):
        # An image of class c has the value c everywhere, so the share of a value can be counted.
        labels, images = torch.arange(4), torch.arange(4.0).view(4, 1, 1, 1).repeat(1, 3, 12, 12)
        mix = partial(mixup_cutmix, augment=AugmentConfig(**knobs), num_classes=4)
        mixed, targets, _ = mix(Augmented(images.clone(), labels), chance=random.Random(seed))
        one_unread = Augmented(images, torch.tensor([0, 1, 2, LEFT_OUT]))
        _, of_some, _ = mix(one_unread, chance=random.Random(seed))
        assert torch.equal(of_some, targets * (torch.arange(4) < 3))
        torch.testing.assert_close(targets.sum(1), torch.ones(4))
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), targets @ torch.arange(4.0))
        assert (targets[:2, 2:] == 0).all()  # pairs are neighbors
        assert torch.equal(targets, targets.T)  # of which each has the other's share


@pytest.mark.parametrize("knobs", [{"mixup": 1.0}, {"cutmix": 1.0}])
@pytest.mark.parametrize("is_multi_label", [False, True])
def test_the_loss_of_a_mixed_image_is_the_mixed_loss_of_both(knobs, is_multi_label):
    labels, weights = torch.tensor([0, 1, 2, 0]), torch.tensor([0.5, 3, 0, 2])
    if is_multi_label:
        labels = one_hot(labels).to(torch.int8)
    optim = OptimConfig(label_smoothing=0.1)
    loss_of = TASKS["multi-label" if is_multi_label else "single-label"].loss(optim, 4)
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    batch = Augmented(torch.rand(4, 3, 12, 12), labels)
    for seed in range(5):
        mix = partial(mixup_cutmix, augment=AugmentConfig(**knobs), num_classes=3)
        # Which share is kept, by images that have the values 1 and 0.
        halves = torch.tensor([1.0, 0, 1, 0]).view(4, 1, 1, 1).expand(4, 1, 12, 12).clone()
        kept = mix(batch._replace(images=halves), chance=random.Random(seed)).images[0].mean()
        mixed = mix(batch._replace(weights=weights), chance=random.Random(seed))
        own = loss_of(logits, batch._replace(weights=weights))
        others = [1, 0, 3, 2]
        other = loss_of(logits, Augmented(batch.images, labels[others], weights[others]))
        torch.testing.assert_close(loss_of(logits, mixed), kept * own + (1 - kept) * other)


def test_images_of_weight_0_teach_nothing_when_they_are_mixed():
    images, labels = torch.rand(4, 3, 12, 12), torch.arange(4)
    batch = Augmented(images, labels, weights=torch.tensor([0.0, 1, 0, 0]))
    _, targets, weights = mixup_cutmix(batch, AugmentConfig(mixup=1.0), 4, random.Random(0))
    taught = (targets * weights[:, None]).sum(0)
    assert taught[1] > 0
    assert (taught[[0, 2, 3]] == 0).all()


# At a corner of the image three quarters of the box are outside.
BOXES = [(0.5, (3, 9, 6, 18)), (0.0, (0, 3, 0, 6)), (1.0, (9, 12, 18, 24))]


@pytest.mark.parametrize(("place", "box"), BOXES)
def test_a_box_of_cutmix_has_the_form_of_the_image_and_the_drawn_share(place, box):
    chance = SimpleNamespace(
        random=lambda: 0.0,
        betavariate=lambda *_: 0.75,
        uniform=lambda low, high: low + place * (high - low),
    )
    images = torch.arange(2.0).view(2, 1, 1, 1).repeat(1, 1, 12, 24)
    batch = Augmented(images, torch.arange(2))
    mixed, _, _ = mixup_cutmix(batch, AugmentConfig(cutmix=1.0), 2, chance)
    top, bottom, left, right = box
    expected = torch.zeros(12, 24)
    expected[top:bottom, left:right] = 1
    assert torch.equal(mixed[0, 0], expected)
    assert torch.equal(mixed[1, 0], 1 - expected)


@pytest.mark.parametrize("knob", ["mixup", "cutmix"])
def test_shares_are_drawn_by_the_alpha_that_is_given(knob):
    draw = Mock(return_value=0.75)
    chance = SimpleNamespace(random=lambda: 0.0, betavariate=draw, uniform=lambda low, _: low)
    batch = Augmented(torch.zeros(2, 1, 12, 24), torch.arange(2))
    mixup_cutmix(batch, AugmentConfig(**{knob: 0.4}), 2, chance)
    draw.assert_called_once_with(0.4, 0.4)


def test_with_both_on_some_steps_mix_and_others_paste_as_the_seed_decides():
    how = AugmentConfig(mixup=1.0, cutmix=1.0)
    data = SimpleNamespace(world=World(torch.device("cpu")), batch_size=2, num_classes=2)

    def is_pasted(seed, step):
        images = torch.arange(2.0).view(2, 1, 1, 1).repeat(1, 1, 12, 12)
        batch = Augmented(images, torch.arange(2))
        mixed, _, _ = change_batches(lambda batch, _: batch, how, data, seed)(batch, step)
        return bool((mixed % 1 == 0).all())

    kinds = [[is_pasted(seed, step) for step in range(20)] for seed in (0, 1, 0)]
    assert {*kinds[0]} == {*kinds[1]} == {False, True}
    assert kinds[0] == kinds[2] != kinds[1]


def test_of_mixed_labels_the_unknown_stay_unknown():
    labels = torch.tensor([[1, 0], [0, 0], [0, -1], [0, 1]], dtype=torch.int8)
    mixed = mix_several(labels, torch.arange(4) ^ 1, 0.75)
    assert mixed.tolist() == [[0.75, 0], [0.25, 0], [0, -1], [0, -1]]


def test_an_odd_number_of_images_is_refused(config):
    odd = changed(config, augment__mixup=0.2, data__batch_size=15)
    with pytest.raises(UserError, match="must leave each of the 1 processes an even number"):
        opened(odd, World(torch.device("cpu")))


def test_the_preset_for_photographs_from_scratch_mixes():
    _, preset = take_preset(["folder"], "shapes")
    assert (preset.augment.mixup, preset.augment.cutmix) == (0.4, 1.0)
    _, preset = take_preset(["finetune"], "shapes")
    assert (preset.augment.mixup, preset.augment.cutmix) == (0.0, 0.0)
