"""Trackers get a copy of the metrics: TensorBoard, Weights & Biases, trackio.

To add a tracker: a function that returns a `Tracker`, its name in `TRACKERS` and `config.py`.
"""

import contextlib
import io
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from ..config import Config, flag
from ..errors import UserError
from ..runtime.config_dict import flatten
from ..runtime.console import printable

Metrics = dict[str, float]
Images = dict[str, np.ndarray]  # (height, width, 3) uint8, by name
Knobs = dict[str, str | float | bool]

PRIVATE = ("run.", "data.root", "data.cache")  # knobs with paths of this machine
CONFUSION_SIDE = 512  # pixels of a confusion matrix, about
PROJECT = __name__.partition(".")[0]  # the name that groups the runs of this package


@dataclass(frozen=True)
class Tracker:
    """The functions of one tracker that a run calls."""

    log: Callable[[int, Metrics], object]  # after a step: its number, and metrics by name
    images: Callable[[int, Images], object] = lambda *_: None  # the same with images
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
                self.open[name] = TRACKERS[name](folder, public_knobs(config), start_step)
                if note := self.open[name].note:
                    self.say(f"{name}: {printable(note)}")

    def tell(self, event: Literal["log", "images", "close"], *arguments: object) -> None:
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


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker whose library is missing, before any work is done.

    Raises:
        UserError: with the command that installs it.
    """
    for name in names:
        if name in ("wandb", "trackio") and find_spec(name) is None:
            raise UserError(f"--run.trackers {name} needs a library: pip install {name}")


def public_knobs(config: Config) -> Knobs:
    """The knobs that a result depends on, without paths of this machine."""
    return {
        flag(knob): value if isinstance(value, int | float) else str(value)
        for knob, value in flatten(config).items()
        if not knob.startswith(PRIVATE)
    }


def tensorboard(folder: Path, knobs: Knobs, start_step: int) -> Tracker:
    """TensorBoard: curves, images and hyper-parameters; it hides rows after the last checkpoint."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)
    seen: Metrics = {}

    def log(step: int, metrics: Metrics) -> None:
        seen.update(metrics)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def images(step: int, named: Images) -> None:
        for name, image in named.items():
            writer.add_image(name, image, step, dataformats="HWC")

    def close(is_done: bool) -> None:
        if is_done:  # `add_hparams` would make a second run, and takes a bool for a number
            words = {knob: str(v) if isinstance(v, bool) else v for knob, v in knobs.items()}
            for summary in hparams(words, dict.fromkeys(seen)):
                writer.file_writer.add_summary(summary)
        writer.close()

    return Tracker(log, images, close)


def wandb(folder: Path, knobs: Knobs, start_step: int) -> Tracker:  # noqa: ARG001 - its id tells
    """Weights & Biases: the same folder is the same run; without an API key it stays offline.

    It sends no code, terminal output, machine data or command line.
    """
    import wandb as library

    id_file = folder / "wandb" / "id"
    id_file.parent.mkdir(exist_ok=True)
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:8])
    # Without a key `init` would ask at the terminal, and wait.
    is_online = os.environ.get("WANDB_MODE") or library.login(prompt=False, verify=False)
    run = library.init(
        dir=str(folder),
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=folder.resolve().name,
        id=id_file.read_text().strip(),
        resume="allow",
        config=knobs,
        mode=None if is_online else "offline",
        settings=library.Settings(
            console="off",
            silent=True,
            init_timeout=30,  # seconds for its server to answer
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        ),
    )
    offline = f"kept offline; to upload: wandb sync {folder}/wandb/offline-run-*"
    return Tracker(
        log=lambda step, metrics: run.log(metrics, step=step),
        images=lambda step, named: run.log(wrapped(library.Image, named), step=step),
        close=lambda is_done: run.finish(exit_code=0 if is_done else 1),
        note=offline if run.offline else str(run.url),
    )


def trackio(folder: Path, knobs: Knobs, start_step: int) -> Tracker:
    """trackio: a database in the run folder, or in `TRACKIO_DIR`; it starts no server.

    It reads that variable once per process.
    """
    os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").resolve()))
    import trackio as library

    def close(_: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            library.finish()

    with contextlib.redirect_stdout(io.StringIO()):
        run = library.init(
            project=PROJECT,
            name=folder.resolve().name,
            config=knobs,
            resume="allow" if start_step else "never",
            embed=False,
            auto_log_gpu=False,  # our metrics have the device's readings
            auto_log_cpu=False,
        )
    return Tracker(
        log=lambda step, metrics: run.log(metrics, step=step),
        images=lambda step, named: run.log(wrapped(library.Image, named), step=step),
        close=close,
        note=f"to view: TRACKIO_DIR={library.TRACKIO_DIR} trackio show --project {PROJECT}",
    )


TRACKERS: dict[str, Callable[[Path, Knobs, int], Tracker]] = {
    tracker.__name__: tracker for tracker in (tensorboard, wandb, trackio)
}


def wrapped(kind: Callable, images: Images) -> dict[str, object]:
    """Each image as the library's own `kind` of image."""
    return {name: kind(image) for name, image in images.items()}


def confusion_image(confusion: Tensor) -> np.ndarray:
    """A confusion matrix, (classes, classes) counts, as an image: (height, width, 3) uint8.

    The darker a cell, the larger its share of the row (the true class); by its square root, so that
    one percent is visible.
    """
    shares = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).sqrt()
    cells = (255 * (1 - shares)).round().byte().numpy()
    side = max(1, CONFUSION_SIDE // len(cells))
    return np.kron(cells, np.ones((side, side), np.uint8))[:, :, None].repeat(3, axis=2)
