"""When a prediction counts: a temperature and thresholds, chosen on the validation images."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from ...config import RunConfig
from ...data import LEFT_OUT
from ...metrics import THRESHOLD, Decision, Predictions

WHAT = "a temperature and thresholds"  # is chosen
MOST_NUMBERS = 2**22  # probabilities from which what all classes share is chosen
LIMITS = 0.05, 20.0  # of a temperature
FEW = 10  # images that have a label, from which its threshold of the highest F1 says something
NEVER = 2.0  # a threshold that no probability reaches, and that JSON can hold


def choose_decision(decision: Decision, predictions: Predictions, run: RunConfig) -> Decision:
    """The temperature and the thresholds that serve best on the images of an evaluation.

    The temperature minimizes the log loss: https://arxiv.org/abs/1706.04599. With one label for
    each image, the threshold is the lowest from which on a share of `run.min_precision` of the
    predictions is right; or that of the lowest cost, where a wrong prediction costs
    `run.error_cost` and none at all 1 (https://doi.org/10.1109/TIT.1970.1054406), and which may be
    to predict nothing. With several labels, each class has the lowest threshold with
    `run.min_precision`, or else that of the highest F1, if enough images have it. Where a
    precision is out of reach, the highest counts. Where not all probabilities were kept, it is
    `decision`.
    """
    if predictions.probabilities is None:
        return decision
    has_several = predictions.source.is_multi_label
    known = predictions.is_counted
    labels = predictions.source.labels.masked_fill(~known, LEFT_OUT)
    temperature = fit_temperature(logits_of(predictions.probabilities, has_several), labels)
    shares = calibrated(predictions.probabilities, temperature, has_several)
    thresholds = ()
    if has_several:
        thresholds = choose_thresholds(shares, labels == 1, known, run.min_precision)
    elif run.min_precision or run.error_cost:
        scores, predicted = shares[known].max(1)
        is_right = predicted == labels[known]
        thresholds = (choose_threshold(scores, is_right, run.min_precision, run.error_cost),)
    return Decision(temperature, thresholds)


def choose_thresholds(
    shares: Tensor, has_label: Tensor, known: Tensor, min_precision: float
) -> tuple[float, ...]:
    """The threshold of each class, of (count, classes) probabilities and labels, if they are known.

    By F1, a class of few images that have it would have any threshold, most often one near 0: it
    has that of all classes together.
    """
    found = tuple(
        choose_threshold(scores[is_known], label[is_known], min_precision)
        for scores, label, is_known in zip(shares.T, has_label.T, known.T, strict=True)
    )
    are_rare = (has_label & known).sum(0) < FEW
    if min_precision or not are_rare.any():
        return found
    step = max(1, shares.numel() // MOST_NUMBERS)
    some = known[::step]
    of_all = choose_threshold(shares[::step][some], has_label[::step][some])
    return tuple(of_all if rare else own for own, rare in zip(found, are_rare, strict=True))


def read_decision(decision: Decision, state: dict[str, Any]) -> Decision:
    """The decision in the state of a checkpoint, or `decision` in one from before there were any.

    Raises:
        LookupError, TypeError, ValueError: if it is none.
    """
    if "decision" not in state:
        return decision
    saved = state["decision"]
    decision = Decision(float(saved["temperature"]), tuple(map(float, saved["thresholds"])))
    if not 0 < decision.temperature < math.inf:
        raise ValueError(f"its temperature is {decision.temperature}")
    return decision


def tell_decision(predictions: Predictions, decision: Decision) -> str:
    """What a decision means for the images of an evaluation, in words."""
    text = f"calibrated by a temperature of {decision.temperature:.2f}"
    if not decision.thresholds:
        return text
    known = predictions.is_counted
    has_several = predictions.source.is_multi_label
    shares = calibrated(predictions.probabilities, decision.temperature, has_several)
    if has_several:
        chosen = known & decision.has_label(shares)
        own = known & (predictions.source.labels == 1)
        right = int((chosen & own).sum())
        precision = right / max(1, int(chosen.sum()))
        recall = right / max(1, int(own.sum()))
        ends = [f"{min(end(decision.thresholds), 1):.1%}" for end in (min, max)]
        text += f"; labels count from {' .. '.join(ends)} on: precision {precision:.2%}"
        return f"{text}, recall {recall:.2%}"
    chosen = known & decision.is_sure(shares)
    count = int(chosen.sum())
    right = int((chosen & predictions.is_correct).sum())
    if decision.thresholds[0] == NEVER:
        return f"{text}; no prediction counts: to abstain always is best on these images"
    text += f"; predictions count from {decision.thresholds[0]:.1%} on: "
    share = count / int(known.sum())
    return f"{text}{share:.2%} of the images, {right / max(1, count):.2%} of them right"


def calibrated(probabilities: Tensor, temperature: float, has_several: bool) -> Tensor:
    """Probabilities by a temperature, from those by a temperature of 1."""
    logits = logits_of(probabilities, has_several) / temperature
    return logits.sigmoid() if has_several else logits.softmax(1)


def logits_of(probabilities: Tensor, has_several: bool) -> Tensor:
    """The logits of probabilities, but for what all classes have in common."""
    own = probabilities.clamp(min=1e-38).log()  # about the least of float32; 2**-24: below 1
    return own - (1 - probabilities).clamp(min=2**-25).log() if has_several else own


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature of the lowest log loss: of (count, classes) logits.

    Where all answers are right, that would be the lowest of all: one image of unknown label, which
    counts with the others, keeps it from that.
    """
    from scipy.optimize import minimize_scalar

    step = max(1, logits.numel() // MOST_NUMBERS)
    is_finite = logits[::step].isfinite().all(1)
    logits = logits[::step][is_finite].double()
    labels = labels[::step][is_finite].long()
    known = labels >= 0
    if not known.any():
        return 1.0
    unknown = logits.mean(0, keepdim=True)  # of one more image, which may have any label
    is_one = labels.ndim == 1
    cost = partial(cross_entropy if is_one else binary_cross_entropy_with_logits, reduction="sum")
    own = labels[known] if is_one else labels[known].double()
    any_label = torch.full_like(unknown, 1 / logits.shape[1] if is_one else 0.5)
    logits = logits[known]

    def loss(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        return (cost(logits / temperature, own) + cost(unknown / temperature, any_label)).item()

    return math.exp(minimize_scalar(loss, bounds=[*map(math.log, LIMITS)], method="bounded").x)


def choose_threshold(
    scores: Tensor, is_right: Tensor, min_precision: float = 0.0, error_cost: float = 0.0
) -> float:
    """The threshold of `scores` (count,) as `choose_decision` says; `is_right` (count,) bool.

    It lies between two scores, so that rounding does not matter. It is `NEVER` where to abstain
    always costs less, or no score is right.
    """
    if not is_right.any():
        return NEVER if min_precision or error_cost else THRESHOLD
    scores, order = scores.sort(descending=True)
    num_right = is_right[order].double().cumsum(0)
    num_above = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    is_last = ends_of_equals(scores)
    precision = num_right / num_above
    if min_precision:
        enough = is_last & (precision >= min_precision)
        worth = num_above * enough if enough.any() else precision
    elif error_cost:
        worth = num_above - error_cost * (num_above - num_right)  # to abstain always has 0
    else:
        worth = 2 * num_right / (num_above + num_right[-1])  # F1
    worth = worth.masked_fill(~is_last, -math.inf)
    place = len(worth) - 1 - int(worth.flip(0).argmax())  # of equals, the one of most answers
    if worth[place] < 0:
        return NEVER
    below = scores[place + 1] if place + 1 < len(scores) else 0.0
    middle = (scores[place] + below) / 2  # of two neighbors among numbers it is one of them
    return float(middle if middle > below else scores[place])


def ends_of_equals(scores: Tensor) -> Tensor:
    """Which of falling scores (count,) are the last of equals, which a threshold takes together."""
    return torch.cat((scores[1:] < scores[:-1], torch.tensor([True])))
