"""The option that balances classes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BalanceOptions:
    """Whether rare classes count for more."""

    balance: Literal["none", "sampling", "loss"] = "none"  # for imbalanced classes. sampling: see
    # each class equally often; loss: weight the loss by inverse class frequency; for
    # multi-label, positives by negatives / positives of their class


SECTIONS = {"data": BalanceOptions}
FREE_TO_CHANGE = ()
