"""`--profile`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProfileOptions:
    """Whether steps are recorded."""

    profile: bool = False  # record a few steps with torch.profiler


SECTIONS = {"": ProfileOptions}
FREE_TO_CHANGE = ("profile",)
