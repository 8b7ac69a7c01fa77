"""Runs that end when they get no better."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import changed, run_ranks
from safetensors import safe_open
from test_faults import status

from image_classifier import train as train_module
from image_classifier.checkpoints.reading import read_checkpoint


def train_with_planned_scores(config, fourth):
    """Train, where the second evaluation is the best, and with this top-1 of the fourth."""
    top1, evaluate = iter((0.2, 0.5, 0.4, fourth, 0.9)), train_module.evaluate
    train_module.evaluate = lambda *words: replace(
        found := evaluate(*words), known=found.known | {"top1": next(top1)}
    )
    train_module.train(config)


@pytest.mark.parametrize(("right", "kept"), [(31, 16), (30, 8)])  # of 64: one less, and two
def test_a_run_ends_on_all_ranks_when_it_gets_no_better(right, kept, config):
    config = changed(config, epochs=8, run__patience=2)
    run_ranks(2, train_with_planned_scores, config, right / 64)
    found = status(config)
    assert (found["state"], found["step"]) == ("done", 16)
    said = f"no evaluation of 2 was better; best.pt has the weights of step {kept}, the latest "
    assert f"{said}within an image of the best score, top-1 50.00%" in found["message"]
    with safe_open(Path(config.run.dir, "predictions.safetensors"), "pt") as file:
        assert json.loads(file.metadata()["about"])["step"] == kept
    best = read_checkpoint(Path(config.run.dir, "checkpoints", "best.pt"))
    assert best["state"]["step"] == kept
