"""Which labels are doubted, in which order, and what training leaves out then."""

import csv
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import changed
from PIL import Image
from safetensors.torch import safe_open, save_file

pytest.importorskip("image_classifier.tools.runs")
pytest.importorskip("image_classifier.tools.cross_validate")

from image_classifier import evaluate
from image_classifier.cli import main
from image_classifier.config import Config, DataConfig
from image_classifier.data import LEFT_OUT, EvalData, open_dataset
from image_classifier.extensions import finding
from image_classifier.metrics import Predictions
from image_classifier.runtime.config_dict import flatten
from image_classifier.tools.doubtful_labels import (
    doubtful_labels,
    folds,
)
from image_classifier.tools.doubtful_labels.picture import (
    COLUMNS,
    GAP,
    LINE,
    SIDE,
    Tile,
    draw_tiles,
)
from image_classifier.tools.doubtful_labels.ranking import (
    rank_labels,
)
from image_classifier.train import train

TOOLS = "image_classifier.tools"
recipes = pytest.importorskip(f"{TOOLS}.runs.recipe")
crossing = pytest.importorskip(f"{TOOLS}.cross_validate.cross_validate")
HAS_CHECK = "check" in finding.find_tools("source")
with_check = pytest.mark.skipif(not HAS_CHECK, reason="the tool check is not here")


@pytest.fixture
def root(photos, tmp_path):
    """Images of ants and bees: those with even numbers are ants."""
    return Path(shutil.copytree(photos, tmp_path / "photos")) / "train"


def write_runs(root, says, task="single-label", unread=()):
    """The folder of a cross-validation whose models say `says(name)` of an image: (2,).

    Of those that are `unread` they say it of black pixels.
    """
    runs = root.parent.parent / "runs"
    config = changed(Config(), data__name="folder", data__root=str(root), model__task=task)
    for number, fold in enumerate(folds.open_folds(config.data, 2, task)):
        folder = runs / f"fold-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(flatten(config)))
        score = {"val/top1": 0.5, "val/average_precision": 0.5, "val/loss": 1.0}
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 5, **score}) + "\n")
        (folder / "status.json").write_text('{"state": "done"}')
        paths = [fold.paths.relative(index).decode() for index in range(len(fold))]
        shares = torch.tensor(np.array([says(path) for path in paths])).float()
        own = shares.amax(1)
        predicted = (shares >= 0.5).to(torch.int8) if task == "multi-label" else shares.argmax(1)
        predicted[[path in unread for path in paths]] = LEFT_OUT
        found = Predictions(fold, predicted, own, own, shares)
        found.save(folder / "predictions.safetensors", step=5)
    rows = [{"fold": number} for number in range(2)]
    (runs / "results.json").write_text(json.dumps({"runs": rows}))
    return runs


def knows(path):
    """What a good model says: as the number of the image is even or odd, whatever its folder."""
    is_ant = int(Path(path).stem) % 2 == 0
    return [0.9, 0.1] if is_ant else [0.2, 0.8]


def swap(root, *names):
    """Move images to the other class; return their paths now."""
    moved = []
    for name in names:
        kind, file = name.split("/")
        other = {"ant": "bee", "bee": "ant"}[kind]
        (root / name).rename(root / other / file)
        moved.append(f"{other}/{file}")
    return moved


def rows_of(runs):
    """The rows of the table."""
    with (runs / "doubtful_labels.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def test_the_ranking_is_that_of_a_calculation_by_hand():
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 0])
    shares = [[0.95, 0.05, 0.0], [0.85, 0.1, 0.05], [0.3, 0.6, 0.1], [0.4, 0.5, 0.1]]
    shares += [[0.6, 0.3, 0.1], [0.05, 0.1, 0.85], [0.5, 0.4, 0.1]]
    # The means are 0.65 and 0.3, and class 2 has no image: of image 2 class 1 alone reaches its
    # mean; image 4 reaches that of its label, 5 reaches none, and 6 is most probably what it is.
    found = rank_labels(labels, torch.tensor(shares))
    assert found.image.tolist() == [5, 2, 4, 3, 6, 1, 0]  # by 0.1 / 0.85, 0.3 / 0.6, 0.3 / 0.6 ...
    assert found.is_candidate.tolist() == [False, True] + 5 * [False]
    assert found.label.tolist() == [1, 0, 1, 1, 0, 0, 0]
    assert found.predicted.tolist() == [2, 1, 0, 1, 0, 0, 0]
    assert found.label_share.tolist() == pytest.approx([0.1, 0.3, 0.3, 0.5, 0.5, 0.85, 0.95])
    assert found.predicted_share.tolist() == pytest.approx([0.85, 0.6, 0.6, 0.5, 0.5, 0.85, 0.95])


