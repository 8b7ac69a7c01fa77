"""Classes that differ in size are seen, or count, alike."""

from argparse import Namespace
from dataclasses import replace

import pytest
import test_fake_gpu
import torch
from conftest import changed, mixed, write_photo
from test_fake_gpu import augmented, of_several, trained
from test_order import opened, seen
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from image_classifier.config import Config
from image_classifier.data import Augmented, Source
from image_classifier.data.datasets import DATASETS
from image_classifier.data.loader import TrainData
from image_classifier.errors import UserError
from image_classifier.runtime.distributed import World
from image_classifier.tasks import build_loss, class_loss
from image_classifier.tools.balance.order import balanced_order_at

gpu = test_fake_gpu.gpu  # a fixture
CPU = World(torch.device("cpu"))
PARTS = (0, 4), (4, 6)  # of six images


@pytest.fixture
def skewed(on_photos, photos, tmp_path):
    """A balanced run on photographs of nine ants and three bees."""
    for number in range(12):
        name = "ant" if number < 9 else "bee"
        write_photo(tmp_path / "train" / name / f"{number}.jpg", number)
    (tmp_path / "val").symlink_to(photos / "val")
    return changed(on_photos, data__root=str(tmp_path), data__workers=0, data__balance="sampling")


def test_each_class_is_drawn_equally_often():
    labels = torch.tensor([0] * 40 + [2] * 17 + [3] * 7)  # 64 images, and none of class 1
    drawn, other = (balanced_order_at(1, epoch, labels) for epoch in (2, 3))
    assert sorted(labels[drawn % 64].bincount().tolist()) == [0, 21, 21, 22]
    times = (drawn % 64).bincount(minlength=64)
    assert times[:40].max() == 1  # a large class gives other images each time
    assert {*times[57:].tolist()} <= {3, 4}  # a small one all, equally often
    assert len(drawn.unique()) == len(drawn)  # and each of them with a number of its own
    assert not torch.equal(drawn, other)


def test_balanced_batches_are_the_same_from_any_step_however_they_are_loaded(skewed):
    resident = seen(changed(skewed, data__where="device"))
    assert seen(changed(skewed, data__where="stream", data__workers=2), 5) == resident[5:]


def test_an_image_that_comes_again_is_cropped_anew(skewed):
    one_batch = changed(skewed, augment__crop="resized", augment__flip="none", data__batch_size=12)
    (batch,) = TrainData(one_batch, CPU).batches(0, 1)
    assert sorted(batch.indices[batch.labels == 1].tolist()) == [9, 9, 10, 10, 11, 11]
    assert len({image.numpy().tobytes() for image in batch.pixels[batch.labels == 1]}) == 6


def test_rare_classes_count_for_more_in_a_loss_whose_parts_add_up(skewed):
    data = TrainData(changed(skewed, data__balance="loss"), CPU)
    assert data.weights.tolist() == pytest.approx([12 / 2 / 9] * 9 + [12 / 2 / 3] * 3)
    assert TrainData(skewed, CPU).weights is None
    data.source = replace(data.source, weights=torch.tensor([1.0] * 11 + [2.0]))
    weights = data.image_weights()  # an image's own, too
    assert weights[11] / weights[10] == pytest.approx(2)
    assert weights.mean() == pytest.approx(1)
    labels, weights = torch.tensor([0, 0, 1, 1, 1, 0]), weights[6:]
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    loss_of = class_loss(replace(skewed.optim, label_smoothing=0.1), 6)
    each = cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    expected = pytest.approx(sum(weights * each) / 6)
    for targets in (labels, one_hot(labels, 3).float()):
        batch = Augmented(None, targets, weights)
        found = [loss_of(logits[start:stop], batch.part(start, stop)) for start, stop in PARTS]
        assert sum(found) == expected


