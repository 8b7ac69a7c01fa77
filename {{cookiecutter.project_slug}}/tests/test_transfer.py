"""Fine-tuning: which weights a run can begin with, and which of them are trained when."""

import re
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import changed
from safetensors.torch import save_file
from test_resume import assert_same, final, train_until
from torch import nn

from image_classifier import checkpoint
from image_classifier.config import ModelConfig
from image_classifier.errors import UserError
from image_classifier.models import (
    PretrainedWeights,
    build_model,
    load_pretrained,
    read_checkpoint,
)
from image_classifier.models.airbench import Airbench
from image_classifier.optim import build_optimizer, set_lr
from image_classifier.runtime.distributed import World
from image_classifier.train import train

CPU = World(torch.device("cpu"))
SMALL = ModelConfig(name="resnet9", width=8)
AIRBENCH = ModelConfig(name="airbench", width=8)
CLASSES = tuple("abcde")


def load(path, name="resnet9"):
    """The weights in a file, for a model of that name."""
    return load_pretrained(str(path), ModelConfig(name=name), CPU)


@pytest.fixture(scope="module")
def donor():
    """A model of 5 classes that has learned something."""
    return build_model(SMALL, 5, 32)


def by_torchvisions_script(weights, path):
    averaged = {f"module.{name}": w for name, w in weights.items()} | {
        "n_averaged": torch.tensor(7)
    }
    zeros = {name: torch.zeros_like(w) for name, w in weights.items()}
    torch.save({"model": zeros, "model_ema": averaged, "args": Namespace(lr=0.1)}, path)


def by_timms_script(weights, path):
    compiled = {f"_orig_mod.{name}": w for name, w in weights.items()}
    torch.save({"state_dict": compiled, "epoch": 3, "args": Namespace(lr=0.1)}, path)


FILES = {
    "w.pt": torch.save,
    "old.pth": partial(torch.save, _use_new_zipfile_serialization=False),  # as torchvision's are
    "w.safetensors": partial(save_file, metadata={"format": "pt"}),
}
SCRIPTS = {"torchvision.pth": by_torchvisions_script, "timm.pth": by_timms_script}


@pytest.mark.parametrize(("name", "save"), (FILES | SCRIPTS).items())
def test_weights_are_read_as_other_programs_save_them(donor, tmp_path, name, save):
    save(donor.state_dict(), tmp_path / name)
    model = build_model(SMALL, 5, 32)
    note = load(tmp_path / name).load_into(model, CLASSES)
    assert note == f"weights from {str(tmp_path / name)!a}"
    assert_same(model.state_dict(), donor.state_dict())
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    with pytest.raises(UserError, match=re.escape(f"{name}'")):
        load(tmp_path / name)


def test_a_last_layer_for_other_classes_is_new(donor):
    weights = PretrainedWeights("weights", donor.state_dict())
    model = build_model(SMALL, 7, 32)
    assert weights.load_into(model, CLASSES) == "weights; head is new, for other classes"
    assert_same(model.stem.state_dict(), donor.stem.state_dict())
    # As many classes, but others: what it knows of them is wrong.
    model = build_model(SMALL, 5, 32)
    before = model.head.weight.clone()
    others = replace(weights, classes=tuple("vwxyz"), mean=(0.5,) * 3, std=(0.5,) * 3)
    note = "weights; head is new, for other classes; images are normalized as for them"
    assert others.load_into(model, CLASSES) == note
    assert torch.equal(model.head.weight, before)


def test_weights_that_do_not_fit_say_what_to_do(donor, tmp_path):
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"w.pth' is no state dict or checkpoint: there"):
        load(tmp_path / "w.pth")
    with torch.device("meta"):
        large = build_model(ModelConfig(name="resnet18", stem="imagenet"), 5, 32)
        small = build_model(ModelConfig(name="resnet18"), 5, 32)
    for theirs, own, message in (
        (large, small, r"weights do not fit the model: size mismatch for conv1.weight.*model.stem"),
        (donor, build_model(AIRBENCH, 5, 32), r"only one of the two has \d+: head.bias, "),
    ):
        with pytest.raises(UserError, match=message):
            PretrainedWeights("weights", theirs.state_dict()).load_into(own, CLASSES)