def test_planted_wrong_labels_come_first():
    chance = torch.Generator().manual_seed(0)
    truth = torch.randint(5, (400,), generator=chance)
    logits = torch.randn(400, 5, generator=chance)
    logits[torch.arange(400), truth] += 4
    labels = truth.clone()
    labels[:20] = (truth[:20] + 1 + torch.randint(4, (20,), generator=chance)) % 5
    first = rank_labels(labels, logits.softmax(1)).image[:32]
    assert int((first < 20).sum()) >= 16


def test_of_several_labels_the_most_doubtful_counts_and_unknown_ones_do_not():
    labels = torch.tensor([[1, 0], [1, 0], [1, LEFT_OUT], [0, 1], [0, 1], [-1, -1]])
    shares = [[0.9, 0.1], [0.1, 0.96], [0.8, 0.99], [0.2, 0.9], [0.9, 0.05], [0.1, 0.1]]
    found = rank_labels(labels.to(torch.int8), torch.tensor(shares))
    # The second label is wrong of image 1, and its first, too, but less so; of 4 likewise.
    assert found.image.tolist() == [1, 4, 2, 3, 0]
    assert found.column.tolist()[:3] == [1, 1, 0]
    assert found.label.tolist()[:3] == [0, 1, 1]
    assert found.predicted.tolist()[:3] == [1, 0, 1]
    assert found.label_share.tolist()[:3] == pytest.approx([0.04, 0.05, 0.8])
    assert found.is_candidate.tolist() == [True, True, False, False, False]


def test_images_that_have_no_probabilities_are_not_ranked():
    labels = torch.tensor([0, 1, LEFT_OUT, 0])
    shares = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [float("nan"), 0.1]])
    assert rank_labels(labels, shares).image.tolist() == [1, 0]


def test_the_table_the_picture_and_the_lines_name_what_is_doubtful(root, capsys):
    moved = swap(root, "ant/0.jpg", "bee/3.jpg", "ant/4.jpg")
    runs = write_runs(root, knows)
    assert main(["doubtful-labels", str(runs), "--share", "0.5"]) == 0
    said = capsys.readouterr().out
    assert "3 of 12 images look mislabeled, most often bee -> ant (2), ant -> bee (1)\n" in said
    assert str(runs / "doubtful_labels.csv") in said
    assert f"doubtful-labels {runs} --quarantine\n" in said
    rows = rows_of(runs)
    assert {row["path"] for row in rows[:3]} == {*moved}
    assert len({row["path"] for row in rows}) == len(rows) == 12
    assert [row["candidate"] for row in rows] == ["yes"] * 3 + ["no"] * 9
    first = next(row for row in rows if row["path"] == "bee/0.jpg")
    assert (first["label"], first["predicted"]) == ("bee", "ant")
    assert float(first["label_probability"]) == pytest.approx(0.1, abs=1e-3)
    assert float(first["predicted_probability"]) == pytest.approx(0.9, abs=1e-3)
    with Image.open(runs / "doubtful_labels.png") as picture:
        assert np.asarray(picture).std() > 10
    assert not (root.parent.parent / "photos.cache").exists()


def test_no_more_than_a_share_of_the_images_are_candidates(root, capsys):
    swap(root, "ant/0.jpg", "bee/3.jpg", "ant/4.jpg")
    found = doubtful_labels.find_doubtful_labels(str(write_runs(root, knows)), 0.17, False, "")
    assert sum(doubt.is_candidate for doubt in found) == 2
    assert all(doubt.is_candidate for doubt in found[:2])
    assert "2 of 12 images look mislabeled" in (said := capsys.readouterr().out)
    assert "1 more are doubted, and beyond --share 0.17\n" in said


@pytest.mark.parametrize("task", ["single-label", "multi-label"])
def test_images_that_were_not_read_are_counted_and_never_called_mislabeled(task, root, capsys):
    (wrong,) = swap(root, "ant/4.jpg")
    runs = write_runs(root, lambda path: [1.08, 1] * np.array(knows(path)), task, unread=[wrong])
    assert main(["doubtful-labels", str(runs)]) == 0
    said = capsys.readouterr().out
    assert "0 of 11 images look mislabeled\n1 others could not be read, or have no" in said


