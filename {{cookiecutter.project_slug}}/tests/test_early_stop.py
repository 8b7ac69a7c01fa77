"""Runs that end when they get no better."""

import json
from dataclasses import replace
from pathlib import Path

from conftest import changed, run_ranks
from safetensors import safe_open
from test_faults import status

from image_classifier import train as train_module


def train_with_planned_scores(config):
    """Train on 64 images; the second evaluation is the best, the fourth an image behind it."""
    top1, evaluate = iter((0.2, 0.5, 0.4, 31 / 64, 0.9)), train_module.evaluate
    train_module.evaluate = lambda *words: replace(
        found := evaluate(*words), known=found.known | {"top1": next(top1)}
    )
    train_module.train(config)


def test_a_run_ends_on_all_ranks_when_it_gets_no_better(config):
    run_ranks(2, train_with_planned_scores, changed(config, epochs=8, run__patience=2))
    found = status(config)
    assert (found["state"], found["step"]) == ("done", 16)
    assert (
        "no evaluation of 2 was better; best.pt has the weights of step 16 "
        "(best of all evaluations: top-1 50.00%)" in found["message"]
    )
    with safe_open(Path(config.run.dir, "predictions.safetensors"), "pt") as file:
        assert json.loads(file.metadata()["about"])["step"] == 16
