"""`--model.members`, which the command `ensemble` writes into a checkpoint."""

from dataclasses import dataclass

from ...extensions import within


@dataclass(frozen=True)
class MembersOptions:
    """How many networks are one."""

    members: int = within(1, 1, 100)  # networks whose probabilities are averaged: set by the
    # command `ensemble`, one for each of its runs; no run trains more than 1


SECTIONS = {"model": MembersOptions}
FREE_TO_CHANGE = ()
