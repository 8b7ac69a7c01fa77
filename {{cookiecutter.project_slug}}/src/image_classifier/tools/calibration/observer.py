"""The section "I don't know" of a run's page, and a warning where best.pt never abstains."""

from types import ModuleType

import torch
from torch import Tensor

from ...runtime.console import say
from ...tracking import Observer, Result, Setup
from .decision import calibrated, ends_of_equals, tell_decision


def open_observer(setup: Setup) -> Observer:
    """Add the section to the page; warn if best.pt was scored before the run was to abstain."""
    wish = setup.config.run.error_cost or setup.config.run.min_precision

    def conclude(result: Result) -> str:
        if wish and result.is_last and not result.decision.thresholds:
            say("warning: best.pt never abstains: no threshold was chosen when it was scored")
        return ""

    return Observer(section=build_section, conclude=conclude)


def build_section(result: Result, report: ModuleType) -> str:
    """How many images are predicted, and how many wrongly, if it may abstain from the others."""
    predictions = result.predictions
    decision = result.decision
    found = predictions.probabilities
    if found is None or predictions.source.is_multi_label:
        return ""
    known = predictions.is_counted
    shares = calibrated(found[known], decision.temperature, has_several=False)
    chart = report.charts.line_chart(
        "Errors by the share of images predicted",
        {"errors": risk_by_coverage(shares.amax(1), predictions.is_correct[known])},
        unit="%",
        low=0,
        x_label="% of the images",
    )
    told = "" if decision.thresholds else "; every prediction counts (--run.min-precision)"
    return (
        f"<h2>I don't know</h2><p>The probabilities are {tell_decision(predictions, decision)}"
        f"{told}. Each checkpoint has the temperature and threshold of its last evaluation.</p>"
        f"{chart}"
    )


def risk_by_coverage(scores: Tensor, is_right: Tensor) -> list[tuple[float, float]]:
    """Percent of the images that are predicted, and of errors among them, at each threshold.

    https://arxiv.org/abs/1705.08500
    """
    scores, order = scores.sort(descending=True)
    num_wrong = (~is_right[order]).double().cumsum(0)
    num_above = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    points = torch.stack([100 * num_above / len(scores), 100 * num_wrong / num_above], dim=1)
    return [*map(tuple, points[ends_of_equals(scores)].tolist())]
