"""Mistakes that a run can survive are warned of before the first step."""

from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed
from torch import nn

from image_classifier.data import EvalData, TrainData
from image_classifier.data.datasets import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.models import build_model
from image_classifier.presets import PRESETS, shortened, smoke
from image_classifier.runtime.distributed import World
from image_classifier.tools.sanity_checks.observer import (
    imbalanced_classes,
    open_observer,
    unusual_lr,
)
from image_classifier.tracking import Setup
from image_classifier.train import train

CPU = World(torch.device("cpu"))
PUBLISHED = [  # optimizer, learning rate, global batch: torchvision's recipes, and a few others
    ("sgd", 0.1, 256),  # ResNet, https://arxiv.org/abs/1512.03385
    ("sgd", 0.8, 1024),  # RegNet
    ("sgd", 0.01, 256),  # VGG, AlexNet
    ("sgd", 0.4, 512),  # https://myrtle.ai/learn/how-to-train-your-resnet/
    ("adamw", 3e-3, 4096),  # ViT
    ("adamw", 5e-4, 512),  # DeiT
    ("muon", 1e-3, 1024),  # AdamW's, which it is scaled to
]
Check = Callable[..., tuple[str, ...]]


@pytest.fixture(scope="module")
def check():
    """The warnings for a run of smoke with other options, another model or number of processes."""
    few = changed(smoke(), epochs=2, data__limit=64, data__batch_size=16)
    data = TrainData(few, CPU), EvalData(few.data, "val", CPU)

    def check(config=None, model=None, processes=1, **changes):
        config = changed(config or few, **changes)
        model = model or build_model(config.model, 10, config.data.image_size)
        world = replace(CPU, size=processes)
        return open_observer(Setup(config, world, *data, model, None, 0)).warnings

    return check


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_no_warnings_in_shorter_runs_either(check, preset):
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 10, 1), nn.BatchNorm2d(10), pool)
    made = PRESETS[preset]()
    assert check(made, model) == check(shortened(made, 1), model, epochs=1.0) == ()


@pytest.mark.parametrize(("name", "lr", "batch_size"), PUBLISHED)
def test_a_learning_rate_that_is_far_from_published_ones_is_said(name, lr, batch_size):
    config = changed(smoke(), optim__name=name, optim__lr=lr, data__batch_size=batch_size)
    assert unusual_lr(config) == ""
    for factor in (500, 0.002, 0):
        far = changed(config, optim__lr=factor * lr)
        warning = unusual_lr(far)
        assert warning.startswith(f"--optim.lr {far.optim.lr:g} is ")
        assert unusual_lr(changed(config, optim__lr=float(warning.split()[-1]))) == ""
        # Pretrained weights may be moved slowly.
        assert bool(unusual_lr(changed(far, run__init_from="x"))) == (factor != 0.002)


def test_micro_batches_too_small_for_batchnorm_are_said(check):
    few = {"optim__accumulate": 2, "processes": 2}
    (line,) = check(model__name="resnet9", **few)
    assert "BatchNorm takes its statistics from 4 of the 16 images" in line
    assert check(model__name="resnet9", optim__accumulate=2) == ()
    assert check(model__name="resnet9_gn", **few) == ()


def test_rare_classes_are_said():
    labels = torch.tensor([0] * 40 + [1] * 3)
    skewed = SimpleNamespace(labels=labels)
    line = "the largest class has 40 training images and the smallest 3."
    assert imbalanced_classes(smoke(), skewed).startswith(line)
    assert imbalanced_classes(changed(smoke(), data__balance="loss"), skewed) == ""
    assert imbalanced_classes(smoke(), SimpleNamespace(labels=labels[36:])) == ""


def test_a_run_says_its_mistakes_and_goes_on(config, monkeypatch, capsys):
    def mine(data, split):
        mean = (0.3, 0.3, 0.3) if split == "val" else (0.5, 0.5, 0.5)
        return replace(shapes(data, split), mean=mean)

    monkeypatch.setitem(DATASETS, "mine", mine)
    config = changed(config, data__name="mine", optim__lr=60.0, optim__momentum=0.0)
    train(changed(config, epochs=1, run__trackers=()))
    printed = capsys.readouterr().out
    found = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert ["lr 60" in found[0], "mean" in found[1], len(found)] == [True, True, 2]
    page = Path(config.run.dir, "report.html")
    for line in found if page.exists() else ():  # `tools/report` may be deleted
        assert f">{escape(line.removeprefix('warning: '))}</p>" in page.read_text()
