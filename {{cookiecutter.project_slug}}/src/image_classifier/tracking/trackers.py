"""Trackers get a copy of the metrics: TensorBoard, and those in `tools`, such as wandb.

To add a tracker: `tools/<name>/tracker.py` with a function `open_tracker` that returns a `Tracker`.
If it needs a library, `LIBRARY` is its name for pip and for Python.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from ..config import Config
from ..errors import OF_TOOLS, UserError, choose
from ..extensions import find_tools, flag
from ..runtime.config_dict import flatten
from ..runtime.console import printable
from ..runtime.platform import install_command

Metrics = dict[str, float]
Knobs = dict[str, str | float | bool]

PRIVATE = ("run.", "data.root", "data.labels", "data.cache")  # knobs with paths of this machine
CONFUSION_SIDE = 512  # pixels of a confusion matrix, about
NAME_SIDE, NAME_WIDTH, NAME_LETTERS = 12, 160, 20  # pixels and letters of the name of a class
PROJECT = __name__.partition(".")[0]  # the name that groups the runs of this package


@dataclass(frozen=True)
class Tracker:
    """The functions of one tracker that a run calls."""

    log: Callable[[int, Metrics], object]  # after a step: its number, and metrics by name
    image: Callable[[int, str, np.ndarray], object] = lambda *_: None  # step, name, and an image:
    # (height, width, 3) uint8
    close: Callable[[bool], object] = lambda _: None  # at the end: whether the run is complete
    note: str = ""  # a line that says where to look


class Trackers:
    """The trackers of a run. If one fails, training continues without it and prints one line."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """Open none yet; `say` prints a line."""
        self.say = say
        self.open: dict[str, Tracker] = {}

    def begin(self, config: Config, folder: Path, start_step: int) -> None:
        """Open the trackers of `config` for the run in `folder`, resumed after `start_step`."""
        for name in dict.fromkeys(config.run.trackers):  # each once
            with self._dropped_on_failure(name):
                self.open[name] = find_trackers()[name](folder, public_knobs(config), start_step)
                if note := self.open[name].note:
                    self.say(f"{name}: {printable(note)}")

    def tell(self, event: Literal["log", "image", "close"], *arguments: object) -> None:
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
            reason = printable((str(error) or type(error).__name__).splitlines()[0])
            self.say(f"{name} failed, training continues: {reason}; metrics.jsonl has all metrics")


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is not there, or whose library is missing.

    Raises:
        UserError: with the trackers that are there, or the command that installs the library.
    """
    for name in names:
        choose("tracker", name, find_trackers(), OF_TOOLS)
        library = getattr(find_tools("tracker").get(name), "LIBRARY", "")
        if library and find_spec(library) is None:
            raise UserError(f"--run.trackers {name} needs a library: {install_command(library)}")


def public_knobs(config: Config) -> Knobs:
    """The knobs that a result depends on, without paths of this machine."""
    return {
        flag(knob): value if isinstance(value, int | float) else str(value)
        for knob, value in flatten(config).items()
        if not knob.startswith(PRIVATE)
    }


def tensorboard(folder: Path, knobs: Knobs, start_step: int) -> Tracker:
    """TensorBoard: curves, images and hyper-parameters; it hides rows after the last checkpoint."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    # Its thread writes to the disk once per second: to wait for it takes as long as a step.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1, flush_secs=1)
    seen: Metrics = {}

    def log(step: int, metrics: Metrics) -> None:
        seen.update(metrics)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.file_writer.add_summary(Summary(value=values), step)  # one event, not one for each

    def image(step: int, name: str, pixels: np.ndarray) -> None:
        writer.add_image(name, pixels, step, dataformats="HWC")

    def close(is_done: bool) -> None:
        if is_done:  # `add_hparams` would make a second run, and takes a bool for a number
            words = {knob: str(v) if isinstance(v, bool) else v for knob, v in knobs.items()}
            for summary in hparams(words, dict.fromkeys(seen)):
                writer.file_writer.add_summary(summary)
        writer.close()

    return Tracker(log, image, close)


def find_trackers() -> dict[str, Callable[[Path, Knobs, int], Tracker]]:
    """The functions that open a tracker, by its name: TensorBoard's, and those of the tools."""
    tools = {name: module.open_tracker for name, module in find_tools("tracker").items()}
    return {"tensorboard": tensorboard, **tools}


def confusion_image(confusion: Tensor, classes: Sequence[str] = ()) -> np.ndarray:
    """A confusion matrix, (classes, classes) counts, as an image: (height, width, 3) uint8.

    The darker a cell, the larger its share of the row (the true class); by its square root, so that
    one percent is visible. Each row has the name of its class, and each column its number, where a
    cell is large enough.
    """
    shares = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).sqrt()
    cells = (255 * (1 - shares)).round().byte().numpy()
    side = max(1, CONFUSION_SIDE // len(cells))
    image = np.kron(cells, np.ones((side, side), np.uint8))[:, :, None].repeat(3, axis=2)
    if not classes or side < NAME_SIDE:
        return image
    page = Image.new("RGB", (image.shape[1] + NAME_WIDTH, image.shape[0] + NAME_SIDE), "white")
    page.paste(Image.fromarray(image), (NAME_WIDTH, NAME_SIDE))
    draw = ImageDraw.Draw(page)
    for number, name in enumerate(classes):
        middle = number * side + (side - NAME_SIDE) // 2
        label = ascii(name)[1:-1][:NAME_LETTERS]  # the font has few others
        draw.text((2, NAME_SIDE + middle), f"{number} {label}", "black")
        draw.text((NAME_WIDTH + middle, 0), str(number), "black")
    return np.asarray(page)
