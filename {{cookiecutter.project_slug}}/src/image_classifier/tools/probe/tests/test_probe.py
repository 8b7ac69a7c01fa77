"""A probe: its checkpoint gives its scores, features are computed once, mistakes are refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import logged
from safetensors.torch import save_file

from image_classifier.cli import commands, main
from image_classifier.config import ComputeConfig, ModelConfig
from image_classifier.data import EvalData
from image_classifier.errors import UserError
from image_classifier.evaluate import evaluate
from image_classifier.models import (
    build_model,
    find_head,
    load_best,
    load_pretrained,
)
from image_classifier.runtime.distributed import World
from image_classifier.tools.loaded_model import load_model
from image_classifier.tools.probe import features, heads

pytest.importorskip("sklearn")


@pytest.fixture
def probe(photos, tmp_path):
    """A function that probes weights on a copy of the photographs, and returns the run folder."""
    root, folder = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "probe"

    def run(weights, *words):
        small = "smoke --data.name folder --data.limit 0 --data.batch-size 4 --run.trackers"
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


# airbench's head has no bias.
@pytest.mark.parametrize(
    ("name", "sees"), [("resnet9_gn", "last"), ("airbench", "last"), ("airbench", "layers")]
)
def test_a_probe_is_a_run_whose_checkpoint_has_its_scores(
    name, sees, *, probe, files, photos, capsys
):
    words = "--model.name", name, "--augment.tta", "flip", "--model.head", sees
    folder = probe(files(name), *words)
    said, (row,) = capsys.readouterr().out, logged(folder)
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    assert f"top-1 {row['val/top1']:.2%}" in said
    assert row["val/top1"] == row["probe/logistic_top1"]
    assert {row["probe/knn_k"], row["probe/logistic_C"]} <= {1, 3, 5, *heads.GRIDS["logistic"][1]}
    assert "only the last layer was fitted" in (folder / "report.html").read_text()
    world = World(torch.device("cpu"))
    trained = load_model(str(folder), ComputeConfig(device="cpu"), world)
    data = EvalData(trained.config.data, "val", world)
    scores = evaluate(trained.model, data, trained.normalize, trained.precision, world)
    assert scores.value("top1") == row["val/top1"]
    wanted = scores.predictions.decision(trained.config.run).temperature
    assert trained.decision.temperature == pytest.approx(wanted, rel=1e-2)
    assert scores.value("loss") == pytest.approx(row["val/loss"], rel=1e-4)
    others = {"evaluate": [], "predict": [str(photos / "val")], "compare": [str(folder)]}
    others["export"] = ["--format", "pt2"]
    for verb in others.keys() & commands().keys():  # any of them may be deleted
        assert main([verb, str(folder), *others[verb]]) == 0
    # Fine-tuning begins with its head.
    best = load_best(folder / "checkpoints/best.pt")
    begun = build_model(best.config.model, 2, 32)
    weights = load_pretrained(str(best.path), best.config.model, world)
    assert "new" not in weights.load_into(begun, ("ant", "bee"))
    head = find_head(begun)[0]
    assert begun.state_dict()[f"{head}.weight"].equal(best.weights[f"{head}.weight"])


def test_a_probe_takes_gray_images(probe, files):
    (row,) = logged(probe(files("resnet9_gn"), "--data.channels", 1))
    assert row["val/top1"] == row["probe/logistic_top1"]


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
    assert len(computed) == 4  # batches: three to train on, one for validation
    image = next((folder.parent / "photos/val/ant").iterdir())
    image.write_bytes((folder.parent / "photos/val/bee/13.jpg").read_bytes())
    probe(one)
    assert len(computed) == 5  # the validation images were replaced
    for cached in (folder.parent / "photos.cache").glob("features-*"):
        cached.write_bytes(cached.read_bytes()[:100])
    probe(one)
    assert len(computed) == 9  # no cache is left that can be read


def test_only_the_newest_features_are_kept(tmp_path):
    names = [f"features-{number}.safetensors" for number in range(features.MOST_FILES + 2)]
    for age, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "quarantine.txt").touch()
    features.forget_oldest(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names[:-2], "quarantine.txt"}


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_linear_layer_is_logistic_regression_on_raw_features(num_classes, has_bias):
    torch.manual_seed(0)
    labels = torch.arange(60) % num_classes
    values = torch.randn(60, 5) + 4 * torch.nn.functional.one_hot(labels, 5)
    values *= torch.tensor([1, 10, 0.1, 1, 0])
    found = heads.cross_validate(values, labels, has_bias, seed=0)
    best = heads.best_of(found, heads.LINEAR)
    classifier = heads.fitted(best, values, labels, has_bias)
    weight, bias = heads.linear_layer(classifier)
    shares = (values.double() @ weight.T + bias).softmax(1)
    wanted = classifier.predict_proba(values.double().numpy())
    assert torch.allclose(shares, torch.from_numpy(wanted), atol=1e-9)
    assert has_bias or not bias.any()
    assert best.top1 == max(head.top1 for head in found if head.kind == heads.LINEAR) > 0.9


def test_a_mistake_is_answered_in_one_line(photos, files, finished, tmp_path, refusal):
    root = "--data.name", "folder", "--data.root", photos, "--data.batch-size", 4
    words = ("probe", "smoke", *root, "--run.dir", tmp_path / "x", "--data.limit", 0)
    weights = "--run.init-from", files("resnet9_gn")
    assert "probe needs trained weights: --run.init-from FILE" in refusal(*words)
    assert "probe is one process" in refusal(*words, *weights, "--run.processes", 2)
    holds = refusal(*words, *weights, "--run.dir", finished.run.dir)
    assert "holds a run that has trained: take another --run.dir" in holds
    torch.manual_seed(0)
    file = tmp_path / "squeezenet.safetensors"
    save_file(build_model(ModelConfig(name="squeezenet1_1"), 2, 96).state_dict(), file)
    net = "--model.name", "squeezenet1_1", "--data.image-size", 96, "--run.init-from", file
    assert "ends in 'classifier.1', which is no linear layer" in refusal(*words, *net)
    assert not Path(tmp_path / "x/checkpoints").exists()
    with pytest.raises(UserError, match="needs training images of two classes at least, and two"):
        heads.cross_validate(torch.zeros(2, 3), torch.arange(2), has_bias=True, seed=0)


def test_images_of_more_weight_count_more():
    torch.manual_seed(0)
    values, labels, weights = torch.randn(40, 3), torch.arange(40) % 2, torch.ones(40)
    head = heads.cross_validate(values, labels, True, seed=0)[3]
    weights[labels == 1] = 5
    plain, heavy = (heads.fitted(head, values, labels, True, w) for w in (None, weights))
    assert heavy.predict(values.double().numpy()).mean() > plain.predict(values.numpy()).mean()
