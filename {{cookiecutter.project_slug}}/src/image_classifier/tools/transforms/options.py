"""Which symmetries, colors and blur training images get at random."""

from dataclasses import dataclass

from ...errors import UserError
from ...extensions import flag, within


@dataclass(frozen=True)
class TransformOptions:
    """Random changes of training images, for those whose classes do not depend on them."""

    vertical_flip: bool = False  # mirror half of the images top to bottom: where there is no "up"
    turns: bool = False  # turn each image by a random multiple of 90 degrees; with flips, all 8
    # symmetries of a square
    jitter: float = within(0.0, 0, 1)  # change brightness, contrast and saturation, each by a
    # random factor of 1 - jitter .. 1 + jitter; 0: off
    grayscale: float = within(0.0, 0, 1)  # probability that an image loses its colors
    blur: float = within(0.0, 0, 1)  # probability of a Gaussian blur, of a sigma of 0.1 .. 2 pixels


SECTIONS = {"augment": TransformOptions}
FREE_TO_CHANGE = ()


def check(config: object) -> None:
    """Raise `UserError` for changes of color where images are not red, green and blue."""
    channels = config.data.channels
    for knob in ("jitter", "grayscale"):
        value = getattr(config.augment, knob)
        if value and channels != 3:
            raise UserError(
                f"--augment.{flag(knob)} {value:g} changes red, green and blue, and "
                f"--data.channels is {channels}: --augment.{flag(knob)} 0"
            )
