"""When a prediction counts: a temperature and thresholds, chosen on the validation images."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

MOST_NUMBERS = 2**22  # probabilities from which a temperature is fitted
LIMITS = 0.05, 20.0  # of a temperature
EPS = 1e-6  # how far from 0 and 1 the probability of a label is taken to be, at least
THRESHOLD = 0.5  # from which on an image has a label, unless another was chosen
NEVER = 2.0  # a threshold that no probability reaches, and that JSON can hold


@dataclass(frozen=True)
class Decision:
    """How logits become probabilities, and from which probability on a prediction counts."""

    temperature: float = 1.0  # by which logits are divided: https://arxiv.org/abs/1706.04599
    thresholds: tuple[float, ...] = ()  # of the most probable class, or with several labels of each
    # class; none: every prediction counts, or with several labels those from 0.5 on

    @classmethod
    def parsed(cls, saved: dict[str, Any]) -> "Decision":
        """The decision in a checkpoint; TypeError or ValueError if it is none."""
        decision = cls(float(saved["temperature"]), tuple(map(float, saved["thresholds"])))
        if not 0 < decision.temperature < math.inf:
            raise ValueError(f"its temperature is {decision.temperature}")
        return decision

    def calibrated(self, probabilities: Tensor, has_several: bool) -> Tensor:
        """Probabilities by this temperature, from those by a temperature of 1."""
        logits = logits_of(probabilities, has_several) / self.temperature
        return logits.sigmoid() if has_several else logits.softmax(1)

    def is_sure(self, probabilities: Tensor) -> Tensor:
        """Which predictions count, by calibrated probabilities (count, classes): (count,) bool."""
        return probabilities.amax(1) >= (self.thresholds[0] if self.thresholds else 0.0)

    def has_label(self, probabilities: Tensor) -> Tensor:
        """Which labels images have, by calibrated probabilities: (count, classes) bool."""
        lowest = torch.tensor(self.thresholds or (THRESHOLD,), device=probabilities.device)
        return probabilities >= lowest


NO_DECISION = Decision()  # all predictions count, with the probabilities that the model gives them


def choose_decision(
    probabilities: Tensor, labels: Tensor, min_precision: float = 0.0, error_cost: float = 0.0
) -> Decision:
    """The temperature and the thresholds that serve best on the images of an evaluation.

    The temperature minimizes the log loss. With one label for each image, the threshold is the
    lowest from which on a share of `min_precision` of the predictions is right; or that of the
    lowest cost, where a wrong prediction costs `error_cost` and none at all 1
    (https://doi.org/10.1109/TIT.1970.1054406), and which may be to predict nothing. With several
    labels, each class has the lowest threshold with `min_precision`, or else that of the highest
    F1.

    Args:
        probabilities: (count, classes) float32, by a temperature of 1.
        labels: (count,) int64 or (count, classes) int8; -1: unknown, does not count.
        min_precision: from 0 to 1; 0: none. Where it is out of reach, the highest precision counts.
        error_cost: from 1 on; 0: none.
    """
    has_several = labels.ndim == 2
    temperature = fit_temperature(logits_of(probabilities, has_several), labels)
    shares = Decision(temperature).calibrated(probabilities, has_several)
    if has_several:
        classes = zip(shares.unbind(1), labels.unbind(1), strict=True)
        known = [(scores[label >= 0], label[label >= 0] == 1) for scores, label in classes]
        return Decision(
            temperature, tuple(choose_threshold(*pair, min_precision) for pair in known)
        )
    if not min_precision and not error_cost:
        return Decision(temperature)
    scores, predicted = shares.max(1)
    known = labels >= 0
    pair = scores[known], (predicted == labels)[known]
    return Decision(temperature, (choose_threshold(*pair, min_precision, error_cost),))


def logits_of(probabilities: Tensor, has_several: bool) -> Tensor:
    """The logits of probabilities, but for what all classes have in common."""
    return probabilities.logit(eps=EPS) if has_several else probabilities.clamp(min=1e-38).log()


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature of the lowest log loss: of (count, classes) logits."""
    from scipy.optimize import minimize_scalar

    step = max(1, logits.numel() // MOST_NUMBERS)
    logits = logits[::step].double()
    labels = labels[::step].long()
    known = labels >= 0
    if not known.any():
        return 1.0

    def loss(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        if labels.ndim == 1:
            return cross_entropy(scaled, labels, ignore_index=-1).item()
        return binary_cross_entropy_with_logits(scaled[known], labels[known].double()).item()

    bounds = tuple(map(math.log, LIMITS))
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)


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
    # Equal scores are above a threshold together.
    is_last = torch.cat((scores[1:] < scores[:-1], torch.tensor([True])))
    precision = num_right / num_above
    if min_precision:
        enough = is_last & (precision >= min_precision)
        worth = num_above * enough if enough.any() else precision
    elif error_cost:
        worth = num_above - error_cost * (num_above - num_right)  # to abstain always has 0
    else:
        worth = 2 * num_right / (num_above + num_right[-1])  # F1
    worth = worth.masked_fill(~is_last, -math.inf)
    place = int(worth.argmax())
    if worth[place] < 0:
        return NEVER
    below = scores[place + 1] if place + 1 < len(scores) else 0.0
    middle = (scores[place] + below) / 2  # of two neighbors among numbers it is one of them
    return float(middle if middle > below else scores[place])
