"""`--run.init-head`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ProbeOptions:
    """What training begins with."""

    init_head: Literal["probe", "zero"] = "probe"  # a new last layer on pretrained weights. probe:
    # logistic regression on the features of the training images; zero: zeros


SECTIONS = {"run": ProbeOptions}
FREE_TO_CHANGE = ()
