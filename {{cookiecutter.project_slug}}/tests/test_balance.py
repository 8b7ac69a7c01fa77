"""Classes that differ in size, and runs that end when they get no better."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import changed, run_ranks, write_photo
from safetensors import safe_open
from test_faults import status
from test_order import opened, seen
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from image_classifier import train as train_module
from image_classifier.data import Augmented
from image_classifier.data.loader import TrainData
from image_classifier.precision import Precision
from image_classifier.runtime.distributed import World
from image_classifier.runtime.seeding import balanced_order_at
from image_classifier.tasks import Loss, class_loss

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
@pytest.mark.parametrize("knobs", [{}, {"augment__mixup": 1.0}, {"augment__cutmix": 1.0}])
def test_each_image_has_its_weight_when_it_reaches_the_model(skewed, where, knobs):
    config = changed(skewed, data__balance="loss", data__where=where, **knobs)
    data, _, augment = opened(config, CPU)
    of_class = torch.tensor([12 / 2 / 9, 12 / 2 / 3])
    for step, batch in enumerate(data.batches(0, 3)):
        _, labels, weights = augment(batch, step)
        shares = labels if labels.is_floating_point() else one_hot(labels, 2).float()
        torch.testing.assert_close(weights, shares @ of_class)


def test_each_micro_batch_has_the_weights_of_its_images(config):
    model, given = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), []

    def loss_fn(logits, part):
        _, targets, weights = part
        given.append((targets.tolist(), (10 * weights).int().tolist()))
        return (logits.sum(1) * weights).sum()

    batch = Augmented(torch.ones(5, 3, 2, 2), torch.arange(5), torch.arange(5) / 2)
    precision = Precision("fp32", config.compute, config.optim, CPU.device)
    train_module.train_step(model, batch, Loss(loss_fn), precision, 2)
    assert given == [([0, 1], [0, 5]), ([2, 3], [10, 15]), ([4], [20])]


def train_with_planned_scores(config):
    """Train, where the second evaluation is better than the first, and the next two are not."""
    top1, evaluate = iter((0.2, 0.5, 0.4, 0.5, 0.9)), train_module.evaluate
    train_module.evaluate = lambda *words: replace(
        found := evaluate(*words), known=found.known | {"top1": next(top1)}
    )
    train_module.train(config)


def test_a_run_ends_on_all_ranks_when_it_gets_no_better(config):
    run_ranks(2, train_with_planned_scores, changed(config, epochs=8, run__patience=2))
    found = status(config)
    assert (found["state"], found["step"]) == ("done", 16)
    assert (
        "no evaluation of 2 was better; best.pt has the weights of step 8: top-1 50.00%"
        in found["message"]
    )
    with safe_open(Path(config.run.dir, "predictions.safetensors"), "pt") as file:
        assert json.loads(file.metadata()["about"])["step"] == 8
