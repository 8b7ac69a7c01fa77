"""`--data.on-bad-image`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BadImageOptions:
    """What happens at an unreadable image."""

    on_bad_image: Literal["stop", "skip"] = "stop"  # an unreadable image ends the run; skip: the
    # loss ignores it, and it is counted and listed in bad_images.txt in the run folder


SECTIONS = {"data": BadImageOptions}
FREE_TO_CHANGE = ("data.on_bad_image",)
