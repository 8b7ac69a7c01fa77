"""Classic mistakes, each planted for real: an error comes before the first step."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed
from torch import nn

from image_classifier import cli, models
from image_classifier import train as train_module
from image_classifier.cli import main
from image_classifier.config import Config, DataConfig
from image_classifier.data import datasets
from image_classifier.data.datasets import DATASETS
from image_classifier.data.datasets.shapes import shapes
from image_classifier.errors import UserError
from image_classifier.extensions import finding
from image_classifier.presets import PRESETS
from image_classifier.runtime import command_line
from image_classifier.runtime.command_line import (
    parse,
    take_preset,
)
from image_classifier.train import train


class Pair(nn.Module):
    """Gives logits, and something else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images):
        """(batch, 3, side, side) -> two of them."""
        return images.flatten(1)[:, :10] * self.weight, images


MISFITS = {  # by what is said of them
    r"can.t take images of 24 pixels, see --data.test-size: .*mat1": [
        nn.Flatten(),
        nn.Linear(3 * 32**2, 10),
    ],
    r"^the network returns a tuple: it should return logits$": [Pair()],
    r"gives .7,. values.* 10 classes": [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 7)],
}


@pytest.mark.parametrize("said", MISFITS)
def test_sizes_and_heads_that_do_not_fit_are_refused(config, monkeypatch, said):
    build = lambda *_, **__: nn.Sequential(*MISFITS[said])  # noqa: E731
    monkeypatch.setattr(train_module, "build_model", build)
    with pytest.raises(UserError, match=said):
        train(changed(config, data__test_size=24))


def test_a_mistake_in_the_code_of_a_network_is_no_size_of_an_image(config, monkeypatch):
    network = Pair()
    network.scale = network.weight
    del network.weight
    monkeypatch.setattr(train_module, "build_model", lambda *_, **__: nn.Sequential(network))
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'weight'"):
        train(config)


def test_a_change_of_a_tool_that_returns_nothing_is_named(monkeypatch):
    monkeypatch.setattr(finding, "functions", lambda *_: [lambda *_: None])
    with pytest.raises(UserError, match=r"test_checks\.change_loss gave None, not a Config$"):
        finding.chained("loss", "change_loss", Config())
    assert finding.chained("order", "change_weights", None) is None


def test_what_a_tool_adds_under_a_name_that_is_there_is_refused(monkeypatch):
    tool = SimpleNamespace(MODELS={"resnet9": None}, DATASETS={"folder": None}, main=None)
    tool.PRESETS = (PRESETS["smoke"],)
    there = [
        (models, "models_by_name", "model resnet9"),
        (command_line, "all_presets", "preset smoke"),
        (datasets, "find_dataset", "dataset folder"),
    ]
    for module, function, said in there:
        monkeypatch.setattr(module, "find_tools", lambda _: {"mine": tool})
        given = [DataConfig(name="folder")] * (function == "find_dataset")
        with pytest.raises(UserError, match=f"a tool adds the {said}, which is there: rename it"):
            getattr(module, function)(*given)
    tool.main = plant
    monkeypatch.setattr(cli, "find_commands", lambda: {"train": tool})
    said = f"a tool adds the command train, which is there: rename it in {__name__}"
    with pytest.raises(UserError, match=said):
        cli.commands()


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
