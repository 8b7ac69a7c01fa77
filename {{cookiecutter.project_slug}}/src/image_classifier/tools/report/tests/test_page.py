"""The page that a run ends with shows all there is to see, needs nothing, and runs nothing."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import HOSTILE, Shown, answers_of, changed, write_photo
from PIL import Image
from torch import Tensor

from image_classifier.config import Config, DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.data.datasets.source import Source
from image_classifier.data.samples import LEFT_OUT
from image_classifier.predictions import (
    BINS,
    Predictions,
    calibrate,
)
from image_classifier.runtime.config_dict import flatten
from image_classifier.tools.html.svg import ticks
from image_classifier.tools.report import page as page_module
from image_classifier.tools.report.page import (
    PICTURES,
    Page,
    Samples,
    calibration_section,
    write_page,
)
from image_classifier.train import train

ROWS = [
    {"step": 5, "epoch": 0.5, "train/loss": 2.5, "train/lr": 0.1, "train/images_per_second": 900.0}
    | {"train/waited_fraction": 0.02},
    {"step": 10, "epoch": 1.0, "val/loss": 2.0, "val/top1": 0.75, "val/top5": 1.0},
    {"step": 15, "epoch": 1.5, "train/loss": 1.5, "train/lr": 0.2, "train/images_per_second": 950.0}
    | {"train/waited_fraction": 0.04},
    {"step": 20, "epoch": 2.0, "val/loss": 1.9, "val/top1": 0.5, "val/top5": 1.0},
]


SIZES = ((2, 2), (4, 4))  # of the pictures: to evaluate on, and to train with


def page(
    folder: Path,
    classes: tuple[str, ...],
    confusion: Tensor,
    rows: list[dict] = ROWS,
    warnings: tuple[str, ...] = ("a learning rate",),
    **knobs: str,
) -> Shown:
    """The page of a run that logged `rows` and `warnings`, and ended in `confusion`."""
    prepare(folder, rows, **knobs)
    labels = torch.zeros(2, len(classes))
    labels[0, -1], labels[1] = 1.0, 1 / len(classes)
    seen = Samples(1, torch.zeros(2, 4, 4, 3, dtype=torch.uint8), labels)
    write_page(folder, answers_of(classes, confusion), "running", seen, warnings)
    return Shown((folder / "report.html").read_text(encoding="utf-8"))


def prepare(folder: Path, rows: list[dict] = ROWS, **knobs: str) -> None:
    """What a run writes besides."""
    config = changed(Config(), **knobs)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(flatten(config)))
    (folder / "environment.json").write_text(json.dumps({"device": "<CPU>", "commit": None}))


def counts(size: int) -> Tensor:
    """A confusion matrix in which each class is taken for the next once, and is right 9 times."""
    return 9 * torch.eye(size, dtype=torch.int64) + torch.eye(size, dtype=torch.int64).roll(1, 1)


@pytest.mark.parametrize("size", [len(HOSTILE), 40])
def test_names_are_shown_and_never_run(tmp_path: Path, size: int) -> None:
    harmless = tuple(f"class {n}" for n in range(size))
    plain = page(tmp_path, harmless, counts(size))
    names = HOSTILE + harmless[len(HOSTILE) :]
    knobs = {"run__dir": "<script>\udcff", "data__root": "</dl>"}
    hostile = page(tmp_path, names, counts(size), warnings=HOSTILE, **knobs)
    assert "script" not in plain.tags
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    shown = [row[0] for row in hostile.tables[-1][1:]]
    assert set(shown) == set(names)
    first = hostile.words.index("Warnings")
    assert [word for word in hostile.words[first + 1 :] if word.strip()][: len(HOSTILE)] == list(
        HOSTILE
    )
    assert {"<CPU>", "<script>\\udcff", "</dl>"} <= set(hostile.words)


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    shown = page(tmp_path, ("ant", "bee"), counts(2))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert shown.pictures
    for picture in shown.pictures:
        kind, _, content = picture.partition(",")
        assert kind == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(content, validate=True))).size in SIZES
        text = text.replace(picture, "")
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert not {"href", "srcset", "onload"} & shown.attributes
    assert not {"script", "link", "iframe"} & shown.tags
    assert "prefers-color-scheme: dark" in text
    assert any("default-src 'none'" in value for value in shown.values)


def test_every_class_has_its_row_and_the_worst_is_first(tmp_path: Path) -> None:
    confusion = torch.tensor([[8, 0, 0, 0], [3, 6, 1, 0], [0, 0, 0, 0], [0, 1000, 0, 1000]])
    *_, table = page(tmp_path, ("ant", "bee", "cow", "dog"), confusion).tables
    assert table == [
        ["class", "recall", "precision", "images", "most often predicted as", "times"],
        ["dog", "50.0%", "100.0%", "2,000", "bee", "1,000"],
        ["bee", "60.0%", "0.6%", "10", "ant", "3"],
        ["ant", "100.0%", "72.7%", "8", "", "0"],
        ["cow", "", "0.0%", "0", "", "0"],
    ]


def test_the_result_comes_first_then_a_matrix_or_a_list_of_pairs(tmp_path: Path) -> None:
    shown = page(tmp_path, ("ant", "bee", "cow"), counts(3))
    facts = ["90.00%", "75.00%", "1.9000", "925", "3.0%", "15.0%"]
    assert [word for word in shown.words if word in facts][:6] == facts
    matrix, _ = shown.tables
    assert matrix == [
        ["", "ant", "bee", "cow"],
        ["ant", "9", "1", ""],
        ["bee", "", "9", "1"],
        ["cow", "1", "", "9"],
    ]
    many = counts(50)
    many[7, 3] = 5
    pairs, classes = page(tmp_path, tuple(f"class {n}" for n in range(50)), many).tables
    assert pairs[1] == ["class 7", "class 3", "5", f"{5 / 15:.1%}"]
    assert len(pairs) <= 31
    assert len(classes) == 51


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, 1e30])
def test_curves_of_any_values_are_drawn(tmp_path: Path, loss: float) -> None:
    rows = [*ROWS, {"step": 25, "epoch": 2.5, "train/loss": loss, "train/lr": 0.0}]
    for logged in (rows, rows[-1:], []):
        shown = page(tmp_path, ("ant",), torch.tensor([[3]]), logged)
        drawn = [value for value in shown.values if re.fullmatch(r"[-\d., e]+", value)]
        assert not re.search("nan|inf", " ".join(drawn))
        assert ("polyline" in shown.tags) == bool(logged)


@pytest.mark.parametrize(
    ("low", "high", "levels"),
    [
        (0, 1, [0, 0.5, 1]),
        (2.29, 2.41, [2.25, 2.3, 2.35, 2.4, 2.45]),
        (93, 93, [0, 50, 100]),
        (0, 0, [0, 0.5, 1]),
        (0, 7e30, [0, 2e30, 4e30, 6e30, 8e30]),
    ],
)
def test_an_axis_has_a_few_round_ticks(low: float, high: float, levels: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(levels)


def test_a_run_has_a_page_on_its_way_and_ends_with_one(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, states = Page.write, []

    def write_and_look(page: Page, answers: Predictions, state: str) -> None:
        write(page, answers, state)
        states.append(state)

    monkeypatch.setattr(Page, "is_due", True)
    monkeypatch.setattr(Page, "write", write_and_look)
    config = changed(config, optim__warmup_epochs=0, epochs=0.5, run__evaluate_every_epochs=0.25)
    train(config)
    assert [state.split(",")[0] for state in states] == ["step 1 of 2", "step 2 of 2"]
    assert all(state.endswith("running") for state in states)
    written = Path(config.run.dir, "report.html")
    shown = Shown(written.read_text(encoding="utf-8"))
    assert shown.tables[1][0][0] == "class"
    assert any(re.fullmatch("step 2 of 2, .*, done", word) for word in shown.words)
    assert "As the model saw them in step 1." in shown.words
    assert Path(config.run.dir, "predictions.safetensors").exists()
    assert f"report: {written}" in capsys.readouterr().out.splitlines()[-1]
    written.write_text("of an earlier run")
    train(config)  # goes on where the run is: at its end
    assert len(Shown(written.read_text(encoding="utf-8")).tables[1]) == 11
    assert [path.name for path in Path(config.run.dir).glob(".*.tmp")] == []


def said(*pairs: tuple[float, bool]) -> Predictions:
    """Predictions with these probabilities, which are right or not."""
    shares, right = torch.tensor(pairs, dtype=torch.float32).T
    pixels = torch.zeros((len(pairs), 1, 1, 3), dtype=torch.uint8)
    source = Source(torch.ones(len(pairs), dtype=torch.int64), ("ant", "bee"), pixels)
    return Predictions(source, right.long(), shares, shares)


def test_calibration_is_what_the_paper_says() -> None:
    answers = said((0.9, True), (0.9, False), (0.3, False), (1.0, True), (float("nan"), True))
    found = calibrate(answers)
    assert found.counts[[4, 13, 14]].tolist() == [1, 2, 1]
    assert found.error == pytest.approx((0.3 + 2 * 0.4 + 0) / 4)
    left_out = replace(answers, predicted=torch.full((5,), LEFT_OUT))
    assert calibrate(left_out).counts.tolist() == [0] * BINS
    assert calibrate(left_out).error == 0


@pytest.mark.parametrize(
    ("share", "num_right", "words"),
    [
        (0.9, 500, "overconfident by 40.0 points"),
        (0.6, 900, "underconfident by 30.0 points"),
        (0.5, 510, "neither over- nor underconfident"),
    ],
)
def test_a_sentence_says_how_far_to_trust_the_model(
    share: float, num_right: int, words: str
) -> None:
    answers = said(*[(share, number < num_right) for number in range(1000)])
    assert words in calibration_section(calibrate(answers))


def test_the_surest_mistakes_come_first_with_their_names_and_files(
    tmp_path: Path, photos: Path
) -> None:
    prepare(tmp_path)
    source = open_dataset(DataConfig(name="folder", root=str(photos)), "train")
    count = len(source)
    answer = source.labels.clone()
    answer[[3, 7]] = 1 - answer[[3, 7]]
    probability = torch.linspace(0.55, 0.95, count)
    answers = Predictions(source, answer, probability, 1 - probability)
    assert answers.worst(PICTURES) == [7, 3]
    assert answers.least_certain(3) == [0, 1, 2]
    write_page(tmp_path, answers)
    shown = Shown((tmp_path / "report.html").read_text(encoding="utf-8"))
    paths = [source.paths.relative(n).decode() for n in [7, 3, *range(count)]]
    assert [title for title in shown.titles if title.endswith(".jpg")] == paths
    assert len(shown.pictures) == 2 + count
    assert shown.pictures[0] == shown.pictures[2 + 7]
    words = [word.strip() for word in shown.words if word.strip()]
    first = words.index("Most confident mistakes") + 2
    name, truth = source.classes[answer[7]], source.classes[source.labels[7]]
    assert words[first : first + 4] == [name, "80%", truth, "20%"]
    sheets = Page(tmp_path).contact_sheets(answers)  # for trackers
    assert {kind: sheet.shape for kind, sheet in sheets.items()} == {"mistakes": (96, 768, 3)}
    assert (sheets["mistakes"][:, 192:] == 255).all()  # nothing after the two
    assert not (sheets["mistakes"][:, 96:192] == 255).all()


def test_a_picture_that_is_gone_is_left_out_and_a_large_one_is_small(tmp_path: Path) -> None:
    for number in range(PICTURES + 1):
        write_photo(tmp_path / "photos" / "val" / "ant" / f"{number}.jpg", number, (330, 270))
    prepare(tmp_path)
    source = open_dataset(DataConfig(name="folder", root=str(tmp_path / "photos")), "val")
    (tmp_path / "photos" / "val" / "ant" / "0.jpg").unlink()
    share = torch.linspace(0, 1, PICTURES + 1)
    write_page(tmp_path, Predictions(source, source.labels, share, share))
    shown = Shown((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(shown.pictures) == PICTURES - 1
    assert max(map(len, shown.pictures)) < 3_000_000 / (3 * PICTURES)


@pytest.mark.parametrize(
    ("labels", "captions"),
    [
        (torch.tensor([(0.63, 0.37), (0.37, 0.63)]), ["63%", "37%"]),
        (torch.tensor([(0.998, 0.002)]), ["99.8%", "0.2%"]),
        (torch.tensor([1, 0]), []),
    ],
)
def test_training_images_are_shown_as_the_model_saw_them(
    tmp_path: Path, labels: Tensor, captions: list[str]
) -> None:
    prepare(tmp_path)
    page = Page(tmp_path)
    pixels = torch.randint(0, 256, (len(labels), 4, 4, 3), dtype=torch.uint8)
    page.record_augmented_samples(pixels, labels, 3)
    page.write(answers_of(("ant", "bee"), counts(2)), "")
    shown = Shown((tmp_path / "report.html").read_text(encoding="utf-8"))
    first = shown.words.index("As the model saw them in step 3.")
    said = [word.strip() for word in shown.words[first + 1 : shown.words.index("Config")]]
    assert [word for word in said if "%" in word][: len(captions)] == captions
    assert ("bee" if labels.ndim == 1 else "ant") in said
    picture = base64.b64decode(shown.pictures[-len(labels)].partition(",")[2])
    assert torch.tensor(list(Image.open(io.BytesIO(picture)).tobytes())).equal(pixels[0].flatten())


def test_a_page_is_written_during_the_run_when_that_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(page_module.time, "monotonic", lambda: now)
    prepare(tmp_path)
    answers, page = answers_of(("ant", "bee"), counts(2)), Page(tmp_path)
    assert not page.is_due
    now = 25.1
    assert page.is_due
    page.write(answers, "running")
    page.took_seconds = 2.0
    now += 99
    assert not page.is_due
    now += 2
    assert page.is_due
    page.restate("failed: <b> \\1")
    text = page.path.read_text(encoding="utf-8")
    assert "failed: <b> \\1" in Shown(text).words
    assert text.count("running") == 0
    page.path.write_bytes(b"\xff of somebody else")
    page.restate("done")
