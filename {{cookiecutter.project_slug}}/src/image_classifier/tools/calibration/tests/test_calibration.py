"""When a prediction counts: the temperature and the thresholds that validation images choose."""

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, untrained_run
from torch.nn.functional import one_hot

from image_classifier import evaluate as evaluation
from image_classifier.checkpoints import load_best
from image_classifier.config import RunConfig
from image_classifier.data import LEFT_OUT, Source
from image_classifier.errors import UserError
from image_classifier.evaluate import Scores
from image_classifier.metrics import NO_DECISION, Decision
from image_classifier.metrics.predictions import Predictions
from image_classifier.metrics.table import METRICS, Metric
from image_classifier.presets import smoke
from image_classifier.tools.calibration import (
    decision as choosing,
)
from image_classifier.tools.calibration import observer
from image_classifier.tools.calibration.decision import (
    NEVER,
    calibrated,
    choose_threshold,
    tell_decision,
)
from image_classifier.tools.calibration.observer import (
    risk_by_coverage,
)
from image_classifier.train import train

COUNT = 4000


def predictions_of(probabilities, labels):
    """Predictions of these probabilities, (count, classes)."""
    names = tuple(f"class {n}" for n in range(probabilities.shape[1]))
    source = Source(labels, names, reader=len)
    has_several = labels.ndim == 2
    predicted = (probabilities >= 0.5).to(torch.int8) if has_several else probabilities.argmax(1)
    return Predictions(source, predicted, *[probabilities.amax(1)] * 2, probabilities)


def choose_decision(probabilities, labels, **wish):
    """What is chosen on images with these probabilities."""
    found = predictions_of(probabilities, labels)
    return choosing.choose_decision(NO_DECISION, found, RunConfig(**wish))