def test_published_weights_are_downloaded_once_and_checked(tmp_path, monkeypatch):
    model = build_model(ModelConfig(name="squeezenet1_1"), 5, 64)
    asked = []

    def download(url, path, checksum, **_):
        asked.append((url, checksum))
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    for _ in range(2):
        found = load("pretrained", "squeezenet1_1")
    ((url, checksum),) = asked
    path = tmp_path / "checkpoints" / Path(url).name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"refusing to load '.*squeezenet.*': it is damaged"):
        load("pretrained", "squeezenet1_1")
    assert re.fullmatch(rf"https://.*-{checksum}\.pth", url)
    assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert found.load_into(model, CLASSES).endswith("as for them")
    monkeypatch.setattr(torch.hub, "download_url_to_file", Mock(side_effect=OSError("no route")))
    with pytest.raises(UserError, match=r"no route.*https://\S+/resnet18\S+\.pth.*--run.init-from"):
        load("pretrained", "resnet18")
    with pytest.raises(UserError, match="torchvision has no weights of airbench"):
        load("pretrained", "airbench")


def test_images_are_normalized_as_the_weights_learned_them(config, tmp_path):
    about = {"mean": "[0.1, 0.2, 0.3]", "std": "[0.4, 0.5, 0.6]", "classes": '["x"]'}
    model = build_model(config.model, 10, config.data.image_size)
    path = tmp_path / "w.safetensors"
    save_file(model.state_dict(), path, metadata=about | {"std": "[0.4]"})
    with pytest.raises(UserError, match="no images have the mean"):
        load(path)
    save_file(model.state_dict(), path, metadata=about)
    assert load(path).classes == ("x",)
    run = changed(config, optim__warmup_epochs=0.0, epochs=0.5, run__init_from=str(path))
    train(run)
    assert (final(run)["mean"], final(run)["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    path.unlink()
    train(run)  # resumes, with those of its own checkpoint
    save_file(model.state_dict(), path)
    assert load(path).mean is None


@pytest.fixture
def frozen(config, tmp_path):
    """A run that trains only the last layer in the first of its two epochs of four steps."""
    torch.save(build_model(SMALL, 10, 32).state_dict(), tmp_path / "w.pth")
    return changed(
        config,
        run__init_from=str(tmp_path / "w.pth"),
        model__name="resnet9",
        optim__frozen_epochs=1.0,
        optim__layer_decay=0.8,
        optim__ema_decay=0.9,
        optim__accumulate=2,
        run__save_every_steps=1,
    )


def test_only_the_last_layer_is_trained_until_the_backbone_is_unfrozen(frozen, capsys, monkeypatch):
    needs_grad, forward = [], nn.Conv2d.forward

    def look(layer, images):
        features = forward(layer, images)
        needs_grad.append(features.requires_grad)
        return features

    monkeypatch.setattr(nn.Conv2d, "forward", look)
    monkeypatch.setattr(checkpoint, "KEEP", 10)
    train(frozen)
    assert "the first epochs train only the last layer" in capsys.readouterr().out
    assert needs_grad.index(True) >= 8 * 4 * 2  # convolutions, steps, micro-batches in each
    start = torch.load(frozen.run.init_from, weights_only=True)
    before, after = (
        read_checkpoint(Path(frozen.run.dir, "checkpoints", f"step_0000000{step}.pt"))["state"]
        for step in (4, 5)
    )
    for state in (before["model"], before["ema"]):
        moved = {name for name, weight in state.items() if not torch.equal(weight, start[name])}
        assert moved == {"head.weight", "head.bias"}  # and no statistics of a BatchNorm
    assert not any(torch.equal(w, start[name]) for name, w in after["model"].items())


def test_a_run_interrupted_before_at_and_after_unfreezing_ends_as_an_unbroken_one(frozen, tmp_path):
    unbroken = changed(frozen, run__dir=str(tmp_path / "unbroken"))
    train(unbroken)
    for step in (2, 4):
        train_until(frozen, step, kill=False)
    train(frozen)
    assert_same(final(frozen), final(unbroken))


def test_lower_blocks_learn_more_slowly(donor, config):
    optimizer = build_optimizer(replace(config.optim, layer_decay=0.5), donor)
    assert set_lr(optimizer, 1.0) == 1.0
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == sorted(rates)
    assert rates[-4:] == [0.5, 0.5, 1.0, 1.0]
    assert rates[0] == 0.5 ** (len(rates) // 2 - 1)
    lowest = {weight for group in optimizer.param_groups[:2] for weight in group["params"]}
    assert donor.stem[0].weight in lowest


def test_a_run_resumes_with_the_first_layer_that_it_had(config, monkeypatch):
    fast = changed(config, model=AIRBENCH)
    scores = train(fast)
    monkeypatch.setattr(Airbench, "fit", lambda model, _: model.whiten.weight.data.zero_())
    assert train(fast).loss == scores.loss
