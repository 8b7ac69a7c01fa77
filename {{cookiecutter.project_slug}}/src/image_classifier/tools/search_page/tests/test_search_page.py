# ruff: noqa: E402 - nothing here can be imported without Ray
"""The page of a search: it shows all trials, needs nothing, and says which knobs matter."""

import math
import re

import pytest
from conftest import HOSTILE, Shown, write_trial

tune = pytest.importorskip("ray.tune")
pytest.importorskip("optuna")
for tool in ("ray_train", "report", "runs", "search"):
    pytest.importorskip(f"image_classifier.tools.{tool}")

from image_classifier.config import Config
from image_classifier.tools.search import engines, results, spaces
from image_classifier.tools.search_page import trials_page


def test_the_page_shows_all_trials_needs_nothing_and_runs_nothing(tmp_path):
    for number, lr in enumerate((0.01, 0.1, 1.0, 0.02, 0.2)):
        write_trial(
            tmp_path, number, [0.3, 0.5 + lr / 10], **{"optim.lr": lr, "a.b": HOSTILE[number % 4]}
        )
    write_trial(tmp_path, 5, [0.9], "stopped", **{"optim.lr": 0.5, "a.b": HOSTILE[0]})
    trials = results.read_trials(tmp_path, "top1")
    table = results.table_of(trials, 2)
    text = trials_page.page_of("<b>", trials, table, {"optim.lr": 1.0})
    shown = Shown(text)
    assert "default-src 'none'" in text
    assert not {"script", "link", "iframe", "b", "img"} & shown.tags
    assert not {"href", "src", "onload", "onmouseover"} & shown.attributes
    assert {"optim.lr", "100%", "Validation top-1", table} <= set(shown.words)


def test_the_best_trial_is_shown_among_those_that_were_evaluated_on_axes_of_their_kinds(tmp_path):
    for number, (lr, top1s) in enumerate({0.01: [], 0.02: [0.25], 0.5: [0.75], 0.1: [0.5]}.items()):
        write_trial(tmp_path, number, top1s, **{"optim.lr": lr})
    text = trials_page.page_of("a", results.read_trials(tmp_path, "top1"), "", {})
    trials, curves = re.findall("<svg.*?</svg>", text, re.DOTALL)
    assert re.findall("<title>(.*?)</title>", trials) == ["001", "003", "002"]
    assert re.findall('<g class="(.*?)">', trials) == ["train", "train", "val"]
    lines = re.findall('points="(.*?)"', trials)
    low, middle, high = (float(line.split()[0].partition(",")[2]) for line in lines)
    share = (low - middle) / (low - high)
    assert share == pytest.approx(math.log(0.1 / 0.02) / math.log(0.5 / 0.02), abs=0.01)
    labels = re.findall('<text x="[^"]*" y="[^"]*">(.*?)</text>', trials)
    assert labels == ["0.02", "0.5", "25", "75"]
    assert ">top-1, %</text>" in trials
    assert re.findall('<g class="(.*?)">', curves) == ["train", "train", "val"]
    assert "</i>002 75%</span>" in text


def test_a_grid_between_bounds_of_many_digits_has_an_importance(tmp_path):
    domains = {
        "optim.lr": tune.loguniform(1 / 3000, 1 / 3),
        "optim.momentum": tune.uniform(0, 2 / 3),
    }
    space = engines.open_space(domains, Config())
    for number, knobs in enumerate(engines.grid(space, 9, seed=0)):
        write_trial(tmp_path, number, [knobs["optim.lr"]], **knobs)
    found = trials_page.importance_of(results.read_trials(tmp_path, "top1"), space)
    assert found["optim.lr"] > found["optim.momentum"]
    assert not trials_page.importance_of(results.read_trials(tmp_path, "top1"), spaces.optimizers)
