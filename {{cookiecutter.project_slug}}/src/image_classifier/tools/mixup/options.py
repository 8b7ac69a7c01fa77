"""`--augment.mixup` and `--augment.cutmix`."""

from dataclasses import dataclass

from ...extensions import within


@dataclass(frozen=True)
class MixingOptions:
    """How training images are mixed."""

    mixup: float = within(0.0, 0, 100)  # alpha of the Beta distribution; 0: off
    cutmix: float = within(0.0, 0, 100)  # alpha of the Beta distribution; 0: off


SECTIONS = {"augment": MixingOptions}
FREE_TO_CHANGE = ()
