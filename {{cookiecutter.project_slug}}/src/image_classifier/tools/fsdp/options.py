"""`--compute.parallel`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelOptions:
    """Who keeps which weights."""

    parallel: Literal["ddp", "fsdp"] = "ddp"  # how several processes train one model. fsdp: each
    # keeps a part of the weights and of the optimizer's state, for models too large for one GPU


SECTIONS = {"compute": ParallelOptions}
FREE_TO_CHANGE = ("compute.parallel",)
