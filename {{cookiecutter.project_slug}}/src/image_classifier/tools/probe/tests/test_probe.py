"""The command `probe`: its checkpoint gives its scores, and features are computed once."""

import json
import os
import re
import shutil

import pytest
import torch
from conftest import changed, logged
from safetensors.torch import save_file

from image_classifier import train as train_module
from image_classifier.checkpoints import load_model
from image_classifier.checkpoints.pretrained import (
    load_pretrained,
)
from image_classifier.checkpoints.reading import load_best
from image_classifier.cli import commands, main
from image_classifier.config import ComputeConfig, ModelConfig
from image_classifier.data import EvalData
from image_classifier.evaluate import evaluate
from image_classifier.extensions import find_tool
from image_classifier.models import build_model, find_head
from image_classifier.runtime.distributed import World

features = find_tool("features", "linear-probe")
pytestmark = pytest.mark.skipif(features is None, reason="needs the tool linear-probe")
HEADS = [()] + [("--model.head", "layers")] * bool(find_tool("network", "head-layers"))
AIRBENCH = ["airbench"] * bool(find_tool("models", "cifar"))  # its head has no bias


@pytest.fixture
def probe(photos, tmp_path):
    """A function that probes weights on a copy of the photographs, and returns the run folder."""
    root, folder = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "probe"

    def run(weights, *words, is_fresh=True):
        small = "smoke --data.name folder --data.limit 0 --data.batch-size 4 --run.trackers"
        small += " --run.fresh" * is_fresh
        words = [*small.split(), "--data.root", root, "--run.init-from", weights, *words]
        assert main(["probe", *map(str, words), "--run.dir", str(folder)]) == 0
        return folder

    return run


@pytest.fixture
def files(tmp_path):
    """A function that saves random weights of a small network, and returns the file."""

    def save(name, seed=0):
        torch.manual_seed(seed)
        path, model = tmp_path / f"{name}-{seed}.safetensors", ModelConfig(name=name, width=8)
        save_file(build_model(model, 10, 32).state_dict(), path)
        return path

    return save


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("sees", HEADS)
@pytest.mark.parametrize("name", ["resnet9_gn", *AIRBENCH])
def test_a_probe_is_a_run_whose_checkpoint_has_its_scores(
    name, sees, *, probe, files, photos, capsys
):
    folder = probe(files(name), "--model.name", name, "--augment.tta", "flip", *sees)
    said, (row,) = capsys.readouterr().out, logged(folder)
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    assert f"linear probe: top-1 {row['val/top1']:.2%}" in said
    world = World(torch.device("cpu"))
    trained = load_model(str(folder), ComputeConfig(device="cpu"), world)
    data = EvalData(trained.config.data, "val", world)
    scores = evaluate(trained.model, data, trained.normalize, trained.precision)
    assert scores.value("top1") == row["val/top1"]
    assert scores.value("loss") == pytest.approx(row["val/loss"], rel=1e-4)
    others = {"evaluate": [], "predict": [str(photos / "val")], "compare": [str(folder)]}
    others["export"] = ["--format", "pt2"]
    others["predict"] += ["--out", str(folder / "labels.csv"), "--fresh"]
    for verb in others.keys() & commands().keys():  # any of them may be deleted
        assert main([verb, str(folder), *others[verb]]) == 0
        said = capsys.readouterr().out
        assert verb == "compare" or "weights of a linear probe from" in said
    if (folder / "report.html").exists():
        assert "; linear probe; finished</p>" in (folder / "report.html").read_text()
    # Fine-tuning begins with its head.
    best = load_best(folder / "checkpoints/best.pt")
    begun = build_model(best.config.model, 2, 32)
    weights = load_pretrained(changed(best.config, run__init_from=str(best.path)), world)
    assert "new" not in weights.load_into(begun, ("ant", "bee"))
    head = find_head(begun)[0]
    assert begun.state_dict()[f"{head}.weight"].equal(best.weights[f"{head}.weight"])


def test_a_probe_takes_gray_images(probe, files):
    (row,) = logged(probe(files("resnet9_gn"), "--data.channels", 1))
    assert row["step"] == 0


