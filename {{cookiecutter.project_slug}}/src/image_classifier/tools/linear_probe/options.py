"""`--run.init-head`."""

from dataclasses import dataclass
from typing import Literal

from ...errors import UserError


@dataclass(frozen=True)
class ProbeOptions:
    """What training begins with."""

    init_head: Literal["probe", "zero"] = "probe"  # a new last layer on pretrained weights. probe:
    # logistic regression on the features of the training images; zero: zeros


def check(config: object) -> None:
    """Raise `UserError` for another start of a last layer that has random weights anyway."""
    if config.run.init_head == "zero" and not config.run.init_from:
        raise UserError("--run.init-head zero is for pretrained weights: --run.init-from FILE")


SECTIONS = {"run": ProbeOptions}
FREE_TO_CHANGE = ()
