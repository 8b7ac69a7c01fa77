"""A run is scored once by images by which nothing was chosen."""

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, logged, run_ranks, write_photo
from scipy.stats import binomtest

from image_classifier.cli import main
from image_classifier.config import DataConfig
from image_classifier.data import DATASETS
from image_classifier.data.datasets.folder import folder
from image_classifier.data.datasets.shapes import shapes
from image_classifier.errors import UserError
from image_classifier.tools.holdout import observer
from image_classifier.train import train


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """40 photographs in the folders of two classes."""
    root = tmp_path_factory.mktemp("flat")
    for number in range(40):
        write_photo(root / "ab"[number % 2] / f"{number}.jpg", number, size=(40, 36))
    return root


@pytest.fixture
def holding_out(config, flat):
    """A run that holds some of them out."""
    config = changed(config, data__name="folder", data__root=str(flat), data__batch_size=8)
    return changed(config, data__limit=0, data__test_fraction=0.3)


def test_the_test_images_are_scored_in_the_batches_and_colors_of_validation(
    holding_out, monkeypatch
):
    test = Mock(wraps=observer.EvalData)
    monkeypatch.setattr(observer, "EvalData", test)
    train(changed(holding_out, optim__accumulate=2))
    *_, batch_size = test.call_args.args
    assert batch_size == 4  # of 8: for more there may be no memory
    saved = torch.load(Path(holding_out.run.dir, "checkpoints/best.pt"), weights_only=True)
    assert [*map(list, test.call_args.kwargs["mean_std"])] == [saved["mean"], saved["std"]]


@pytest.mark.usefixtures("pages")
def test_it_says_its_test_score_and_keeps_it_once(holding_out, capsys):
    train(holding_out)
    train(holding_out)  # the same command, when all is done
    said = capsys.readouterr().out
    assert said.count("\ntest: top-1 ") == 2
    folder = Path(holding_out.run.dir)
    scores = json.loads((folder / "test.json").read_text())
    rows = [row for row in logged(folder) if "test/top1" in row]
    assert [row["test/top1"] for row in rows] == [scores["test/top1"]]
    assert logged(folder)[-1] == rows[0]
    pytest.importorskip("image_classifier.tools.report")
    assert "<h2>Test</h2><p>top-1" in (folder / "report.html").read_text()


def test_it_is_the_score_that_evaluate_finds(holding_out, capsys):
    pytest.importorskip("image_classifier.tools.evaluate")
    train(holding_out)
    capsys.readouterr()
    assert main(["evaluate", holding_out.run.dir, "--split", "test"]) == 0
    scores = json.loads(Path(holding_out.run.dir, "test.json").read_text())
    assert f"top-1 {scores['test/top1']:.2%}" in capsys.readouterr().out


@pytest.mark.parametrize(("test", "words"), [("val", "best.pt"), ("test", "nothing")])
def test_it_is_told_whether_the_test_images_are_those_for_validation(
    test, words, config, monkeypatch, capsys
):
    drawn = {"train": "train", "val": "val", "test": test}
    own = lambda _, split: shapes(DataConfig(limit=64), drawn[split])  # noqa: E731
    monkeypatch.setitem(DATASETS, "own", own)
    train(changed(config, data__name="own", data__limit=0, run__score_test=True))
    assert f"64 images by which {words} was chosen" in capsys.readouterr().out


def test_nothing_is_promised_of_groups_that_no_path_can_have(config, monkeypatch, capsys):
    monkeypatch.setitem(DATASETS, "own", lambda _, split: shapes(DataConfig(limit=64), split))
    train(changed(config, data__name="own", data__limit=0, data__groups="p"))
    assert "--data.groups 'p': the images have no paths" in capsys.readouterr().out


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("kind", ["folder", "prepared"])
def test_files_of_one_name_may_be_other_images(kind, is_copy, config, tmp_path, capsys):
    root = tmp_path / "photos"
    for start, split in enumerate(("train", "val", "test")):
        for number in range(8):
            seed = number + 8 * (1 if is_copy and start else start)
            write_photo(root / split / "ab"[number % 2] / f"{number}.jpg", seed, size=(40, 36))
    if kind == "prepared":
        pytest.importorskip("image_classifier.tools.prepare")
        assert main(["prepare", "--data.root", str(root), "--splits", "val", "--side", "32"]) == 0
    own = {"data__name": "folder", "data__root": str(root), "data__limit": 0, "data__batch_size": 8}
    capsys.readouterr()
    train(changed(config, **own, run__score_test=True))
    chosen = "best.pt" if is_copy else "nothing"
    assert f"8 images by which {chosen} was chosen" in capsys.readouterr().out


