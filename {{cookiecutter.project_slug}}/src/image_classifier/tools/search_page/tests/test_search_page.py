# ruff: noqa: E402 - nothing here can be imported without Ray
"""The page of a search: it shows all trials, needs nothing, and says which knobs matter."""

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
