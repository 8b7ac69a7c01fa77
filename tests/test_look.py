"""Pages can be read at any width, by day and by night: looked at by Chromium, where there is one.

The pictures are in `build/look`.
"""

import json
import math
import shutil

import pytest
import torch
from conftest import ROOT
from image_classifier.config import Config
from image_classifier.data import Source
from image_classifier.metrics import Decision
from image_classifier.runtime.config_dict import flatten
from image_classifier.tasks import TASKS, ImageResult
from image_classifier.tools.calibration.observer import build_section
from image_classifier.tools.report import charts
from image_classifier.tools.report.page import write_page
from image_classifier.tools.search_page.coordinates import parallel_coordinates
from image_classifier.tracking import Result
from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
LOOK = (ROOT / "tests" / "look.js").read_text(encoding="utf-8")
WORDS = (
    "cat",
    "golden_retriever",
    "traffic light",
    "a-name-that-goes-on-without-space",
    "名前",
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser():
    """Chromium."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=BROWSER, args=["--disable-background-networking"]
        )
        yield opened
        opened.close()


def complaints(browser, path):
    """What is wrong with the look of a page at each width, on light and dark paper."""
    found = []
    tab = browser.new_page()
    tab.goto(path.as_uri())
    tab.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    for width, scheme in ((390, "light"), (768, "light"), (1280, "light"), (1280, "dark")):
        tab.set_viewport_size({"width": width, "height": 900})  # a telephone, a tablet, a screen
        tab.emulate_media(color_scheme=scheme)
        picture = ROOT / "build" / "look" / f"{path.stem}-{width}-{scheme}.png"
        tab.screenshot(path=picture, full_page=True)
        found += [f"{width} {scheme}: {line}" for line in tab.evaluate(LOOK)]
    tab.close()
    return found


def rows_of(metric):
    """What a run of ten epochs logs, with numbers that need much room."""
    for step in range(1, 101):
        left = math.exp(-step / 40)
        speed = {"train/images_per_second": 1e5 + 9e4 * left, "train/waited_fraction": left / 9}
        row = {"step": step, "epoch": step / 10, "train/loss": 7 * left, "train/lr": 2.5e-05 * left}
        if step % 10 == 0:
            speed = {"val/loss": 0.2 + 6 * left, f"val/{metric}": 1 - left}
            speed[f"train/{metric}"] = 1 - left**2
        yield row | speed


def predictions_of(count, has_several):
    """Predictions for noise of so many classes, of which some are right."""
    draw = torch.Generator().manual_seed(count)
    classes = tuple(f"{WORDS[n % len(WORDS)]} {n}" for n in range(count))
    size = max(200, 2 * count)
    labels = torch.randint(count, (size,), generator=draw)
    if has_several:
        labels = (torch.rand(size, count, generator=draw) < 0.3).to(torch.int8)
    truth = labels if has_several else torch.nn.functional.one_hot(labels, count)
    logits = 3.0 * truth + 1.5 * torch.randn(size, count, generator=draw) - 1.5
    task = TASKS["multi-label" if has_several else "single-label"]
    pixels = torch.randint(256, (size, 32, 32, 3), dtype=torch.uint8, generator=draw)
    found = ImageResult(*task.results(logits, labels))
    return task.predictions(Source(labels, classes, pixels), found, task.probabilities(logits))


@pytest.mark.parametrize(
    ("count", "has_several"),
    [(2, False), (10, False), (100, False), (1000, False), (3, True), (60, True)],
)
def test_the_page_of_a_run_can_be_read(browser, tmp_path, count, has_several):
    predictions = predictions_of(count, has_several)
    metric = "average_precision" if has_several else "top1"
    task = {"model.task": "multi-label"} if has_several else {}
    texts = {
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows_of(metric)),
        "config.json": json.dumps(flatten(Config()) | task | {"data.root": "/data" * 40}),
        "environment.json": json.dumps({"device": "cpu", "commit": "0123456789abcdef" * 3}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    metrics = {f"val/{metric}": 0.8125, "val/loss": 12345.6789, "val/top5": 1.0, "val/ece": 0.1}
    result = Result(
        predictions,
        metrics,
        step=100,
        total_steps=100,
        best_step=100,
        end="finished",
        warnings=["a warning: " + "runs/folder/" * 30],
        decision=Decision(1.3),
        is_last=True,
        sections=[build_section],
    )
    samples = predictions.source.pixels[:24], predictions.source.labels[:24], 3
    write_page(tmp_path, result, samples)
    kind = "labels" if has_several else "classes"
    path = (tmp_path / "report.html").rename(tmp_path / f"{count}-{kind}.html")
    assert complaints(browser, path) == []


def test_charts_of_other_pages_can_be_read(browser, tmp_path):
    lrs = [10 ** (n / 10 - 8) for n in range(101)]
    axes = {"optim.lr": lrs[:50], "model.name": [f"network-{n % 4}" for n in range(50)]}
    axes["top-1, %"] = [n / 3 for n in range(50)]
    runs = {f"{n:03}": [(float(m), 50 + n - 30 / (m + 1)) for m in range(9)] for n in range(50)}
    body = [
        parallel_coordinates("Knobs and result", axes, [*runs], 7),
        '<div class="charts">',
        charts.line_chart("Validation top-1", runs, unit="%", main="007"),
        charts.line_chart("loss", {"loss": [(lr, lr) for lr in lrs]}, x_label="rate", is_log=True),
        charts.line_chart("memory", {"": [(1, 0.5), (4096, 120.0)]}, unit=" GB", is_log=True),
        charts.line_chart("nothing changes", {"train": [(0.0, 5.0), (1e6, 5.0)]}),
        "</div>",
    ]
    path = tmp_path / "charts.html"
    path.write_text(charts.PAGE.substitute(title="charts", body="\n".join(body)), encoding="utf-8")
    assert complaints(browser, path) == []


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (
            '<svg><text y="20">one</text><text y="24">other</text></svg>',
            "over one another",
        ),
        ('<p style="overflow: hidden; width: 2rem; white-space: nowrap">too long</p>', "cut off"),
        ('<p style="white-space: nowrap">' + "word " * 300 + "</p>", "outside"),
        ('<p style="width: 2000px">text</p>', "the page is wider than the window"),
        ('<p style="color: #999">gray</p>', "contrast 2.8: gray"),
    ],
)
def test_what_cannot_be_read_is_told(browser, tmp_path, body, complaint):
    path = tmp_path / "bad.html"
    path.write_text(charts.PAGE.substitute(title="bad", body=body), encoding="utf-8")
    assert any(complaint in line for line in complaints(browser, path))
