"""`cross-validate`: each image is validated once, by a model that did not see it."""

import json
import math
from functools import partial

import pytest
import torch
from conftest import SMOKE, Forked, changed
from safetensors import safe_open

pytest.importorskip("image_classifier.tools.runs")

from image_classifier.cli import main
from image_classifier.config import Config, DataConfig
from image_classifier.data import DATASETS, LEFT_OUT, open_dataset
from image_classifier.errors import UserError
from image_classifier.extensions import find_tool
from image_classifier.runtime.config_dict import flatten
from image_classifier.tools.cross_validate import cross_validate

TOOLS = "image_classifier.tools"
many_runs = pytest.importorskip(f"{TOOLS}.runs.many_runs")
recipes = pytest.importorskip(f"{TOOLS}.runs.recipe")
saved_runs = pytest.importorskip(f"{TOOLS}.runs.saved_runs")
statistics = pytest.importorskip(f"{TOOLS}.statistics.statistics")
TINY = f"{SMOKE} --data.name folder --data.batch-size 4 --data.limit 0".split()


@pytest.fixture
def validate(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(many_runs, "start_run", Forked)
    own = ["--data.root", photos / "train", "--run.dir", tmp_path / "runs"]
    return ["cross-validate", "2", *TINY, *map(str, own)]


def test_each_image_is_validated_once(validate, photos, tmp_path, refusal, capsys):
    assert main(validate) == 0
    said = capsys.readouterr().out
    assert "12 images, each validated once by the run that did not train on it:" in said
    is_told = f"ensemble {str(tmp_path / 'runs')!a}" in said
    assert is_told == (find_tool("command", "ensemble") is not None)
    root, right, sizes = str(photos / "train"), 0, []
    for fold in range(2):
        data = DataConfig(name="folder", root=root, val_fraction=0.5, fold=fold)
        with safe_open(tmp_path / f"runs/fold-{fold}/predictions.safetensors", "pt") as file:
            target, predicted = file.get_tensor("target"), file.get_tensor("predicted")
            about = json.loads(file.metadata()["about"])
            assert about["images"] == open_dataset(data, "val").fingerprint()
        sizes.append(len(target))
        right += int((target == predicted).sum())
    assert sum(sizes) == 12
    found = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert (found["images"], found["pooled_top1"]) == (12, right / 12)
    assert torch.tensor(found["confusion"]).sum(1).tolist() == [6, 6]
    top1 = [run["top1"] for run in found["runs"]]
    assert found["top1"]["mean"] == pytest.approx(sum(top1) / 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_validate, "MOST_CLASSES", 1)
        assert main(validate) == 0
    assert capsys.readouterr().out.count("done before") == 2
    assert "confusion" not in json.loads((tmp_path / "runs" / "results.json").read_text())
    pytest.importorskip(f"{TOOLS}.check")
    (tmp_path / "photos.cache").mkdir()
    (tmp_path / "photos.cache" / "quarantine.txt").write_text("ant/0.jpg\tblurred\n")
    validate += ["--data.cache", str(tmp_path / "photos.cache")]
    assert "was trained on other images" in refusal(*validate)


def test_until_all_folds_are_trained_there_are_no_results_of_earlier_ones(
    validate, tmp_path, monkeypatch
):
    results = tmp_path / "runs" / "results.json"
    results.parent.mkdir()
    results.write_text("{}")
    monkeypatch.setattr(many_runs, "train_in", lambda *_: (nothing for nothing in ()))
    assert main(validate) != 0
    assert not results.exists()


def test_what_cannot_be_divided_is_refused(validate, photos, monkeypatch, refusal):
    own = partial(refusal, *validate)
    assert "has validation images of its own, in 'val'; --data.root" in own("--data.root", photos)
    assert "shapes has none: its validation images are fixed" in refusal(
        "cross-validate", "2", "smoke"
    )
    assert "cross-validate 2 decides --data.val-fraction" in own("--data.val-fraction", "0.1")
    assert "a number from 2 on comes first: `cross-validate 5 folder`" in refusal(
        "cross-validate", "1"
    )
    fixed = DATASETS["folder"]
    monkeypatch.setitem(DATASETS, "mine", lambda _, split: fixed(DataConfig(root=photos), split))
    assert "it should choose them by data.fold" in own("--data.name", "mine")


def test_folds_may_be_a_column_of_a_table(photos, tmp_path):
    pytest.importorskip("image_classifier.tools.label_table")
    names = [f"{('ant', 'bee')[n % 2]}/{n}.jpg" for n in range(12)]
    rows = (f"{name},{name[:3]},{n // 2 % 3}\n" for n, name in enumerate(names))
    (tmp_path / "labels.csv").write_text("path,label,fold\n" + "".join(rows))
    data = DataConfig("folder", str(photos / "train"), labels=str(tmp_path / "labels.csv"))
    folds = cross_validate.open_folds(data, 3)
    found = [[int(fold.paths[n].stem) for n in range(len(fold))] for fold in folds]
    assert found == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    with pytest.raises(UserError, match=r"no images for val in fold 3 of 0 \.\. 2"):
        cross_validate.open_folds(data, 4)
    with pytest.raises(UserError, match=r"folds 0 \.\. 1 have 8 of 12 images: the table"):
        cross_validate.open_folds(data, 2)


def test_a_class_whose_images_are_all_in_one_fold_keeps_one_for_training(tmp_path, capsys):
    for number in range(60):
        path = tmp_path / f"{number // 2}/{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    folds = cross_validate.open_folds(DataConfig("folder", str(tmp_path)), 3)
    said = capsys.readouterr().out
    assert f"{60 - sum(map(len, folds))} images are validated by no run" in said
    assert 40 < sum(map(len, folds)) < 60


def test_of_a_class_of_one_group_no_image_is_validated(tmp_path, capsys):
    pytest.importorskip("image_classifier.tools.holdout")
    for number in range(60):
        group = number // 4 if number < 40 else "last"
        path = tmp_path / ("ant" if number < 40 else "bee") / f"{group}-{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    data = changed(Config(), data__name="folder", data__root=str(tmp_path), data__groups="(.*)-")
    folds = cross_validate.open_folds(data.data, 5)
    assert [len(fold) for fold in folds] == [8] * 5
    assert "20 images are validated by no run" in capsys.readouterr().out


def test_the_interval_of_folds_has_the_correction():
    top1 = [0.90, 0.92, 0.94, 0.91, 0.93]
    found = statistics.mean_of(top1, grain=0.001, overlap=1 / 4)
    reach = 2.776445 * math.sqrt((1 / 5 + 1 / 4) * 0.00025)
    assert (found.low, found.high) == pytest.approx((0.92 - reach, 0.92 + reach))


def pooled(photos, folder, monkeypatch, scores, metric="loss", *, task="single-label"):
    """What a cross-validation of 3 folds writes, whose runs say `ant` of all images but one."""
    config = changed(
        Config(), data__name="folder", data__root=str(photos / "train"), run__dir=str(folder)
    )
    runs = []
    for number, fold in enumerate(cross_validate.open_folds(config.data, 3, task)):
        predicted = torch.zeros(fold.labels.shape, dtype=torch.int32)
        if not number:
            predicted[fold.labels.argmin()] = LEFT_OUT  # an ant that can't be read
        images = fold.fingerprint(), fold.file_digests
        found = saved_runs.SavedPredictions(predicted, fold.labels, *images, fold.classes, step=1)
        knobs = flatten(config)
        scored = scores[number], 0.5, number + 1.0
        runs.append(saved_runs.Run(folder, 0, "done", knobs, metric, *scored, 1, 1, found))
    monkeypatch.setattr(cross_validate, "train_all", lambda *_: runs)
    monkeypatch.setattr(cross_validate, "check_run", lambda *_: None)
    folder.mkdir()
    cross_validate.cross_validate(recipes.Recipe("folder", config, {}, at_once=1), 3)
    sizes = [len(run.predictions.target) for run in runs]
    return json.loads((folder / "results.json").read_text()), sizes


def test_scores_of_all_folds_are_of_their_images_and_the_interval_is_corrected(
    photos, tmp_path, monkeypatch, capsys
):
    found, sizes = pooled(photos, tmp_path / "a", monkeypatch, (1.0, 2.0, 3.0))
    assert sum(sizes) == 12
    assert len({*sizes}) > 1  # else each fold would count alike
    read = (sizes[0] - 1, *sizes[1:])  # an image of the first fold can't be
    loss = sum((number + 1) * size for number, size in enumerate(read)) / 11
    said = capsys.readouterr().out
    assert f"loss {loss:.4f}" in said
    assert "the best on its own images: optimistic" in said  # the last ones have other scores
    assert "  ant 100.00%\n" in said
    assert "  bee   0.00%\n" in said
    assert found["pooled_top1"] == 5 / 11  # of those that were read
    reach = 4.302653 * math.sqrt(1 / 3 + 1 / 2)  # Nadeau and Bengio (2003)
    assert found["loss"]["low"] == pytest.approx(2 - reach)
    found, _ = pooled(photos, tmp_path / "b", monkeypatch, (0.5, 0.5, 0.5), "top1")
    assert found["top1"]["high"] - found["top1"]["low"] == 1  # equal by chance
    assert "optimistic" not in capsys.readouterr().out


def test_an_image_whose_labels_are_unknown_is_none_that_could_not_be_read(
    photos, tmp_path, monkeypatch, capsys
):
    plain = cross_validate.open_folds

    def open_folds(*given):
        folds = plain(*given)
        folds[1].labels[0] = LEFT_OUT
        return folds

    monkeypatch.setattr(cross_validate, "open_folds", open_folds)
    pooled(photos, tmp_path / "a", monkeypatch, (1.0, 2.0, 3.0), task="multi-label")
    assert ", without 1 that could not be read" in capsys.readouterr().out
