"""`--model.head`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class HeadOptions:
    """What the last layer sees."""

    head: Literal["last", "layers"] = "last"  # input of the last layer: the last features; layers:
    # mean and maximum of features of several depths, for frozen weights from other kinds of
    # images: https://arxiv.org/abs/2201.03529


SECTIONS = {"model": HeadOptions}
FREE_TO_CHANGE = ()
