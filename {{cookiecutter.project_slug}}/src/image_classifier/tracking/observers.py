"""Observers, which add warnings, metrics and sentences to the log, or write files of their own.

Beside them, watchers surround the steps. All of them are tools. To add an observer:
`tools/<name>/observer.py` with a function `open_observer(setup)` that returns an `Observer`. To add
a watcher: `tools/<name>/watcher.py` with a context manager `watch(setup, state)`, whose value is
called after each step, and returns whether it took time that is not training's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from torch import nn

from ..config import Config
from ..data import Augmented, EvalData, TrainData
from ..extensions import find_tools
from ..metrics import NO_DECISION, Decision, Predictions
from ..precision import Precision
from ..preprocess import Normalize
from ..runtime.distributed import World


@dataclass(frozen=True)
class Setup:
    """What a run consists of, before its first step."""

    config: Config
    world: World
    train_data: TrainData
    val_data: EvalData
    model: nn.Module  # on its device, and not wrapped for DDP
    precision: Precision
    normalize: Normalize


@dataclass(frozen=True)
class Speed:
    """How fast a run is, over its last steps or its last epoch."""

    step: int  # how many are done
    image_size: int  # side in pixels of the images of the last step
    images_per_second: float  # on all ranks
    waited: float  # share of the time in which the loop waited for images, 0 to 1

    def __str__(self) -> str:
        """As a progress line has it."""
        return f"{self.images_per_second:,.0f} images/s  waited {self.waited:.0%}  "


@dataclass(frozen=True)
class Result:
    """What a run has reached: after an evaluation, or at its end."""

    predictions: Predictions  # for the validation images
    metrics: dict[str, float]  # of them: `val/top1` and so on
    step: int  # how many are done
    total_steps: int  # 0: a linear probe alone
    best_step: int  # of the best weights, whose predictions those at the end are
    end: str  # how the run ended, or that it has not
    warnings: list[str]  # of all observers
    decision: Decision = NO_DECISION  # when these predictions count
    is_last: bool = False  # whether the run ends with it
    model: nn.Module | None = None  # then: that predicted; None if a rank has only a part of it
    sections: list[Callable[["Result", ModuleType], str]] = field(default_factory=list)  # of all


@dataclass(frozen=True)
class Observer:
    """What one observer adds to the log of a run."""

    warnings: tuple[str, ...] = ()  # printed, and shown by the report page
    notes: tuple[str, ...] = ()  # lines on what the run consists of
    metrics: Callable[[Speed | None], dict[str, float]] = lambda _: {}  # of a row; None: not timed
    verdict: Callable[[Speed], str] = lambda _: ""  # a sentence after each epoch
    begin: Callable[[int, Augmented], object] = lambda *_: None  # after the first step: its number,
    # and its batch, as the model saw it
    judge: Callable[[nn.Module], dict[str, float]] = lambda _: {}  # more metrics, of this model
    conclude: Callable[[Result], str] = lambda _: ""  # after evaluations; of the last one, where
    # to look at what was made of it
    section: Callable[[Result, ModuleType], str] = lambda *_: ""  # HTML, by the report's package


def open_observers(setup: Setup) -> list[Observer]:
    """The observers of a run, in the order of their names; other ranks than 0 have none."""
    tools = find_tools("observer").values() if setup.world.is_main else ()
    return [tool.open_observer(setup) for tool in tools]
