"""When a prediction counts: the temperature and the thresholds that validation images choose."""

from unittest.mock import Mock

import pytest
import torch
from conftest import changed

from image_classifier.data import Source
from image_classifier.metrics import predictions
from image_classifier.metrics.decision import (
    NEVER,
    choose_decision,
    choose_threshold,
)
from image_classifier.metrics.predictions import Predictions
from image_classifier.train import train

COUNT = 4000


def drawn(temperature, classes=5, seed=0):
    """Labels drawn from probabilities, and the same probabilities made too sure of themselves."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(COUNT, classes, generator=generator)
    labels = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    return (logits * temperature).softmax(1), labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_undoes_over_and_underconfidence(temperature):
    decision = choose_decision(*drawn(temperature))
    assert decision.temperature == pytest.approx(temperature, rel=0.05)
    assert decision.thresholds == ()  # every prediction counts


def test_the_temperature_of_several_labels_is_found_too():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(COUNT, 5, generator=generator)
    labels = torch.bernoulli(logits.sigmoid(), generator=generator).to(torch.int8)
    labels[::7, 2] = -1  # unknown
    decision = choose_decision((3 * logits).sigmoid(), labels)
    assert decision.temperature == pytest.approx(3, rel=0.05)
    assert len(decision.thresholds) == 5


def covered(decision, probabilities, labels):
    """The share of images above the threshold, and the share of them that is right."""
    calibrated = (probabilities.log() / decision.temperature).softmax(1)
    scores, predicted = calibrated.max(1)
    above = scores >= decision.thresholds[0]
    return float(above.double().mean()), float((predicted == labels)[above].double().mean())


@pytest.mark.parametrize("wanted", [0.8, 0.9, 0.97])
def test_the_threshold_gives_the_wanted_precision_and_no_lower_one_does(wanted):
    images = drawn(3.0)
    coverage, precision = covered(choose_decision(*images, min_precision=wanted), *images)
    assert wanted <= precision < wanted + 0.01
    other, _ = covered(choose_decision(*images, min_precision=wanted + 0.01), *images)
    assert other < coverage


def test_dear_errors_make_it_abstain_as_chow_says():
    images = drawn(3.0)
    for cost in (2, 4, 10):
        threshold = choose_decision(*images, error_cost=cost).thresholds[0]
        assert threshold == pytest.approx(1 - 1 / cost, abs=0.06)


def cost_of(threshold, scores, is_right, error_cost):
    """What predictions at a threshold cost, where none at all costs 1."""
    above = scores >= threshold
    return error_cost * int((above & ~is_right).sum()) + int((~above).sum())


@pytest.mark.parametrize("grain", [0, 4, 2**-24])  # all scores differ, are often equal, or close
def test_the_threshold_is_the_best_of_all_and_to_abstain_always_is_one_of_them(grain):
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, 30, (), generator=generator))
        scores = torch.rand(count, generator=generator)
        if grain:
            levels = torch.randint(0, 5, (count,), generator=generator)
            scores = levels / 4 if grain == 4 else 0.75 + levels * grain
        skill = torch.rand((), generator=generator)
        is_right = torch.rand(count, generator=generator) < skill * scores
        every = [0.0, *scores.unique().tolist(), NEVER]
        for error_cost in (1, 2, 100):
            found = choose_threshold(scores, is_right, error_cost=error_cost)
            costs = [cost_of(threshold, scores, is_right, error_cost) for threshold in every]
            assert cost_of(found, scores, is_right, error_cost) == min(costs)
        above = scores >= choose_threshold(scores, is_right, min_precision=0.8)
        kept = [scores >= threshold for threshold in every]
        precise = [mask for mask in kept if mask.any() and is_right[mask].double().mean() >= 0.8]
        if precise:  # the most of them
            assert is_right[above].double().mean() >= 0.8
            assert above.sum() == max(mask.sum() for mask in precise)
        elif not is_right.any():
            assert not above.any()


def test_where_nothing_is_right_no_prediction_counts():
    probabilities, labels = torch.tensor([[0.0, 1.0], [0.25, 0.75]]), torch.tensor([0, 0])
    assert choose_threshold(torch.rand(3), torch.zeros(3, dtype=torch.bool)) == 0.5  # of a label
    for wish in ({"error_cost": 2.0}, {"min_precision": 0.9}):
        decision = choose_decision(probabilities, labels, **wish)
        assert decision.thresholds == (NEVER,)
        assert not decision.is_sure(decision.calibrated(probabilities, False)).any()
    source = Source(labels, ("ant", "bee"), reader=len)
    wrong = Predictions(source, *[torch.tensor([1, 1])] * 3, probabilities)
    assert "no prediction counts: to abstain always is best" in wrong.account(decision)


def test_out_of_reach_means_the_highest_precision_that_there_is():
    scores, is_right = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([False, True, True, False])
    assert choose_threshold(scores, is_right, min_precision=0.99) == pytest.approx(0.65)


def test_equal_scores_are_predicted_together():
    scores, is_right = torch.tensor([0.9, 0.5, 0.5, 0.5]), torch.tensor([True, True, False, False])
    assert choose_threshold(scores, is_right, min_precision=0.9) == pytest.approx(0.7)


def test_without_a_wish_a_label_has_the_threshold_of_the_highest_f1():
    scores = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.05])
    is_right = torch.tensor([True, True, False, False, False])
    assert choose_threshold(scores, is_right) == pytest.approx(0.225)
    assert choose_threshold(scores, ~(scores > 0)) == 0.5  # nobody knows


def test_checkpoint_page_and_text_share_one_fit_for_each_evaluation(config, monkeypatch):
    fit = Mock(wraps=choose_decision)
    monkeypatch.setattr(predictions, "choose_decision", fit)
    config = changed(config, epochs=2, run__min_precision=0.5)
    found = train(config).predictions
    assert fit.call_count == 2
    decision = found.decision(config.run)
    assert (fit.call_count, len(decision.thresholds)) == (2, 1)
    assert found.decision(changed(config, run__min_precision=0.0).run).thresholds == ()
    assert fit.call_count == 3