def test_that_of_a_linear_probe_is_of_the_weights_that_it_leaves(holding_out, trained_once, capsys):
    pytest.importorskip("image_classifier.tools.linear_probe")
    pytest.importorskip("image_classifier.tools.evaluate")
    best = str(trained_once / "checkpoints" / "best.pt")
    train(changed(holding_out, run__init_from=best, run__init_head="probe", epochs=0.0))
    capsys.readouterr()
    assert main(["evaluate", holding_out.run.dir, "--split", "test"]) == 0
    saved = json.loads(Path(holding_out.run.dir, "test.json").read_text())
    assert f"loss {saved['test/loss']:.4f}" in capsys.readouterr().out


def test_a_test_folder_serves_as_well_and_no_images_are_held_out_then(holding_out, flat, tmp_path):
    shutil.copytree(flat, tmp_path / "whole" / "train")
    shutil.copytree(flat, tmp_path / "whole" / "test")
    config = changed(holding_out, data__root=str(tmp_path / "whole"))
    with pytest.raises(UserError, match=r"has test images of its own, .*: --run.score-test"):
        train(config)
    train(changed(config, data__test_fraction=0.0, run__score_test=True))
    assert Path(config.run.dir, "test.json").exists()


def test_images_that_chose_the_best_weights_are_not_called_unseen(on_photos, monkeypatch, capsys):
    own = lambda data, _: replace(folder(data, "val"), is_test=True)  # noqa: E731 - as CIFAR-10
    monkeypatch.setitem(DATASETS, "folder", own)
    train(changed(on_photos, run__score_test=True))
    assert "4 images by which best.pt was chosen" in capsys.readouterr().out


def test_a_run_without_test_images_is_refused_before_it_begins(holding_out):
    config = changed(holding_out, data__test_fraction=0.0, run__score_test=True)
    with pytest.raises(UserError, match="has no folder 'test'"):
        train(config)
    assert not Path(config.run.dir, "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            {"classes": ("ant", "bee")},
            r"the test images \(2: ant, bee\) differ from those of the tr",
        ),
        (
            {"labels": torch.full((64,), 10)},
            r"64 of 64 labels of the test images are outside 0 .. 9",
        ),
    ],
)
def test_so_is_one_whose_test_images_have_other_classes(knobs, words, config, monkeypatch):
    own = lambda _, split: shapes(DataConfig(limit=64), split)  # noqa: E731
    others = lambda _, split: replace(own(_, split), **knobs if split == "test" else {})  # noqa: E731
    monkeypatch.setitem(DATASETS, "own", others)
    with pytest.raises(UserError, match=words):
        train(changed(config, data__name="own", data__limit=0, run__score_test=True))


def scores_of(config):
    """Train, and the test scores that the first rank leaves."""
    train(config)
    return json.loads(Path(config.run.dir, "test.json").read_text())


def test_ranks_leave_the_score_of_one(holding_out, tmp_path):
    ranks = run_ranks(2, train_only, holding_out)
    assert ranks == [True, True]
    two = json.loads(Path(holding_out.run.dir, "test.json").read_text())
    one = scores_of(changed(holding_out, run__dir=str(tmp_path / "alone")))
    assert two["test/loss"] == pytest.approx(one["test/loss"], rel=1e-3)


def train_only(config):
    """Train; whether it ended."""
    train(config)
    return True


@pytest.mark.parametrize("right", [0, 1, 37, 40])
def test_the_interval_of_a_test_score_is_wilsons(right):
    source = Namespace(is_multi_label=False)
    predictions = Namespace(source=source, is_counted=torch.ones(40, dtype=torch.bool))
    told = observer.interval(Namespace(predictions=predictions, value=lambda _: right / 40))
    low, high = binomtest(right, 40).proportion_ci(method="wilson")
    assert told == f", top-1 within {low:.1%} .. {high:.1%} (95 %)"