@pytest.mark.parametrize("where", ["device", "host", "stream"])
@pytest.mark.parametrize("knobs", [{}, mixed(mixup=1.0), mixed(cutmix=1.0)])
def test_each_image_has_its_weight_when_it_reaches_the_model(skewed, where, knobs):
    config = changed(skewed, data__balance="loss", data__where=where, **knobs)
    data, _, augment = opened(config, CPU)
    of_class = torch.tensor([12 / 2 / 9, 12 / 2 / 3])
    for step, batch in enumerate(data.batches(0, 3)):
        _, labels, weights = augment(batch, step)
        shares = labels if labels.is_floating_point() else one_hot(labels, 2).float()
        shown = weights[:, None] * shares / of_class  # how much of each class is in an image
        torch.testing.assert_close(shown.sum(1), torch.ones(4))


def test_rare_ones_of_several_labels_count_for_more():
    labels = torch.tensor([[1, 0], [0, 0], [0, -1], [0, 1]], dtype=torch.int8)
    pixels = torch.zeros((4, 8, 8, 3), dtype=torch.uint8)
    source = Source(labels, ("ant", "bee"), pixels)
    config = changed(Config(), model__task="multi-label", data__balance="loss")
    logits, weight = torch.randn(4, 2), torch.tensor([3.0, 2.0])
    each = binary_cross_entropy_with_logits(
        logits, labels.clamp(min=0).float(), reduction="none", pos_weight=weight
    )
    known = labels >= 0
    expected = ((each * known).sum(1) / known.sum(1)).mean()
    loss_fn = build_loss(config, Namespace(source=source), 4).of
    assert loss_fn(logits, Augmented(None, labels)) == pytest.approx(expected.item())


def test_several_labels_cannot_be_shown_equally_often(config, monkeypatch):
    labels = torch.eye(2, dtype=torch.int8)[torch.arange(64) % 2]
    pixels = torch.zeros((64, 8, 8, 3), dtype=torch.uint8)
    monkeypatch.setitem(DATASETS, "rows", lambda *_: Source(labels, ("ant", "bee"), pixels))
    config = changed(config, data__name="rows", model__task="multi-label")
    with pytest.raises(UserError, match=r"--data\.balance sampling shows each class equally often"):
        TrainData(changed(config, data__balance="sampling"), CPU)


def test_without_steps_no_image_is_chosen(refusal):
    words = "train", "smoke", "--epochs", 0, "--data.balance", "sampling"
    assert "--data.balance sampling needs --epochs above 0; loss does not" in refusal(*words)


def test_which_classes_come_once_more_differs_from_epoch_to_epoch():
    labels = torch.arange(10) % 3
    orders = (balanced_order_at(0, epoch, labels) % 10 for epoch in range(20))
    assert {int(labels[order].bincount().argmax()) for order in orders} == {0, 1, 2}


def test_labels_that_all_images_have_or_of_which_nothing_is_known_have_a_finite_weight():
    labels = torch.tensor([[1, -1], [1, -1]], dtype=torch.int8)
    source = Source(labels, ("ant", "bee"), torch.zeros((2, 8, 8, 3), dtype=torch.uint8))
    config = changed(Config(), model__task="multi-label", data__balance="loss")
    logits = torch.zeros(2, 2, requires_grad=True)
    build_loss(config, Namespace(source=source), 2).of(logits, Augmented(None, labels)).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, 0] < 0).all()  # that they have it is still learned


@pytest.mark.parametrize("balance", ["sampling", "loss"])
def test_balanced_classes_stay_on_the_device(gpu, config, balance):
    config = changed(config, data__balance=balance)
    weights = augmented(gpu, config).weights
    assert (weights is not None) == (balance == "loss")
    trained(gpu, config)


def test_weights_of_several_labels_are_copied_to_the_device_once(gpu, config, monkeypatch):
    monkeypatch.setitem(DATASETS, "rows", of_several)
    config = changed(config, data__name="rows", model__task="multi-label")
    trained(gpu, changed(config, data__balance="loss"))
