"""Arrays whose channels come first or last."""

from ...data import COLORED, wrong_channels


def channel_axis(shape: tuple[int, ...], channels: int, order: tuple[int, int] = (2, 0)) -> int:
    """Which axis of an image's `shape` has the channels; HWC counts before CHW, as `order` says.

    Raises:
        ValueError: if none has as many as there should be, or as can become as many.
    """
    for wanted in (channels, *COLORED) if channels in COLORED else (channels,):
        for axis in order:
            if shape[axis] == wanted:
                return axis
    raise wrong_channels(min(shape[0], shape[2]), channels)