def test_another_probe_does_not_overwrite_the_one_before(probe, files, refusal):
    weights = files("resnet9")
    words = weights, "--model.name", "resnet9"
    folder = probe(*words)
    best = (folder / "checkpoints/best.pt").read_bytes()
    cached = [*folder.parent.glob("photos.cache/features-*")]
    small = "probe", "smoke", "--data.name", "folder", "--data.limit", 0, "--data.batch-size", 4
    small += "--data.root", folder.parent / "photos", "--run.trackers", "--run.init-from", *words
    small += "--model.dropout", 0.5, "--run.dir"
    said = refusal(*small, folder)
    assert "--model.dropout was 0.0, is 0.5; take another --run.dir" in said
    assert "is none of: " in refusal(*small, folder.parent / "other", "--run.best-by", "kappas")
    assert [*folder.parent.glob("photos.cache/features-*")] == cached  # it was refused before
    assert (folder / "checkpoints/best.pt").read_bytes() == best
    probe(*words, is_fresh=False)  # the same again


def test_a_fresh_probe_out_of_memory_is_evaluated_in_smaller_batches(probe, files, monkeypatch):
    sizes = []

    def scored(model, data, *how):
        sizes.append(data.batch_size)
        assert len(sizes) < 3, "it starts over with the same batches"
        if data.batch_size > 2:
            raise torch.OutOfMemoryError
        return evaluate(model, data, *how)

    monkeypatch.setenv("RUN_RESTARTS", "0")
    monkeypatch.setattr(train_module, "evaluate", scored)
    probe(files("resnet9_gn"))
    assert sizes == [4, 2]


def test_features_are_computed_once_for_the_same_weights_and_images(
    probe, files, monkeypatch, capsys
):
    one, other = files("resnet9_gn"), files("resnet9_gn", seed=1)
    folder, compute, computed = probe(one), features.predict_features, []
    rows = logged(folder)

    def counted(*words):
        computed.append(1)
        return compute(*words)

    monkeypatch.setattr(features, "predict_features", counted)
    assert logged(probe(one, "--seed", 0, "--optim.lr", 0.1)) == rows
    assert not computed
    assert "read from" in capsys.readouterr().out
    probe(other)
    assert len(computed) == 3  # batches
    image = next((folder.parent / "photos/train/ant").iterdir())
    image.write_bytes(next((folder.parent / "photos/train/bee").iterdir()).read_bytes())
    probe(one)
    assert len(computed) == 6  # an image was replaced
    assert "is damaged" not in capsys.readouterr().out
    for damage in (cut, flip_bits):
        for cached in (folder.parent / "photos.cache").glob("features-*"):
            damage(cached)
        found = logged(probe(one))
        assert found == logged(probe(one))
        said = capsys.readouterr().out
        assert re.search(r"computed in \d:\d\d, as '.*/features-.*' is damaged", said)
        assert "read from" in said
    assert len(computed) == 12  # once after each damage


def cut(path):
    """Leave only the beginning of a file."""
    path.write_bytes(path.read_bytes()[:100])


def flip_bits(path):
    """Change a bit of a float32 in a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def test_only_the_newest_features_are_kept(tmp_path):
    names = [f"features-{number}.pt" for number in range(features.MOST_FILES + 2)]
    for age, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "quarantine.txt").touch()
    features.forget_oldest(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names[:-2], "quarantine.txt"}


def test_a_mistake_is_answered_in_one_line(photos, files, finished, tmp_path, refusal):
    root = "--data.name", "folder", "--data.root", photos, "--data.batch-size", 4
    words = ("probe", "smoke", *root, "--run.dir", tmp_path / "x", "--data.limit", 0)
    assert "--epochs 0 trains only the last layer, on top of pretrained weights" in refusal(*words)
    assert "fits only the last layer: leave out --epochs" in refusal(*words, "--epochs", 0.5)
    weights = "--run.init-from", files("resnet9_gn")
    holds = refusal(*words, *weights, "--run.dir", finished.run.dir)
    assert "cannot continue" in holds
    torch.manual_seed(0)
    file = tmp_path / "squeezenet.safetensors"
    save_file(build_model(ModelConfig(name="squeezenet1_1"), 2, 96).state_dict(), file)
    net = "--model.name", "squeezenet1_1", "--data.image-size", 96, "--run.init-from", file
    assert "its last layer can't be fitted: it is no linear layer" in refusal(*words, *net)
