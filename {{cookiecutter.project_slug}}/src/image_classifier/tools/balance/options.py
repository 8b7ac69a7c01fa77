"""The option that balances classes."""

from dataclasses import dataclass
from typing import Literal

from ...errors import UserError


@dataclass(frozen=True)
class BalanceOptions:
    """Whether rare classes count for more."""

    balance: Literal["none", "sampling", "loss"] = "none"  # for imbalanced classes. sampling: see
    # each class equally often; loss: weight the loss by inverse class frequency; for
    # multi-label, positives by negatives / positives of their class


SECTIONS = {"data": BalanceOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for a choice of images where no step chooses any."""
    if config.data.balance == "sampling" and not config.epochs:
        raise UserError("--data.balance sampling needs --epochs above 0; loss does not")
