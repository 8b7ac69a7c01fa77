"""What a run says at its end: facts, and what may be chance is called so."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from image_classifier.data.datasets.source import Source
from image_classifier.extensions import find_tool
from image_classifier.metrics import Predictions
from image_classifier.tools.advice.observer import (
    certainty,
    confusions,
    gain_over,
    late_gain,
    open_observer,
)
from image_classifier.tracking import Result


def predicted(labels, answers, classes=("ant", "bee", "cat")):
    """Predictions of three classes."""
    labels, answers = torch.tensor(labels), torch.tensor(answers)
    source = Source(labels, classes, pixels=torch.zeros(len(labels), 8, 8, 3).byte())
    sure = torch.ones(len(labels))
    return Predictions(source, answers, sure, sure)


def test_the_classes_that_are_confused_most_are_named_with_their_images():
    found = predicted([0] * 5 + [1] * 5 + [2] * 4, [0, 1, 1, 1, 2] + [1] * 5 + [2, 2, 0, 0])
    assert confusions(found, torch.tensor([50, 70, 9])) == (
        "most often taken: ant for bee (3 of 5 images; 50 and 70 to train on), "
        "cat for ant (2 of 4 images; 9 and 50 to train on)"
    )
    assert not confusions(predicted([0, 1, 2], [0, 1, 0]), torch.tensor([1, 1, 1]))  # one mistake
    many = tuple(map(str, range(100_000)))  # of which a matrix would not fit in memory
    found = predicted([99_999] * 2, [7] * 2, many)
    assert "99999 for 7 (2 of 2 images; 0 and 0" in confusions(found, torch.zeros(100_000).long())


@pytest.mark.parametrize(
    ("num_gained", "said"),
    [
        (30, r"gained \+30\.0 points over what it began with \(95 %: \+2"),
        (1, "which may be chance"),
    ],
)
def test_a_gain_of_fine_tuning_is_told_from_chance(num_gained, said):
    pytest.importorskip("image_classifier.tools.runs")
    labels = [0] * 100
    probe = predicted(labels, [1] * num_gained + [0] * (100 - num_gained))
    assert re.search(said, gain_over(probe.predicted, predicted(labels, labels)))
    told = late_gain(probe.predicted, predicted(labels, labels), since=0.6, is_later=True)
    assert told.startswith("since 60% of the steps +")
    assert told.endswith("may gain more" if num_gained == 30 else "would hardly gain")


@pytest.mark.parametrize(
    ("low", "high", "is_chance"), [(0.01, 0.2, False), (-0.2, -0.01, False), (-0.1, 0.2, True)]
)
def test_a_gain_or_a_loss_whose_interval_has_no_zero_is_no_chance(low, high, is_chance):
    assert ("may be chance" in certainty(low, high)) == is_chance


def test_nothing_is_gained_over_a_layer_of_zeros_or_since_later_than_the_best(tmp_path, capsys):
    pytest.importorskip("image_classifier.tools.runs")
    conclude = observer_of(tmp_path, predicted([0, 1, 2] * 20, [0, 1, 2] * 20))
    for step, answers in ((0, [2, 2, 2]), (500, [0, 1, 2]), (750, [0, 1, 0])):
        conclude(result_of(answers, step, best_step=min(step, 500)))
    conclude(result_of([0, 1, 2], 1000, best_step=500, is_last=True))
    said = capsys.readouterr().out
    assert said == "nothing gained since 75% of the steps: a longer run would hardly gain\n"
    conclude(result_of([0, 1, 2], 700, best_step=500, is_last=True))  # ended by a time limit
    assert not capsys.readouterr().out


def result_of(answers, step, best_step=0, **more):
    """What three classes of images reached, 20 of each, after a step of 1,000."""
    found = predicted([0, 1, 2] * 20, answers * 20)
    return Result(found, {}, step, 1000, best_step, "not finished", [], **more)


def observer_of(folder, found, head="probe"):
    """What is told of evaluations of a run in a folder."""
    run = SimpleNamespace(dir=str(folder), init_head=head)
    source = SimpleNamespace(source=found.source)
    setup = SimpleNamespace(config=SimpleNamespace(run=run), train_data=source)
    return open_observer(setup).conclude


def test_the_last_evaluation_before_the_end_of_a_run_is_what_its_last_steps_gain_over(tmp_path):
    runs = find_tool("saved_runs", "runs") or pytest.skip("needs the tool runs")
    conclude = observer_of(tmp_path, predicted([0, 1, 2] * 20, [0, 1, 2] * 20))
    for step, answers in ((0, [2, 2, 2]), (500, [0, 2, 2]), (750, [0, 1, 0]), (1000, [0, 1, 2])):
        conclude(result_of(answers, step))
    late = runs.read_predictions(tmp_path / "late.safetensors")
    assert late.predicted.tolist() == [0, 1, 0] * 20


def test_predictions_of_other_images_are_none_to_gain_over(tmp_path, capsys):
    pytest.importorskip("image_classifier.tools.runs")
    conclude = observer_of(tmp_path, predicted([0, 1, 2] * 20, [0, 1, 2] * 20))
    for step, answers in ((0, [2, 0, 2]), (500, [0, 1, 1])):
        conclude(result_of(answers, step))
    last = result_of([0, 1, 2], 1000, best_step=900, is_last=True)
    pixels = torch.ones_like(last.predictions.source.pixels)
    others = replace(last.predictions.source, pixels=pixels)
    conclude(replace(last, predictions=replace(last.predictions, source=others)))
    assert not capsys.readouterr().out
    conclude(last)
    assert re.match(r"fine-tuning gained .*; since 50% of the steps", capsys.readouterr().out)


@pytest.mark.parametrize(("head", "is_kept"), [("probe", True), ("zero", False)])
def test_only_a_linear_probe_is_what_fine_tuning_gains_over(tmp_path, head, is_kept):
    found = predicted([0, 1], [0, 1])
    observer_of(tmp_path, found, head)(result_of([0, 1, 2], 0))
    assert (tmp_path / "probe.safetensors").exists() is is_kept