def test_of_several_labels_the_lines_say_which_one_is_missing(root, capsys):
    swap(root, "ant/0.jpg")
    runs = write_runs(root, lambda path: [1.08, 1] * np.array(knows(path)), "multi-label")
    assert main(["doubtful-labels", str(runs)]) == 0
    assert "1 of 12 images look mislabeled, most often not ant -> ant (1)" in (
        capsys.readouterr().out
    )
    row = rows_of(runs)[0]
    assert (row["path"], row["label"], row["predicted"]) == ("bee/0.jpg", "not ant", "ant")


@with_check
def test_training_leaves_out_what_is_in_quarantine_and_other_lines_stay(root, capsys, refusal):
    moved = swap(root, "ant/0.jpg", "bee/3.jpg")
    listed = root.parent / "train.cache/quarantine.txt"
    listed.parent.mkdir()
    listed.write_text("bee/5.jpg\tmy own\n\nant/gone.jpg")
    above = root.parent.parent / "photos.cache/quarantine.txt"
    above.parent.mkdir()
    above.write_text("train/bee/0.jpg\tmy own, too\n")
    runs = write_runs(root, knows)
    words = ["doubtful-labels", str(runs), "--share", "0.5"]
    assert main(words) == 0
    assert listed.read_text() == "bee/5.jpg\tmy own\n\nant/gone.jpg"
    assert main([*words, "--quarantine"]) == 0
    said = capsys.readouterr().out
    assert f"2 images added to {listed}: training leaves them out\n1 image added to" in said
    assert above.read_text().startswith("train/bee/0.jpg\tmy own, too\ntrain/ant/3.jpg\t")
    text = listed.read_text()
    assert text.startswith("bee/5.jpg\tmy own\n\nant/gone.jpg\n")
    assert "\nbee/0.jpg\tdoubtful label: bee -> ant, 90%\n" in text
    for data in (DataConfig("folder", str(root)), DataConfig("folder", str(root.parent))):
        paths = [
            source.paths.relative(index).decode()
            for source in (open_dataset(data, "train"), open_dataset(data, "val"))
            for index in range(len(source))
        ]
        assert not {*moved} & {*paths}
        # The folder above has four images for validation, and a list without `bee/5.jpg`.
        assert len(paths) == (9 if data.root == str(root) else 14)
    assert "have changed since it was trained" in refusal(*words)


def test_where_check_is_missing_quarantine_is_refused_before_the_work(root, refusal, monkeypatch):
    runs = write_runs(root, knows)
    found = finding.find_tool
    monkeypatch.setattr(
        finding, "find_tool", lambda *names: None if "check" in names else found(*names)
    )
    line = refusal("doubtful-labels", runs, "--quarantine")
    assert "--quarantine needs a tool that is not here: pretuned add check" in line
    assert not (runs / "doubtful_labels.csv").exists()


def test_runs_that_cannot_be_ranked_are_refused_in_a_line(root, refusal, tmp_path):
    assert "is not the folder of a `cross-validate`" in refusal("doubtful-labels", tmp_path / "no")
    runs = write_runs(root, knows)
    results = (runs / "results.json").read_text()
    (runs / "results.json").write_text('{"runs": [{"seed": 0}, {"seed": 1}]}')
    assert "is not the folder of a `cross-validate`" in refusal("doubtful-labels", runs)
    (runs / "results.json").unlink()
    assert "not all folds are trained" in refusal("doubtful-labels", runs)
    (runs / "results.json").write_text(results)
    saved = (runs / "fold-1/predictions.safetensors").rename(tmp_path / "saved")
    assert "fold-1' has no predictions.safetensors of its best" in refusal("doubtful-labels", runs)
    saved.rename(runs / "fold-1/predictions.safetensors")
    (runs / "doubtful_labels.csv").mkdir()
    assert "cannot write" in refusal("doubtful-labels", runs)
    (runs / "fold-1").rename(runs / "other")
    assert "has 1 of its 2 folds, not fold-1" in refusal("doubtful-labels", runs)


@pytest.mark.parametrize("change", ["moved", "added", "replaced"])
def test_images_that_have_changed_are_refused(change, root, refusal):
    runs = write_runs(root, knows)
    if change == "moved":
        swap(root, "ant/0.jpg")
    elif change == "added":
        shutil.copy(root / "ant/0.jpg", root / "ant/99.jpg")
    else:
        shutil.copy(root / "ant/0.jpg", root / "ant/2.jpg")
    assert "have changed since it was trained" in refusal("doubtful-labels", runs)
    assert not (runs / "doubtful_labels.csv").exists()


