"""`--augment.min-size`."""

from dataclasses import dataclass

from ...extensions import out_of_range, within

SMALLEST = 8  # pixels


@dataclass(frozen=True)
class ResizingOptions:
    """How large training images are at first."""

    min_size: int = within(0, 0, 4096)  # progressive resizing: side of training images for 0.7 of
    # the run; then they grow until 0.85, or its last epoch; 0: off


SECTIONS = {"augment": ResizingOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for images that begin too small, or larger than they end."""
    least = config.augment.min_size
    most = config.data.image_size
    if least and not SMALLEST <= least <= most:
        raise out_of_range("augment.min_size", least, f"{SMALLEST} .. {most}; 0: off")
