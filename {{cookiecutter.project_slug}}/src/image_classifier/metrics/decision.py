"""When a prediction counts: always, unless a tool chose otherwise on the validation images."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..extensions import chained
from .predictions import Predictions

THRESHOLD = 0.5  # from which on an image has a label, unless another was chosen


@dataclass(frozen=True)
class Decision:
    """How logits become probabilities, and from which probability on a prediction counts."""

    temperature: float = 1.0  # by which logits are divided
    thresholds: tuple[float, ...] = ()  # of the most probable class, or with several labels of each
    # class; none: every prediction counts, or with several labels those from 0.5 on

    def is_sure(self, probabilities: Tensor) -> Tensor:
        """Which predictions count, by calibrated probabilities (count, classes): (count,) bool."""
        return probabilities.amax(1) >= (self.thresholds[0] if self.thresholds else 0.0)

    def has_label(self, probabilities: Tensor) -> Tensor:
        """Which labels images have, by calibrated probabilities: (count, classes) bool."""
        lowest = torch.tensor(self.thresholds or (THRESHOLD,), device=probabilities.device)
        return probabilities >= lowest


NO_DECISION = Decision()  # all predictions count, with the probabilities that the model gives them


def choose_decision(predictions: Predictions, run: RunConfig) -> Decision:
    """What a tool chooses on the images of an evaluation; without one, no decision."""
    return chained("decision", "choose_decision", NO_DECISION, predictions, run)


def read_decision(state: dict[str, Any]) -> Decision:
    """The decision in the state of a checkpoint, as the tool that chose it reads it."""
    return chained("decision", "read_decision", NO_DECISION, state)
