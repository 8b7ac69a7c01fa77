"""What a tip is measured on, and the variants that it compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...config import Config
from ...data import TrainData
from ...runtime.config_dict import flatten, unflatten
from ...runtime.distributed import World
from .timed_run import TimedRun


class UnavailableError(Exception):
    """A tip can't be measured here; the message says what it needs."""


@dataclass(frozen=True)
class Setup:
    """The user's preset, images and machine."""

    config: Config  # of one process; no knob that a tip changes is `auto`
    world: World
    data: TrainData  # the images as the preset uses them


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    config: Config
    change: Callable[[TimedRun], object] | None = None  # made to the run, where no knob does it
    processes: int = 1  # that share a batch, each on its own GPU
    is_choice: bool = True  # changes nothing but speed, so it may be recommended


Variants = dict[str, Variant]  # by name; the others are compared with the first


def with_knobs(config: Config, **knobs: Any) -> Config:  # noqa: ANN401 - knobs have many types
    """`config` with other values; `data__workers=2` is `data.workers`."""
    dotted = {name.replace("__", "."): value for name, value in knobs.items()}
    return unflatten(flatten(config) | dotted)


def off_and_on(
    config: Config, knob: str, off: str = "off", on: str = "on", is_choice: bool = True
) -> Variants:
    """A knob that is False in the first variant and True in the second."""
    configs = (with_knobs(config, **{knob: value}) for value in (False, True))
    return {n: Variant(c, is_choice=is_choice) for n, c in zip((off, on), configs, strict=True)}


def streamed(config: Config) -> Config:
    """`config`, with images that workers decode for every batch."""
    workers = max(1, int(config.data.workers))
    return with_knobs(config, data__where="stream", data__workers=workers)


def need_gpu(setup: Setup) -> None:
    """Raise `UnavailableError` without a GPU."""
    if setup.world.device.type != "cuda":
        raise UnavailableError("needs a GPU")
