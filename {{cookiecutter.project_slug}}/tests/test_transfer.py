"""Fine-tuning: which weights a run can begin with, and which of them are trained when."""

import math
import re
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torchvision
from conftest import changed, logged
from safetensors.torch import save_file
from test_resume import assert_same, final
from torch import nn

from image_classifier.checkpoints.pretrained import (
    PretrainedWeights,
    load_pretrained,
    usual_normalization,
)
from image_classifier.config import Config, ModelConfig
from image_classifier.errors import UserError
from image_classifier.extensions import finding
from image_classifier.models import build_model, find_heads
from image_classifier.runtime.distributed import World
from image_classifier.train import train

CPU = World(torch.device("cpu"))

SMALL = ModelConfig(name="resnet9", width=8)
CLASSES = tuple("abcde")
DONOR = build_model(SMALL, len(CLASSES), 32)  # of the weights


def load(path, name="resnet9"):
    """The weights in a file, for a model of that name."""
    return load_pretrained(changed(Config(), run__init_from=str(path), model__name=name), CPU)


def by_torchvisions_script(weights, path):
    averaged = {f"module.{name}": weight for name, weight in weights.items()}
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    saved = {"model": zeros, "model_ema": averaged | {"n_averaged": torch.tensor(7)}}
    torch.save(saved | {"args": Namespace(lr=0.1)}, path)


def by_timms_script(weights, path):
    compiled = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    torch.save({"state_dict": compiled, "epoch": 3, "args": Namespace(lr=0.1)}, path)


by_safetensors = partial(save_file, metadata={"format": "pt"})
by_old_torch = partial(torch.save, _use_new_zipfile_serialization=False)  # as torchvision's are
OTHERS = [torch.save, by_old_torch, by_safetensors, by_torchvisions_script, by_timms_script]


@pytest.mark.parametrize("save", OTHERS)
def test_weights_are_read_as_other_programs_save_them(tmp_path, save):
    path = tmp_path / ("w.safetensors" if save is by_safetensors else "w.pth")
    save(DONOR.state_dict(), path)
    model = build_model(SMALL, 5, 32)
    assert load(path).load_into(model, CLASSES) == f"weights from {str(path)!a}"
    assert_same(model.state_dict(), DONOR.state_dict())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=re.escape(f"{path.name}'")):
        load(path)


# Those of as many classes, but of others, are wrong.
@pytest.mark.parametrize(("num_classes", "known"), [(7, ()), (5, tuple("vwxyz"))])
def test_a_last_layer_for_other_classes_is_new(num_classes, known):
    model = build_model(SMALL, num_classes, 32)
    before = model.head.weight.clone()
    note = PretrainedWeights("weights", DONOR.state_dict(), known).load_into(model, CLASSES)
    assert note == "weights; head is new"
    assert torch.equal(model.head.weight, before)
    assert_same(model.stem.state_dict(), DONOR.stem.state_dict())


def test_googlenet_learns_from_torchvisions_weights_without_the_heads_for_training():
    theirs = torchvision.models.googlenet(num_classes=5, transform_input=True, init_weights=True)
    model = build_model(ModelConfig(name="googlenet"), 5, 96)
    weights = PretrainedWeights("weights", theirs.state_dict(), CLASSES)
    assert weights.load_into(model, CLASSES) == "weights"
    usual = torchvision.models.GoogLeNet_Weights.DEFAULT.transforms()
    images = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    expected, given = (
        (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        for mean, std in ((usual.mean, usual.std), usual_normalization("googlenet"))
    )
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(given), theirs.eval()(expected))


def test_all_last_layers_that_timm_names_are_new():
    class Volo(nn.Module):
        pretrained_cfg = {"classifier": ("head", "aux_head")}  # noqa: RUF012

        def __init__(self, num_classes):
            super().__init__()
            self.norm = nn.Linear(7, num_classes)
            self.head = nn.Linear(7, num_classes)
            self.aux_head = nn.Linear(7, num_classes)

        def get_classifier(self):
            return self.head

    model = Volo(5)
    assert {*find_heads(model)} == {model.head, model.aux_head}
    weights = {name: w for name, w in Volo(9).state_dict().items() if "head" in name}
    found = PretrainedWeights("weights", weights | model.norm.state_dict(prefix="norm."))
    assert found.load_into(model, CLASSES) == "weights; aux_head is new"


def test_weights_that_do_not_fit_say_what_to_do(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"w.pth' is no state dict or checkpoint: there"):
        load(tmp_path / "w.pth")
    weights = PretrainedWeights("weights", DONOR.state_dict())
    for model, message in (
        (replace(SMALL, width=16), "weights do not fit.*: size mismatch for stem.*--model.name"),
        (replace(SMALL, name="resnet18"), r"only one of the two has \d+: bn1.bias, "),
    ):
        with pytest.raises(UserError, match=message):
            weights.load_into(build_model(model, 5, 32), CLASSES)


def test_published_weights_are_downloaded_once_and_checked(tmp_path, monkeypatch):
    published = build_model(ModelConfig(name="squeezenet1_1"), 5, 64)
    write = partial(by_old_torch, published.state_dict())
    download = Mock(side_effect=lambda _, path, *__, **___: write(path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    for _ in range(2):
        found = load("pretrained", "squeezenet1_1")
    assert found.mean_std == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert found.load_into(published, CLASSES).endswith("as for them")
    download.assert_called_once()
    url, path, checksum = download.call_args.args
    assert re.fullmatch(rf"https://.*-{checksum}\.pth", url)
    Path(path).write_bytes(Path(path).read_bytes()[:-9])
    download.side_effect = OSError("no route")
    for name, message in (
        ("squeezenet1_1", r"refusing to load '.*squeezenet.*': it is damaged"),
        ("resnet18", r"no route.*https://\S+/resnet18\S+\.pth.*--run.init-from"),
        ("resnet9", "torchvision has no weights of resnet9"),
    ):
        with pytest.raises(UserError, match=message):
            load("pretrained", name)


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


def test_without_a_tool_that_fits_it_a_new_last_layer_begins_at_zero(
    config, tmp_path, monkeypatch, capsys
):
    find = finding.find_tools
    monkeypatch.setattr(finding, "find_tools", lambda name: {} if name == "head" else find(name))
    save_file(build_model(config.model, 7, 32).state_dict(), tmp_path / "w.safetensors")
    config = changed(config, run__init_from=str(tmp_path / "w.safetensors"))
    with pytest.raises(UserError, match="--epochs 0 needs a tool that is not here"):
        train(changed(config, epochs=0.0))
    train(config)
    first = next(row for row in logged(config.run.dir) if "val/loss" in row)
    assert (first["step"], first["val/loss"]) == (0, pytest.approx(math.log(10)))
    assert "last layer at zero: top-1 " in capsys.readouterr().out


def test_a_run_that_has_made_no_step_begins_with_its_pretrained_weights_again(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    saved = {"mean": [0.5] * 3, "std": [0.5] * 3}
    config = changed(Config(), run__init_from=str(tmp_path / "w.safetensors"))
    found = [load_pretrained(config, CPU, saved | {"state": {"step": step}}) for step in (0, 1)]
    assert [[*one.weights] for one in found] == [["w"], []]
