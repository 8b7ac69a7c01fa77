"""The page that a run ends with shows all there is to see, needs nothing, and runs nothing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import changed
from torch import Tensor

from image_classifier.config import Config, flatten
from image_classifier.page import ticks, write_page
from image_classifier.train import train

HOSTILE = (
    "<script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "' style='display:none",
    "</td></table><img src=http://example.com/>",
    "&lt;b&gt;",
    "$title ${facts} {0} %s",
    "\\udcff\\x00",
    "日本 🦊 \u202e",
)
ROWS = [
    {"step": 5, "epoch": 0.5, "train/loss": 2.5, "train/lr": 0.1, "train/images_per_second": 900.0}
    | {"train/waited_fraction": 0.02},
    {"step": 10, "epoch": 1.0, "val/loss": 2.0, "val/top1": 0.75, "val/top5": 1.0},
    {"step": 15, "epoch": 1.5, "train/loss": 1.5, "train/lr": 0.2, "train/images_per_second": 950.0}
    | {"train/waited_fraction": 0.04},
    {"step": 20, "epoch": 2.0, "val/loss": 1.9, "val/top1": 0.5, "val/top5": 1.0},
]


class Page(HTMLParser):
    """What a browser makes of a page: elements, attributes, and the text of each table's cells."""

    def __init__(self, text: str) -> None:
        """Read all of it."""
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.values: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.words: list[str] = []
        self.is_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count it, and begin a table, a row or a cell."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.values += [value or "" for _, value in attrs]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.is_cell = True

    def handle_endtag(self, tag: str) -> None:
        """End a cell."""
        if tag in ("td", "th"):
            self.is_cell = False

    def handle_data(self, data: str) -> None:
        """Add to the cell, if there is one."""
        self.words.append(data)
        if self.is_cell:
            self.tables[-1][-1][-1] += data


def page(
    folder: Path, classes: tuple[str, ...], confusion: Tensor, rows: list[dict] = ROWS, **knobs: str
) -> Page:
    """The page of a run that logged `rows` and ended in `confusion`."""
    config = changed(Config(), **knobs)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(flatten(config)))
    (folder / "environment.json").write_text(json.dumps({"device": "<CPU>", "commit": None}))
    write_page(folder, classes, confusion)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def counts(size: int) -> Tensor:
    """A confusion matrix in which each class is taken for the next once, and is right 9 times."""
    return 9 * torch.eye(size, dtype=torch.int64) + torch.eye(size, dtype=torch.int64).roll(1, 1)


@pytest.mark.parametrize("size", [len(HOSTILE), 40])
def test_names_are_shown_and_never_run(tmp_path: Path, size: int) -> None:
    harmless = tuple(f"class {n}" for n in range(size))
    plain = page(tmp_path, harmless, counts(size))
    names = HOSTILE + harmless[len(HOSTILE) :]
    hostile = page(tmp_path, names, counts(size), run__dir="<script>\udcff", data__root="</dl>")
    assert "script" not in plain.tags
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    shown = [row[0] for row in hostile.tables[-1][1:]]
    assert set(shown) == set(names)
    assert {"<CPU>", "<script>\\udcff", "</dl>"} <= set(hostile.words)


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    shown = page(tmp_path, ("ant", "bee"), counts(2))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert not {"src", "href", "srcset", "onload"} & shown.attributes
    assert not {"script", "link", "img", "iframe"} & shown.tags
    assert "prefers-color-scheme: dark" in text
    assert any("default-src 'none'" in value for value in shown.values)


def test_every_class_has_its_row_and_the_worst_is_first(tmp_path: Path) -> None:
    confusion = torch.tensor([[8, 0, 0, 0], [3, 6, 1, 0], [0, 0, 0, 0], [0, 1000, 0, 1000]])
    *_, table = page(tmp_path, ("ant", "bee", "cow", "dog"), confusion).tables
    assert table == [
        ["class", "recall", "precision", "images", "most often taken for", "times"],
        ["dog", "50.0%", "100.0%", "2,000", "bee", "1,000"],
        ["bee", "60.0%", "0.6%", "10", "ant", "3"],
        ["ant", "100.0%", "72.7%", "8", "", "0"],
        ["cow", "", "0.0%", "0", "", "0"],
    ]


def test_few_classes_make_a_matrix_and_many_a_list_of_pairs(tmp_path: Path) -> None:
    matrix, _ = page(tmp_path, ("ant", "bee", "cow"), counts(3)).tables
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


def test_the_result_comes_first(tmp_path: Path) -> None:
    words = page(tmp_path, ("ant", "bee"), counts(2)).words
    facts = [word for word in words if word in ("90.00%", "75.00%", "1.9000", "925", "3.0%")]
    assert facts == ["90.00%", "75.00%", "1.9000", "925", "3.0%"]
    assert "best top-1, at epoch 1" in words


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, 1e30])
def test_curves_of_any_values_are_drawn(tmp_path: Path, loss: float) -> None:
    rows = [*ROWS, {"step": 25, "epoch": 2.5, "train/loss": loss, "train/lr": 0.0}]
    for logged in (rows, rows[-1:], []):
        shown = page(tmp_path, ("ant",), torch.tensor([[3]]), logged)
        drawn = [value for value in shown.values if re.fullmatch(r"[-\d., e]+", value)]
        assert not re.search("nan|inf", " ".join(drawn))
        assert ("svg" in shown.tags) == bool(logged)
        if rows[-1] in logged and loss != 0:
            assert any(word.endswith(f" {loss:.4g}") for word in shown.words) or len(logged) == 1


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0.1, 0.25), (2.29, 2.41), (93, 93), (0, 0), (-3, 5), (1e-9, 3e-9), (0, 7e30)],
)
def test_an_axis_has_a_few_round_ticks(low: float, high: float) -> None:
    levels = ticks(low, high)
    assert 2 <= len(levels) <= 7
    assert levels == sorted(set(levels))
    assert levels[0] <= low <= high <= levels[-1]
    assert levels == pytest.approx([float(f"{level:.3g}") for level in levels], rel=1e-9)


def test_a_run_ends_with_its_page(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(config, optim__warmup_epochs=0, epochs=0.25)
    train(config)
    written = Path(config.run.dir, "report.html")
    assert Page(written.read_text(encoding="utf-8")).tables[1][0][0] == "class"
    assert f"report: {written}" in capsys.readouterr().out.splitlines()[-1]
    written.write_text("of an earlier run")
    train(config)  # goes on where the run is: at its end
    assert len(Page(written.read_text(encoding="utf-8")).tables[1]) == 11
    assert [path.name for path in Path(config.run.dir).glob(".*.tmp")] == []
