"""`--optim.layer-decay`."""

from dataclasses import dataclass

from ...extensions import within


@dataclass(frozen=True)
class LayerDecayOptions:
    """How fast each block learns."""

    layer_decay: float = within(1.0, 0.01, 1)  # layer-wise learning-rate decay: factor from each
    # block to the one below it


SECTIONS = {"optim": LayerDecayOptions}
FREE_TO_CHANGE = ()
