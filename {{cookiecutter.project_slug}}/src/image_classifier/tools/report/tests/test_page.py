"""The page that a run ends with shows all there is to see, needs nothing, and runs nothing."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import HOSTILE, Shown, answers_of, changed, logged, write_photo
from PIL import Image

from image_classifier import tasks
from image_classifier.config import Config, DataConfig
from image_classifier.data import LEFT_OUT, Source, open_dataset
from image_classifier.errors import UserError
from image_classifier.metrics import predictions
from image_classifier.metrics.table import METRICS, Metric
from image_classifier.runtime.config_dict import flatten
from image_classifier.tools.report import (
    galleries,
    images,
    observer,
)
from image_classifier.tools.report import page as report
from image_classifier.tracking import Result
from image_classifier.train import train

ROWS = [
    {"step": 5, "epoch": 0.5, "train/images_per_second": 900.0, "train/waited_fraction": 0.02},
    {"step": 10, "epoch": 1.0, "val/loss": 2.0, "val/top1": 0.75, "val/top5": 1.0, "val/ece": 0.25},
    {"step": 15, "epoch": 1.5, "train/images_per_second": 950.0, "train/waited_fraction": 0.04},
    {"step": 20, "epoch": 2.0, "val/loss": 1.9, "val/top1": 0.5, "val/top5": 1.0},
]
MIXED = torch.tensor([(0.63, 0.37), (0.002, 0.998)])
ANIMALS = ("ant", "bee", "cow", "dog")
HEADS = ["class", "recall", "precision", "F1", "average precision", "images"]


def page(folder, answers, rows=ROWS, warnings=(), labels=MIXED, *, ended=None, **knobs):
    """The page of a run that logged `rows` and `warnings`, and came to `answers`.

    `ended` has the fields of the `Result` of a run that has ended.
    """
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(flatten(changed(Config(), **knobs))))
    (folder / "environment.json").write_text(json.dumps({"device": "<CPU>", "commit": None}))
    samples = torch.full((len(labels), 4, 4, 3), 7, dtype=torch.uint8), labels, 3
    metrics = next((row for row in rows if "val/loss" in row), {})
    end = {} if ended is None else {"is_last": True, **ended}
    result = Result(answers, metrics, 20, 20, 20, "finished", warnings, **end)
    report.write_page(folder, result, samples)
    return Shown((folder / "report.html").read_text(encoding="utf-8"))


def counts(size):
    """A confusion matrix in which each class is taken for the next once, and is right 9 times."""
    return 9 * torch.eye(size).long() + torch.eye(size).long().roll(1, 1)


@pytest.mark.parametrize("size", [len(HOSTILE), 40])
def test_names_are_shown_and_never_run(tmp_path, size):
    harmless = tuple(f"class {n}" for n in range(size))
    plain = page(tmp_path, answers_of(harmless, counts(size)), warnings=harmless[:8])
    names = HOSTILE + harmless[len(HOSTILE) :]
    knobs = {"run__dir": "<script>\udcff", "data__root": "</dl>"}
    folder = tmp_path / "<script>&amp;"
    folder.mkdir()
    hostile = page(folder, answers_of(names, counts(size)), warnings=HOSTILE, **knobs)
    assert (hostile.tags, hostile.attributes) == (plain.tags, plain.attributes)
    assert {row[0] for row in hostile.tables[-1][1:]} == set(names)
    others = {folder.name, "<CPU>", "<script>\\udcff", "</dl>"}
    assert {*HOSTILE, *others} <= set(hostile.words)
    assert "default-src 'none'" in (folder / "report.html").read_text(encoding="utf-8")
    assert not {"href", "srcset", "onload"} & hostile.attributes
    assert not {"script", "link", "iframe"} & hostile.tags
    assert all(picture.startswith("data:image/png;base64,") for picture in hostile.pictures)


def test_the_result_comes_first_then_a_matrix_or_pairs_then_the_classes_worst_first(tmp_path):
    confusion = torch.tensor([[8, 0, 0, 0], [3, 6, 1, 0], [0, 0, 0, 0], [0, 1000, 0, 1000]])
    shown = page(tmp_path, answers_of(ANIMALS, confusion))
    facts = ["50.25%", "50.00%", "100.00%", "2.0000", "25.00%", "925", "3.0%"]
    assert [word for word in shown.words if word in facts][:7] == facts
    assert "top-1 of the last weights" in shown.words
    matrix, classes = shown.tables
    assert matrix[0] == ["", *ANIMALS]
    assert matrix[1::2] == [["ant", "8", "", "", ""], ["cow", "", "", "", ""]]
    assert matrix[2::2] == [["bee", "3", "6", "1", ""], ["dog", "", "1,000", "", "1,000"]]
    shades = {value for name, value in shown.pairs if name == "style" and "--shade" in value}
    roots = ("100%", "55%", "77%", "32%", "71%")  # of 1, 0.3, 0.6, 0.1 and 0.5
    assert shades == {f"--shade:{root}" for root in roots}
    styles = {title: shown.pairs[n - 2][1] for n, (_, title) in enumerate(shown.pairs)}
    assert {title: style for title, style in styles.items() if " predicted as " in title} == {
        "ant predicted as ant": "right",
        "bee predicted as ant": "wrong",
        "bee predicted as bee": "right",
        "bee predicted as cow": "wrong",
        "dog predicted as bee": "wrong",
        "dog predicted as dog": "right",
    }
    assert classes == [
        [*HEADS, "most often predicted as", "times"],
        ["dog", "50.0%", "100.0%", "66.7%", "", "2,000", "bee", "1,000"],
        ["bee", "60.0%", "0.6%", "1.2%", "", "10", "ant", "3"],
        ["ant", "100.0%", "72.7%", "84.2%", "", "8", "", "0"],
        ["cow", "", "0.0%", "0.0%", "", "0", "", "0"],
    ]
    many = counts(50)
    many[7, 3] = 5
    names = tuple(f"class {n}" for n in range(100_000))
    found = answers_of(names[:50], many)
    pairs, classes = page(tmp_path, found).tables
    assert pairs[1] == ["class 7", "class 3", "5", f"{5 / 15:.1%}"]
    assert (len(pairs), len(classes)) == (31, 51)
    found = replace(found, source=replace(found.source, classes=names))  # a matrix would not fit
    shown = page(tmp_path, found)
    same, classes = shown.tables
    assert same == pairs
    assert len(classes) == 1001
    assert "The first 1,000 of 100,000." in shown.words


def test_the_loss_is_drawn_once_where_it_decides(tmp_path):
    shown = page(tmp_path, answers_of(ANIMALS[:2], counts(2)), run__best_by="loss")
    assert [word for word in shown.words if word in ("Loss", "Top-1")] == ["Loss", "Top-1"]


def predictions_of_several(names):
    """Answers to four images of any number of labels, of which all have or miss some."""
    labels = torch.tensor([[1, 1, 0], [1, 0, -1], [1, 0, 0], [0, 1, 0]], dtype=torch.int8)
    shares = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.3, 0.9], [0.2, 0.7, 0.1], [0.1, 0.9, 0.4]])
    pixels = torch.full((4, 2, 2, 3), 128, dtype=torch.uint8)
    found = tasks.ImageResult(*torch.zeros(4, 4))
    return tasks.label_predictions(Source(labels, names, pixels), found, shares)


def styles_of(shown):
    """Whether names beside images are of true classes or of wrong ones."""
    return [style for _, style in shown.pairs if style in ("true", "wrong-class")]


def test_a_page_on_several_labels_has_scores_of_each_the_curves_and_wrong_labels(tmp_path):
    config = {"model__task": "multi-label", "run__best_by": "loss"}
    labels = torch.tensor([[1, 0, -1], [1, 1, 0]], dtype=torch.int8)
    shown = page(tmp_path, predictions_of_several(ANIMALS[:3]), labels=labels, **config)
    (classes,) = shown.tables
    assert classes[0] == HEADS
    assert classes[1:] == [
        ["ant", "66.7%", "100.0%", "80.0%", "100.0%", "3"],
        ["bee", "100.0%", "66.7%", "80.0%", "100.0%", "2"],
        ["cow", "", "0.0%", "0.0%", "", "0"],
    ]
    said = " ".join(" ".join(shown.words).split())
    assert "step 20 of 20; finished 2.0000 loss 1.9000 loss of the last weights " in said
    assert "Precision over recall" in said
    assert "In color labels that the image has not, others it has. Some may be wrong" in said
    assert "Some may be wrong labels. ant 20.0% cow 70.0% bee 70.0% " in said
    assert styles_of(shown)[:3] == ["true", "wrong-class", "wrong-class"]
    assert "As the model saw them in step 3. ant bee ant Config" in said
    hostile = page(tmp_path, predictions_of_several(HOSTILE[:3]), labels=labels, **config)
    assert (hostile.tags, hostile.attributes) == (shown.tags, shown.attributes)


def test_at_the_end_classes_with_the_lowest_recall_have_examples_right_and_missed(tmp_path):
    confusion = torch.tensor([[8, 0, 0, 0], [3, 6, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    heading = "Classes with the lowest recall"
    assert heading not in page(tmp_path, answers_of(ANIMALS, confusion)).words
    shown = page(tmp_path, answers_of(ANIMALS, confusion), ended={})
    said = " ".join(" ".join(shown.words).split())
    _, _, examples = said.partition(f"{heading} Up to 4 images that are recognized, and 4 that are")
    examples, _, _ = examples.partition("Most confident mistakes")
    right = "dog 25.0% "  # each of the generated answers has this share of its true class
    missed = "{} 75.0% bee 25.0% "
    assert f"dog: 1 of 2 {right}bee 75.0% {right}bee: 6 of 10 {4 * 'bee 25.0% '}" in examples
    assert f"{missed.format('cow')}{3 * missed.format('ant')}" in examples
    assert not re.search("ant: |cow: ", examples)  # all are right, and there is none
    several = page(tmp_path, predictions_of_several(ANIMALS[:3]), ended={})
    said = " ".join(" ".join(several.words).split())
    assert "are missed. ant: 2 of 3 ant 90.0% ant 60.0% ant 20.0% Most confident" in said


def test_tools_add_sections_and_training_scores_are_beside_those_of_validation(tmp_path):
    sections = [lambda result, report: report.charts.line_chart(result.end, {"": [(1.0, 2.0)]})]
    rows = [*ROWS, {"step": 20, "epoch": 2.0, "train/top1": 0.875}]
    answers = answers_of(ANIMALS[:2], counts(2))
    shown = page(tmp_path, answers, rows, ended={"sections": sections})
    said = " ".join(" ".join(shown.words).split())
    assert re.search(r" Top-1 [0-9.% ]+ epoch train 87.5% val 50% ", said)
    assert " Images per second 0 " in said  # where its axis begins
    assert shown.words.count("finished") == 1


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, 1e30])
def test_curves_of_any_values_are_drawn(tmp_path, loss):
    rows = [*ROWS, {"step": 25, "epoch": 2.5, "train/loss": loss, "train/lr": 0.0}]
    for some in (rows, rows[-1:], []):
        shown = page(tmp_path, answers_of(ANIMALS[:2], counts(2)), some)
        drawn = [value for value in shown.values if re.fullmatch(r"[-\d., e]+", value)]
        assert not re.search("nan|inf", " ".join(drawn))
        assert ("polyline" in shown.tags) == bool(some)


@pytest.mark.usefixtures("pages")
def test_a_run_has_a_page_on_its_way_and_ends_with_one(config, capsys, monkeypatch):
    write = Mock(wraps=report.write_page)
    monkeypatch.setattr(report, "write_page", write)
    monkeypatch.setattr(observer, "PAGE_SECONDS", 0)
    config = changed(config, optim__warmup_epochs=0, epochs=0.5, run__evaluate_every_epochs=0.25)
    train(config)
    first, second = [row["val/top1"] for row in logged(config.run.dir) if "val/top1" in row]
    kept = 1 if first - second > 1.5 / 64 else 2
    others = f"; best.pt has the weights of step {kept}, the latest within an image of the best "
    others += f"score, top-1 {first:.2%}; these are its scores"
    results = [call.args[1] for call in write.call_args_list]
    assert [(result.step, result.end) for result in results] == [
        (1, "not finished"),
        (2, f"finished{others if first > second else ''}"),
    ]
    written = Path(config.run.dir, "report.html")
    text = written.read_text(encoding="utf-8")
    assert "; step 2 of 2; finished" in text
    assert "As the model saw them in step 1." in text
    assert Path(config.run.dir, "predictions.safetensors").exists()
    assert f"report: {written}" in capsys.readouterr().out.splitlines()[-1]
    written.unlink()
    written.mkdir()  # it can't be replaced
    train(config)  # goes on where the run is: at its end
    assert f"cannot write {written}: " in capsys.readouterr().out


@pytest.mark.usefixtures("pages")
def test_the_page_says_why_a_run_ended_and_of_which_weights_its_scores_are(config, monkeypatch):
    values = iter((0.9, 0.1))
    monkeypatch.setitem(METRICS, "mine", Metric(lambda _: next(values), lower_is_better=False))
    config = changed(config, run__best_by="mine", run__patience=1, epochs=3)
    scores = train(config)
    shown = Shown(Path(config.run.dir, "report.html").read_text(encoding="utf-8"))
    end = "step 8 of 12; stopped early: no evaluation of 1 was better; best.pt has the weights of "
    said = " ".join(" ".join(shown.words).split())
    best = "step 4, the latest with the best score, mine 0.9000; these are its scores"
    assert f"{end}{best}" in said
    assert f"{scores.value('top1'):.2%} top-1: " in said
    assert "0.9000 mine 0.1000 mine of the last weights" in said


def test_calibration_is_what_the_paper_says_and_told_in_a_sentence():
    def answers_with(num_wrong, *shares):
        confusion = torch.tensor([[0, num_wrong], [0, len(shares) - num_wrong]])
        return replace(answers_of(ANIMALS[:2], confusion), probability=torch.tensor(shares))

    answers = answers_with(2, 0.9, 0.3, 0.9, 1.0, float("nan"))
    found = predictions.calibrate(answers)
    assert found[0, [4, 13, 14]].tolist() == [1, 2, 1]
    assert predictions.calibration_error(found) == pytest.approx((0.3 + 2 * 0.4 + 0) / 4)
    left_out = predictions.calibrate(replace(answers, predicted=torch.full((5,), LEFT_OUT)))
    assert predictions.calibration_error(left_out) == 0
    for share, num_wrong, words in (
        (0.9, 500, "overconfident by 40.0 points"),
        (0.6, 100, "underconfident by 30.0 points"),
        (0.5, 490, "neither over- nor underconfident"),
        (0.999, 0, "neither over- nor underconfident"),  # a mistake among them may be chance
    ):
        answers = answers_with(num_wrong, *[share] * 1000)
        calibration = predictions.calibrate(answers)
        assert words in report.calibration_text(calibration)


def test_the_surest_mistakes_come_first_with_their_names_and_files(tmp_path):
    for number in range(galleries.PICTURES + 2):
        write_photo(tmp_path / f'photos/ant/{number:02}" id="<b>.jpg', number, (330, 270))
    write_photo(tmp_path / "photos/bee/b.jpg", 0)
    data = DataConfig(name="folder", root=str(tmp_path / "photos"), val_fraction=0.001)
    source = open_dataset(data, "train")
    (tmp_path / 'photos/ant/20" id="<b>.jpg').unlink()  # it is gone
    answer = (torch.arange(len(source)) > 0).long()
    share = torch.linspace(0.55, 0.95, len(source))
    shown = page(tmp_path, predictions.Predictions(source, answer, share, 1 - share))
    paths = [source.paths.relative(n).decode() for n in range(galleries.PICTURES + 1, 1, -1)]
    assert [title for title in shown.titles if title.endswith(".jpg")] == paths
    assert len(shown.pictures) == galleries.PICTURES - 1 + len(MIXED)
    assert max(map(len, shown.pictures)) < 3_000_000 / (3 * galleries.PICTURES)
    said = " ".join(" ".join(shown.words).split())
    assert "In color the predicted class, below it the true one. Some may be wrong" in said
    assert f"Some may be wrong labels. bee {share[-2]:.1%} ant {1 - share[-2]:.1%} " in said
    assert styles_of(shown)[:2] == ["wrong-class", "true"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (MIXED, "ant 63.0% bee 37.0% bee 99.8% ant 0.2%"),
        (torch.tensor([1, 0]), "bee ant"),
        (torch.tensor([1, LEFT_OUT]), "bee cannot be read"),
    ],
)
def test_training_images_are_shown_as_the_model_saw_them(tmp_path, labels, expected):
    shown = page(tmp_path, answers_of(ANIMALS[:2], counts(2)), labels=labels)
    said = " ".join(" ".join(shown.words).split())
    assert f" As the model saw them in step 3. {expected} Config " in said
    picture = base64.b64decode(shown.pictures[-1].partition(",")[2], validate=True)
    assert set(Image.open(io.BytesIO(picture)).tobytes()) == {7}


@pytest.mark.parametrize(
    ("channels", "bits", "shown"), [(1, 16, 1), (2, 8, 1), (3, 16, 3), (5, 16, 3)]
)
def test_images_of_any_channels_are_shown(channels, bits, shown):
    levels = torch.arange(channels, dtype=torch.int32) * 30 + 20
    pixels = (levels << (bits - 8)).to(torch.uint8 if bits == 8 else torch.uint16).expand(9, 9, -1)
    content = base64.b64decode(images.data_uri(pixels).partition(",")[2], validate=True)
    picture = Image.open(io.BytesIO(content))
    expected = tuple(levels.tolist()[:shown] * (3 // shown))
    assert (picture.mode, picture.getpixel((4, 4))) == ("RGB", expected)


def test_curves_are_of_precision_over_recall_and_of_true_over_false_positives(monkeypatch):
    draw = Mock(return_value="")
    monkeypatch.setattr(report, "line_chart", draw)
    report.ranking_curves(predictions_of_several(ANIMALS[:3]))
    (_, precisions), (_, rocs) = (call.args for call in draw.call_args_list)
    assert (1.0, pytest.approx(2 / 3)) in precisions["bee"]  # two of three are bees, and no more
    assert rocs["bee"][0] == (0, 0)
    assert (0.0, 1.0) in rocs["bee"]
    monkeypatch.setattr(report, "MOST_LINES", 1)  # ants and bees are more
    report.ranking_curves(predictions_of_several(ANIMALS[:3]))
    (_, precisions), _ = (call.args for call in draw.call_args_list[2:])
    assert (1.0, pytest.approx(5 / 7)) in precisions["micro average"]


def test_heat_maps_of_mistakes_are_of_the_classes_that_were_predicted():
    found = answers_of(ANIMALS, counts(4))
    explain = Mock(side_effect=UserError("no map"))
    assert "No heat maps: no map" in galleries.mistakes(found, explain)
    indices, classes = explain.call_args.args
    assert classes == found.predicted[indices].tolist() != found.source.labels[indices].tolist()


def test_classes_without_validation_images_are_told():
    found = report.summary([], answers_of(ANIMALS, counts(4)), {"val/classes": 3}, "top1")
    assert "<dd>3 of 4</dd><dt>classes with validation images</dt>" in found
    assert "<dd>90.00%</dd><dt>top-1: 36 of 40 validation images</dt>" in found


def test_the_speed_is_that_of_the_middle_epoch_and_the_waiting_is_that_of_all():
    speeds = {"epoch": [1.0, 2.0, 3.0], "train/images_per_second": [10.0, 900.0, 920.0]}
    speeds |= {"train/waited_fraction": [0.75, 0.0, 0.0]}  # workers start in the first
    rows = [dict(zip(speeds, row, strict=True)) for row in zip(*speeds.values(), strict=True)]
    found = report.summary(rows, answers_of(ANIMALS, counts(4)), {}, "top1")
    assert "<dd>900</dd><dt>images per second</dt>" in found
    assert "<dd>25.0%</dd><dt>waiting for data</dt>" in found


def test_the_config_is_what_is_not_usual_and_all_options_follow(tmp_path):
    own = {"optim__lr": 0.3, "run__best_by": "top1"}
    shown = page(tmp_path, answers_of(ANIMALS[:2], counts(2)), **own)
    said = " ".join(" ".join(shown.words).split())
    assert " Config optim.lr 0.3 All options " in said


@pytest.mark.usefixtures("pages")
def test_a_page_is_not_written_at_each_of_many_evaluations(config, monkeypatch):
    monkeypatch.setattr(report, "write_page", write := Mock())
    monkeypatch.setattr(observer, "function", lambda *_: explain)
    setup, explain = Mock(config=config), Mock()
    conclude = observer.open_observer(setup).conclude
    result = Result(None, {}, 1, 2, 1, "not finished", [])
    assert [conclude(result) for _ in range(3)] == [""] * 3
    last = replace(result, is_last=True, model=Mock())
    assert conclude(last).startswith("report: ")
    assert write.call_count == 1
    explain.assert_called_once_with(last.model, setup.normalize, setup.val_data)
