"""Classes that differ in size, and runs that end when they get no better."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import changed, run_ranks
from safetensors import safe_open
from test_order import joined, seen
from torch.nn.functional import one_hot

from image_classifier import evaluate as evaluate_module
from image_classifier import train as train_module
from image_classifier.data.datasets import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.data.loader import TrainData
from image_classifier.optim import build_loss
from image_classifier.runtime.distributed import World
from image_classifier.runtime.seeding import balanced_order_at
from image_classifier.train import train

CPU = World(torch.device("cpu"))
SKEWED = torch.tensor([0] * 40 + [2] * 17 + [3] * 7)  # 64 images, and none of class 1


def mine(data, split):
    """Images of four classes, most of them of the first, and none of the second."""
    source = shapes(data, split)
    pixels = source.pixels[: len(SKEWED)]
    return replace(source, labels=SKEWED, pixels=pixels, classes=tuple("abcd"))


def seen_on_mine(config):
    """What a rank sees of them."""
    DATASETS["mine"] = mine
    return seen(config)


@pytest.fixture
def skewed(config, monkeypatch):
    """A run on such images."""
    monkeypatch.setitem(DATASETS, "mine", mine)
    return changed(config, data__name="mine", data__batch_size=8)


def test_each_class_is_drawn_equally_often():
    drawn = balanced_order_at(seed=1, epoch=2, labels=SKEWED)
    images = drawn % len(SKEWED)
    assert sorted(SKEWED[images].bincount().tolist()) == [0, 21, 21, 22]
    times = images.bincount(minlength=64)
    assert times[:40].max() == 1  # a large class gives other images each time
    assert {*times[57:].tolist()} <= {3, 4}  # a small one all, equally often
    assert len(drawn.unique()) == len(drawn)  # and each of them with a number of its own
    assert not torch.equal(drawn, balanced_order_at(seed=1, epoch=3, labels=SKEWED))


def test_balanced_batches_are_the_same_on_any_ranks_and_workers(skewed):
    skewed = changed(skewed, data__balance="sampling")
    resident = seen(skewed)
    assert seen(skewed, 5, 8) == resident[5:]
    assert seen(changed(skewed, data__where="stream", data__workers=2)) == resident
    ranks = run_ranks(2, seen_on_mine, skewed)
    for step, (indices, digests) in enumerate(resident):
        assert joined(rank[step][0] for rank in ranks) == indices
        assert joined(rank[step][1] for rank in ranks) == digests


def test_an_image_that_comes_again_is_cropped_anew(on_photos):
    one_batch = changed(on_photos, data__batch_size=12, data__workers=0, data__balance="sampling")
    data = TrainData(changed(one_batch, augment__crop="resized", augment__flip="none"), CPU)
    data.source = replace(data.source, labels=torch.tensor([0] * 11 + [1]))
    data.loader.samples.source = data.source
    data.loader.sampler.labels = data.source.labels
    (batch,) = data.batches(0, 1)
    rare = batch.pixels[batch.labels == 1]
    assert len(rare) == 6
    assert len({image.numpy().tobytes() for image in rare}) == 6
    assert {*batch.indices[batch.labels == 1].tolist()} == {11}


def test_rare_classes_count_for_more_in_the_loss(skewed):
    weights = TrainData(changed(skewed, data__balance="loss"), CPU).class_weights
    assert weights[SKEWED].mean() == pytest.approx(1.0)
    assert weights.tolist() == pytest.approx([64 / 3 / 40, 0, 64 / 3 / 17, 64 / 3 / 7])
    assert TrainData(skewed, CPU).class_weights is None


def test_weighted_losses_of_parts_add_up(config):
    optim = replace(config.optim, label_smoothing=0.1)
    weights = torch.tensor([0.5, 1.0, 2.0])
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 0, 1, 2, 2, 0])
    loss_of, plain = build_loss(optim, 6, weights), build_loss(optim, 1)
    whole = loss_of(logits, labels)
    each = [plain(logits[n : n + 1], labels[n : n + 1]) for n in range(6)]
    assert whole == pytest.approx(sum(weights[labels] * torch.stack(each)) / 6)
    assert loss_of(logits[:4], labels[:4]) + loss_of(logits[4:], labels[4:]) == pytest.approx(whole)
    assert loss_of(logits, one_hot(labels, 3).float()) == pytest.approx(whole)


def test_a_run_ends_when_it_gets_no_better(config, monkeypatch):
    config = changed(config, epochs=8, run__patience=2, run__save_every_steps=100)
    top1 = iter((0.2, 0.5, 0.4, 0.5, 0.9))
    evaluate = evaluate_module.evaluate

    def planned(*arguments):
        return replace(evaluate(*arguments), top1=next(top1))

    monkeypatch.setattr(train_module, "evaluate", planned)
    train(config)
    folder = Path(config.run.dir)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"]) == ("done", 16)
    assert "no evaluation of 2 was better than that of step 8, top-1 50.00%" in status["message"]
    with safe_open(folder / "predictions.safetensors", "pt") as file:
        assert file.metadata()["step"] == "16"


def test_all_ranks_end_at_once(config):
    run_ranks(2, train, changed(config, epochs=6, run__patience=1, optim__lr=0.0))
    assert json.loads(Path(config.run.dir, "status.json").read_text())["step"] == 8
