"""The option of other losses."""

from dataclasses import dataclass
from typing import Literal

from ...errors import UserError
from ...extensions import option


@dataclass(frozen=True)
class LossOptions:
    """Which loss."""

    loss: Literal["entropy", "focal", "asymmetric"] = "entropy"  # entropy: cross entropy, for
    # multi-label binary for each. Multi-label only: focal (https://arxiv.org/abs/1708.02002) and
    # asymmetric (https://arxiv.org/abs/2009.14119), in which easy negatives count less


SECTIONS = {"optim": LossOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for a loss that is not for the task or for `data.balance`."""
    loss = config.optim.loss
    if loss == "entropy":
        return
    if config.model.task == "single-label":
        raise UserError(f"--optim.loss {loss} needs --model.task multi-label")
    if option(config, "data.balance", "none") == "loss":  # of a tool
        raise UserError(f"--data.balance loss weights --optim.loss entropy, not {loss}")
