"""What a tip is tried on, and how it says that it can't be."""

from dataclasses import dataclass
from pathlib import Path

from ....config import Config, flatten, unflatten
from ....data import TrainData
from ....runtime.distributed import World
from .trial import Variant

Variants = dict[str, Variant]  # by what they do; the others are compared with the first


class NotHereError(Exception):
    """What a tip needs is not here; the message says what."""


@dataclass(frozen=True)
class Case:
    """The user's preset, images and machine."""

    config: Config  # one process's part of it; no knob that a tip is about is `auto`
    whole: Config  # the same for all processes together
    world: World
    data: TrainData  # the images as the preset has them
    folder: Path  # to write to
    num_gpus: int


def with_knobs(config: Config, knobs: dict[str, object]) -> Config:
    """`config` with other values, by the dotted names of the knobs."""
    return unflatten(flatten(config) | knobs)


def streamed(case: Case) -> Config:
    """The user's config, with workers that decode images for every batch anew."""
    workers = max(1, int(case.config.data.workers))
    return with_knobs(case.config, {"data.where": "stream", "data.workers": workers})


def need_gpu(case: Case) -> None:
    """Raise `NotHereError` if there is none."""
    if case.world.device.type != "cuda":
        raise NotHereError("needs a GPU")
