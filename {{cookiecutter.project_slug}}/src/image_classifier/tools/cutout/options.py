"""`--augment.cutout`."""

from dataclasses import dataclass

from ...extensions import within


@dataclass(frozen=True)
class CutoutOptions:
    """How much of training images is blanked."""

    cutout: int = within(0, 0, 4096)  # side of the blanked square, in pixels; 0: none


SECTIONS = {"augment": CutoutOptions}
FREE_TO_CHANGE = ()
