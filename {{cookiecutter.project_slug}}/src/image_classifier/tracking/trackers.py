"""Trackers get a copy of the metrics: TensorBoard, wandb and others, all of them tools.

To add a tracker: `tools/<name>/tracker.py` with a function `open_tracker` that returns a `Tracker`.
If it needs libraries, `LIBRARY` has their names for pip. One with `IS_DEFAULT` needs no account, so
that runs use it unless `--run.trackers` says otherwise.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from ..config import Config
from ..errors import OF_TOOLS, UserError, choose
from ..extensions import find_tools, flag
from ..metrics import Predictions
from ..runtime.config_dict import flatten
from ..runtime.console import first_line, printable
from ..runtime.platform import install_command

Metrics = dict[str, float]
Knobs = dict[str, str | float | bool]

PRIVATE = ("data.root", "data.labels", "data.cache", "optim.teacher")  # paths of this machine
PROJECT = __name__.partition(".")[0]  # the name that groups the runs of this package


@dataclass(frozen=True)
class Tracker:
    """The functions of one tracker that a run calls."""

    log: Callable[[int, Metrics], object]  # after a step: its number, and metrics by name
    finish: Callable[[int, Predictions], object] = lambda *_: None  # at the end of training: the
    # step, and what the best weights predict
    close: Callable[[bool], object] = lambda _: None  # at last: whether the run is complete
    note: str = ""  # a line that says where to look


class Trackers:
    """The trackers of a run. If one fails, training continues without it and prints one line."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """Open none yet; `say` prints a line."""
        self.say = say
        self.open: dict[str, Tracker] = {}

    def begin(self, config: Config, folder: Path, start_step: int) -> None:
        """Open the trackers of `config` for the run in `folder`, resumed after `start_step`."""
        for name in chosen_trackers(config.run.trackers):
            with self._dropped_on_failure(name):
                open_tracker = find_tools("tracker")[name].open_tracker
                self.open[name] = open_tracker(folder, public_knobs(config), start_step)
                if note := self.open[name].note:
                    self.say(f"{name}: {printable(note)}")

    def tell(self, event: Literal["log", "finish", "close"], *arguments: object) -> None:
        """Call one function of every open tracker, with the arguments that `Tracker` lists."""
        for name, tracker in list(self.open.items()):
            with self._dropped_on_failure(name):
                getattr(tracker, event)(*arguments)

    @contextmanager
    def _dropped_on_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of other people's code, a disk, a network: anything
            self.open.pop(name, None)
            reason = first_line(error)
            self.say(f"{name} failed, training continues: {reason}; metrics.jsonl has all metrics")


def chosen_trackers(names: Sequence[str]) -> list[str]:
    """The trackers that `--run.trackers` names, each once.

    Raises:
        UserError: if one is not there, or its library is missing: with the trackers that are there,
            or the command that installs the library.
    """
    tools = find_tools("tracker")
    table = {"auto": [name for name in tools if getattr(tools[name], "IS_DEFAULT", False)]}
    table |= {name: [name] for name in tools}
    lists = (choose("tracker", name, table, OF_TOOLS) for name in names)
    found = list(dict.fromkeys(itertools.chain.from_iterable(lists)))
    for name in found:
        libraries = getattr(tools[name], "LIBRARY", "").split()
        if not all(any(distributions(name=library)) for library in libraries):
            raise UserError(f"--run.trackers {name} needs a library: {install_command(*libraries)}")
    return found


def public_knobs(config: Config) -> Knobs:
    """The knobs that a result depends on, without paths of this machine."""
    return {
        flag(knob): value if isinstance(value, int | float) else str(value)
        for knob, value in flatten(config).items()
        if knob not in PRIVATE and not knob.startswith("run.")
    }
