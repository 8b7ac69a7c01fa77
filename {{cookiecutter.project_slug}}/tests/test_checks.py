"""Classic mistakes, each planted for real: an error comes before the first step."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import changed
from torch import nn

from image_classifier import train as train_module
from image_classifier.cli import main
from image_classifier.config import Config
from image_classifier.data.datasets import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.errors import UserError
from image_classifier.presets import PRESETS
from image_classifier.runtime.command_line import (
    parse,
    take_preset,
)
from image_classifier.train import train

MISFITS = {  # by what is said of them
    r"can.t take images of 24 pixels, see --data.test-size: .*mat1": [
        nn.Flatten(),
        nn.Linear(3 * 32**2, 10),
    ],
    r"gives .7,. values.* 10 classes": [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 7)],
}


@pytest.mark.parametrize("said", MISFITS)
def test_sizes_and_heads_that_do_not_fit_are_refused(config, monkeypatch, said):
    build = lambda *_, **__: nn.Sequential(*MISFITS[said])  # noqa: E731
    monkeypatch.setattr(train_module, "build_model", build)
    with pytest.raises(UserError, match=said):
        train(changed(config, data__test_size=24))


def plant(monkeypatch, config, **wrong):
    """A run with a dataset of its own, whose splits have wrong fields."""
    own = lambda data, split: replace(shapes(data, split), **wrong.get(split, {}))  # noqa: E731
    monkeypatch.setitem(DATASETS, "mine", own)
    return changed(config, data__name="mine")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"train": {"labels": torch.arange(64)}}, r"outside 0 \.\. 9.*is 10, of image 10"),
        ({"val": {"labels": -torch.ones(64).long()}}, r"outside 0 \.\. 9.*is -1, of image 0"),
        ({"val": {"classes": tuple("jihgfedcba")}}, "the classes of the validation images"),
    ],
)
def test_a_run_with_wrong_labels_is_refused_and_deletes_nothing(config, monkeypatch, wrong, said):
    rows = Path(config.run.dir, "metrics.jsonl")
    rows.parent.mkdir()
    rows.write_text("of an earlier run")
    with pytest.raises(UserError, match=said):
        train(changed(plant(monkeypatch, config, **wrong), run__fresh=True))
    assert rows.read_text() == "of an earlier run"


def test_a_run_keeps_the_normalization_that_it_learned_with(config, monkeypatch):
    train(plant(monkeypatch, config, train={"mean": (0.4, 0.4, 0.4)}))
    with pytest.raises(UserError, match=r"cannot continue .*normalized with a mean of"):
        train(plant(monkeypatch, config, train={"mean": (0.3, 0.3, 0.3)}))


def typed(*words):
    """The config that words of a command line mean."""
    _, preset = take_preset(words := [*words], "shapes")
    return parse(Config, words, prog="train", about="", default=preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_counts_in_epochs_of_the_run(preset):
    made, config = PRESETS[preset](), typed(preset, "--epochs=1")
    share = min(1, 1 / made.epochs)
    assert config.optim.warmup_epochs == pytest.approx(share * made.optim.warmup_epochs, abs=1e-6)
    assert config.run.evaluate_every_epochs <= 1


def test_knobs_that_are_given_are_not_shrunk(capsys):
    config = typed("--epochs=2", "--optim.warmup-epochs=1.5", "--run.evaluate-every-epochs=0.5")
    found = (config.epochs, config.optim.warmup_epochs, config.run.evaluate_every_epochs)
    assert found == (2, 1.5, 0.5)
    _, whole = take_preset(["folder"], "shapes")
    for epochs in ("many", "0", "-2", "nan", "inf", ""):
        assert take_preset(["folder", "--epochs", epochs], "shapes")[1] == whole
    with pytest.raises(SystemExit):
        main(["train", "finetune", "--epochs", "2", "--help"])
    assert re.search(r"--optim.warmup-epochs[^()]*\(default:[\s│]+0.125\)", capsys.readouterr().out)