def drawn(temperature, classes=5, seed=0):
    """Labels drawn from probabilities, and the same probabilities made too sure of themselves."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(COUNT, classes, generator=generator)
    labels = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    return (logits * temperature).softmax(1), labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 8.0])
def test_the_temperature_undoes_over_and_underconfidence(temperature):
    decision = choose_decision(*drawn(temperature))
    assert decision.temperature == pytest.approx(temperature, rel=0.05)
    assert decision.thresholds == ()  # every prediction counts


@pytest.mark.parametrize("temperature", [0.5, 3.0, 5.0])  # near 1, float32 knows no larger ones
def test_the_temperature_of_several_labels_is_found_too(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(COUNT, 5, generator=generator)
    labels = torch.bernoulli(logits.sigmoid(), generator=generator).to(torch.int8)
    labels[::7, 2] = -1  # unknown
    probabilities = (temperature * logits).sigmoid()
    decision = choose_decision(probabilities, labels)
    assert decision.temperature == pytest.approx(temperature, rel=0.05)
    assert len(decision.thresholds) == 5
    shares = calibrated(probabilities, decision.temperature, has_several=True)[:, 2]
    known = labels[:, 2] != -1
    assert decision.thresholds[2] == choose_threshold(shares[known], labels[known, 2] == 1)


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


def test_of_thresholds_that_cost_the_same_it_is_that_of_most_answers():
    scores, is_right = torch.tensor([0.9, 0.8, 0.3, 0.2]), torch.tensor([True, True, False, False])
    assert choose_threshold(scores, is_right, error_cost=1.0) < 0.2
    assert choose_threshold(scores, is_right, error_cost=2.0) == pytest.approx(0.55)


def test_where_nothing_is_right_no_prediction_counts():
    probabilities, labels = torch.tensor([[0.0, 1.0], [0.25, 0.75]]), torch.tensor([0, 0])
    assert choose_threshold(torch.rand(3), torch.zeros(3, dtype=torch.bool)) == 0.5  # of a label
    for wish in ({"error_cost": 2.0}, {"min_precision": 0.9}):
        decision = choose_decision(probabilities, labels, **wish)
        assert decision.thresholds == (NEVER,)
        assert not decision.is_sure(calibrated(probabilities, decision.temperature, False)).any()
    told = tell_decision(predictions_of(probabilities, labels), decision)
    assert "no prediction counts: to abstain always is best" in told


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


def test_a_label_of_few_images_has_the_threshold_of_all_labels():
    draws = torch.Generator().manual_seed(0)
    labels = torch.bernoulli(torch.tensor([0.5, 0.4, 0.01]).expand(200, 3), generator=draws)
    shares = (2 * labels - 1 + torch.randn(200, 3, generator=draws)).sigmoid()
    assert 0 < labels[:, 2].sum() < choosing.FEW
    known = torch.ones(200, 3, dtype=torch.bool)
    found = choosing.choose_thresholds(shares, labels == 1, known, 0.0)
    of_all = choose_threshold(shares.flatten(), labels.flatten() == 1)
    alone = [choose_threshold(*pair) for pair in zip(shares.T, labels.T == 1, strict=True)]
    assert found == (*alone[:2], of_all)
    wanted = choosing.choose_thresholds(shares, labels == 1, known, 0.9)
    assert wanted[2] == choose_threshold(shares[:, 2], labels[:, 2] == 1, 0.9)


@pytest.mark.parametrize("wish", [{"min_precision": 0.9}, {"error_cost": 5.0}])
def test_images_that_could_not_be_read_choose_nothing(wish):
    probabilities, labels = drawn(3.0)
    found = predictions_of(probabilities, labels.clone())
    found.predicted[:1000] = LEFT_OUT
    found.source.labels[:1000] = (labels[:1000] + 1) % 5
    decision = choosing.choose_decision(NO_DECISION, found, RunConfig(**wish))
    wanted = choose_decision(probabilities[1000:], labels[1000:], **wish)
    assert decision.temperature == pytest.approx(wanted.temperature)
    assert decision.thresholds == pytest.approx(wanted.thresholds)


def test_of_very_many_images_some_choose_what_all_classes_share(monkeypatch):
    images = drawn(3.0)
    monkeypatch.setattr(choosing, "MOST_NUMBERS", 5 * COUNT // 4)
    assert choose_decision(*images).temperature == pytest.approx(3, rel=0.15)
    draws = torch.Generator().manual_seed(0)
    shares = torch.rand(200, 2, generator=draws)
    labels = torch.rand(200, 2, generator=draws) < torch.tensor([0.9, 0.02]) * shares
    monkeypatch.setattr(choosing, "MOST_NUMBERS", 200)
    found = choosing.choose_thresholds(shares, labels, torch.ones(200, 2).bool(), 0.0)
    assert found[1] == choose_threshold(shares[::2].flatten(), labels[::2].flatten())


@pytest.mark.usefixtures("pages")
def test_an_evaluation_is_fitted_once_and_its_checkpoint_page_and_text_have_that(
    config, monkeypatch, capsys
):
    fit = Mock(wraps=choosing.fit_temperature)
    monkeypatch.setattr(choosing, "fit_temperature", fit)
    config = changed(config, epochs=2, run__min_precision=0.5)
    scores = train(config)
    assert fit.call_count == 2
    kept = load_best(Path(config.run.dir, "checkpoints", "best.pt")).decision
    assert kept == choosing.choose_decision(NO_DECISION, scores.predictions, config.run)
    assert len(kept.thresholds) == 1
    told = tell_decision(scores.predictions, kept)
    assert re.fullmatch(r"calibrated by .*; predictions count from .* of them right", told)
    assert told in capsys.readouterr().out.splitlines()
    page = Path(config.run.dir, "report.html")
    assert not page.exists() or told in page.read_text(encoding="utf-8")


def test_the_end_tells_what_best_pt_has_where_other_weights_are_the_last(
    config, monkeypatch, capsys
):
    values = iter((0.9, 0.1))
    monkeypatch.setitem(METRICS, "mine", Metric(lambda _: next(values), lower_is_better=False))
    scores = train(changed(config, run__best_by="mine", epochs=2))
    best, last = (
        load_best(Path(config.run.dir, "checkpoints", f"{name}.pt")) for name in ("best", "last")
    )
    assert (best.step, last.step) == (4, 8)
    assert best.decision != last.decision
    assert tell_decision(scores.predictions, best.decision) in capsys.readouterr().out


def test_a_resumed_run_saves_the_decision_that_it_had(config):
    train(config)
    path = Path(config.run.dir, "checkpoints", "last.pt")
    before = load_best(path).decision
    train(config)  # goes on where the run is: at its end
    assert load_best(path).decision == before != NO_DECISION


def test_a_wish_that_comes_after_the_last_evaluation_is_told_to_have_no_effect(config, capsys):
    for wish, count in ((0.0, 0), (0.5, 1)):
        train(changed(config, run__min_precision=wish))
        assert capsys.readouterr().out.count("warning: best.pt never abstains") == count


def test_only_a_decision_is_read_from_a_checkpoint_and_an_older_one_has_none(config, photos):
    run = untrained_run(config, photos, 1.5, (0.25,))
    path = Path(run, "checkpoints", "best.pt")
    assert load_best(path).decision == Decision(1.5, (0.25,))
    saved = torch.load(path, weights_only=True)
    extremes = ({"temperature": value, "thresholds": ()} for value in (0.0, float("inf")))
    for wrong in (*extremes, {"temperature": 1.0}, [], "x"):
        saved["state"]["decision"] = wrong
        torch.save(saved, path)
        with pytest.raises(UserError, match="is not a checkpoint of this project"):
            load_best(path)
    del saved["state"]["decision"]
    torch.save(saved, path)
    assert load_best(path).decision == NO_DECISION


def test_of_too_many_probabilities_the_text_names_what_is_left_out(monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_KEPT", 0)
    found = predictions_of(torch.tensor([[0.0, 1.0], [0.25, 0.75]]), torch.tensor([1, 0]))
    scores = Scores(replace(found, probabilities=None), {"loss": 1.0, "top1": 0.5})
    first = scores.text("top1").partition("\n")[0]
    assert first.startswith("too many images x classes for ")
    assert first.endswith(", a temperature and thresholds")


def test_two_wishes_at_once_and_errors_that_cost_less_than_abstentions_are_refused(refusal):
    both = refusal("train", "smoke", "--run.error-cost", "2", "--run.min-precision", "0.9")
    assert "give --run.error-cost or --run.min-precision, not both" in both
    several = refusal("train", "smoke", "--run.error-cost", "5", "--model.task", "multi-label")
    assert "for single-label images; take --run.min-precision" in several
    few = refusal("train", "smoke", "--run.error-cost", "0.5")
    assert "--run.error-cost 0.5 should be 1 or more, as an abstention costs 1" in few
    assert changed(smoke(), run__error_cost=1.0).run.error_cost == 1


def test_errors_among_the_predicted_by_their_share():
    scores, is_right = torch.tensor([0.9, 0.5, 0.7, 0.6]), torch.tensor([True, False, True, False])
    coverage, error = zip(*risk_by_coverage(scores, is_right), strict=True)
    assert coverage == (25, 50, 75, 100)
    assert error == pytest.approx((0, 0, 100 / 3, 50))
    scores[:2] = 1.0  # no threshold is between equal ones
    coverage, error = zip(*risk_by_coverage(scores, is_right), strict=True)
    assert coverage == (50, 75, 100)
    assert error == pytest.approx((50, 100 / 3, 50))


def test_the_chart_of_errors_is_of_the_images_that_were_read():
    scores = torch.tensor([0.9, 0.5, 0.7, 0.6])
    shares = torch.stack((scores, 1 - scores), dim=1)
    found = predictions_of(shares, torch.tensor([0, 0, 0, 1]))
    found.predicted[1] = LEFT_OUT
    report = Mock()
    observer.build_section(Mock(predictions=found, decision=NO_DECISION), report)
    _, lines = report.charts.line_chart.call_args.args
    assert [round(error) for _, error in lines["errors"]] == [0, 0, 33]


def test_where_all_answers_are_right_the_temperature_is_no_extreme():
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 4
    logits = 3 * one_hot(labels, 4) + 0.3 * torch.randn(40, 4, generator=draws)
    assert 0.2 < choosing.fit_temperature(logits, labels) < 1


def test_one_answer_that_is_no_number_changes_no_temperature():
    draws = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(60, 4, generator=draws)
    labels = torch.randint(4, (60,), generator=draws)
    expected = choosing.fit_temperature(logits[1:], labels[1:])
    logits[0, 2] = float("nan")
    assert choosing.fit_temperature(logits, labels) == pytest.approx(expected)


def test_right_answers_alone_do_not_drive_the_temperature_of_several_labels_to_its_limit():
    labels = torch.tensor([[1, 0], [0, 1]]).repeat(10, 1)
    logits = torch.where(labels == 1, 2.0, -2.0) + torch.tensor([1.0, -1.0])
    assert choosing.fit_temperature(logits, labels) > 1.1 * choosing.LIMITS[0]


def test_what_a_decision_means_is_told_of_the_images_that_were_read():
    shares = torch.tensor([0.9, 0.8, 0.85, 0.6, 0.7, 0.95])
    labels = torch.tensor([0, 1, 0, 0, 1, 0])
    found = predictions_of(torch.stack([shares, 1 - shares], dim=1), labels)
    found.predicted[5] = LEFT_OUT
    told = tell_decision(found, Decision(1.0, (0.75,)))
    assert told.endswith("from 75.0% on: 60.00% of the images, 66.67% of them right")


def test_what_thresholds_of_labels_mean_is_told_as_precision_and_recall():
    shares = torch.tensor([[0.9, 0.2], [0.6, 0.7], [0.1, 0.8]])
    found = predictions_of(shares, torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.int8))
    told = tell_decision(found, Decision(1.0, (0.5, 0.75)))
    assert told.endswith("from 50.0% .. 75.0% on: precision 66.67%, recall 50.00%")