def test_an_image_that_cannot_be_read_is_gray_and_one_of_16_bits_is_drawn():
    deep = torch.full((40, 80, 5), 255 * 257, dtype=torch.uint16)
    page = np.asarray(draw_tiles([Tile(None, ("a -> b",), True), Tile(deep, ("x",), False)]))
    assert page[20, 20].tolist() == [211] * 3
    assert page[SIDE // 2, SIDE + 90].tolist() == [255] * 3
    assert page.shape[2] == 3


def test_each_image_has_its_own_caption_in_black_if_it_is_a_candidate():
    def tile(gray, is_marked):
        pixels = torch.full((SIDE, SIDE, 3), gray, dtype=torch.uint8)
        return Tile(pixels, ("lilac",), is_marked)

    tiles = [tile(100 + n, is_marked=n == 6) for n in range(8)]
    page = np.asarray(draw_tiles(tiles))[:, :, 0]
    height, width = SIDE + GAP + LINE, SIDE + GAP
    for number in range(8):
        top, left = GAP + number // COLUMNS * height, GAP + number % COLUMNS * width
        assert (page[top : top + SIDE, left : left + SIDE] == 100 + number).all()
        caption = page[top + SIDE : top + SIDE + LINE, left : left + SIDE]
        assert (caption.min() < 64) == (number == 6)


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1.jpg", "'=1+1.jpg"),
        (' "\uff1dcmd', "' \"\uff1dcmd"),
        ("a;@b", "a;'@b"),
        ("ant/1-2.jpg", "ant/1-2.jpg"),
    ],
)
def test_no_cell_of_the_table_is_a_formula(cell, written):
    assert doubtful_labels.safe(cell) == written


@pytest.fixture
def trained(on_photos, root, tmp_path):
    """The folder of a real cross-validation with two folds."""
    config = changed(on_photos, data__root=str(root), run__dir=str(tmp_path / "cross"))
    for fold in range(2):
        own = changed(config, data__val_fraction=0.5, data__fold=fold)
        train(changed(own, run__dir=f"{config.run.dir}/fold-{fold}"))
    recipe = recipes.Recipe("smoke", config, {}, at_once=1)
    crossing.cross_validate(recipe, 2)  # the runs are done before
    return Path(config.run.dir)


def test_the_folds_of_a_cross_validation_are_ranked_also_without_saved_probabilities(
    trained, root, capsys, refusal, monkeypatch
):
    doubtful_labels.find_doubtful_labels(str(trained), 0.5, False, "")
    first = rows_of(trained)
    assert len(first) == 12
    shares = {}
    for number in range(2):
        file = trained / f"fold-{number}/predictions.safetensors"
        data = DataConfig("folder", str(root), val_fraction=0.5, fold=number)
        paths = open_dataset(data, "val").paths
        with safe_open(file, "pt") as saved:
            about = saved.metadata()
            tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
        for index, share in enumerate(tensors["target_probability"].tolist()):
            shares[paths.relative(index).decode()] = share
        del tensors["probabilities"]
        save_file(tensors, file, about)
    capsys.readouterr()
    closed = Mock()  # or the memory of each fold stays page-locked for a GPU
    monkeypatch.setattr(EvalData, "close", closed)
    doubtful_labels.find_doubtful_labels(str(trained), 0.5, False, "")
    assert capsys.readouterr().out.count("its best weights predict again") == 2
    assert closed.call_count == 2
    for row in (*first, *rows_of(trained)):
        assert float(row["label_probability"]) == pytest.approx(shares[row["path"]], abs=2e-3)
    monkeypatch.setattr(evaluate, "MOST_KEPT", 0)
    monkeypatch.setattr(folds, "load_model", None)  # it says so before they predict again
    assert "are too many to rank: cross-validate with more folds" in refusal(
        "doubtful-labels", trained
    )


def test_names_in_the_table_are_no_formulas(root):
    (root / "ant").rename(root / "=ant")
    runs = write_runs(root, knows)
    assert main(["doubtful-labels", str(runs)]) == 0
    rows = rows_of(runs)
    assert {row["path"].rpartition("/")[0] for row in rows} == {"./=ant", "bee"}
    assert {row["label"] for row in rows} == {row["predicted"] for row in rows} == {"'=ant", "bee"}
