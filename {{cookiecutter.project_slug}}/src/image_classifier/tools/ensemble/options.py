"""`--model.members`, which the command `ensemble` writes into a checkpoint."""

from dataclasses import dataclass

from ...extensions import within


@dataclass(frozen=True)
class MembersOptions:
    """How many networks are one."""

    members: int = within(1, 1, 100)  # networks whose probabilities are averaged: of a model that
    # the command `ensemble` makes of as many runs; no run trains more than 1


SECTIONS = {"model": MembersOptions}
FREE_TO_CHANGE = ()
