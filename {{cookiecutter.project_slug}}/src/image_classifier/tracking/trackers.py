"""Where metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio.

To add a tracker: a function that returns a `Tracker`, its name in `TRACKERS` and `config.py`.
"""

import contextlib
import io
import netrc
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from torch import Tensor

from ..config import Config, UserError, flag, flatten
from ..runtime.console import printable
from ..runtime.run_dir import without_secrets

Metrics = dict[str, float]
Pictures = dict[str, np.ndarray]  # (height, width, 3) uint8, by name
Knobs = dict[str, str | float | bool]

RIGHT, WRONG = (31, 102, 181), (217, 108, 26)  # what the diagonal and the rest are painted in
PICTURE_SIDE = 512  # pixels of a confusion matrix, about
PRIVATE = ("run.", "data.root", "data.cache")  # knobs with paths
SYNC_SECONDS = 30  # for wandb's server to answer at the start


def nothing(*_: object) -> None:
    """What a tracker does with what it has no place for."""


@dataclass(frozen=True)
class Tracker:
    """What a run tells a tracker, and when."""

    log: Callable[[int, Metrics], object]  # after which step, and what was measured
    pictures: Callable[[int, Pictures], object] = nothing
    finish: Callable[[Metrics], object] = nothing  # the result of a run that came to its end
    close: Callable[[bool], object] = nothing  # whether it did; nothing comes after
    note: str = ""  # where to look, if that is not plain


class Trackers:
    """The trackers of a run. One that fails is let go of in a line, and the run goes on."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """None yet; `say` prints a line."""
        self.say = say
        self.open: dict[str, Tracker] = {}

    def begin(self, config: Config, folder: Path, start_step: int) -> None:
        """Open those that `config` names, for a run in `folder` that goes on after `start_step`."""
        for name in dict.fromkeys(config.run.trackers):  # each once
            with self.let_go_on_failure(name):
                self.open[name] = TRACKERS[name](folder, shown_knobs(config), start_step)
                if note := self.open[name].note:
                    self.say(f"{name}: {printable(note)}")

    def log(self, step: int, metrics: Metrics) -> None:
        """What was measured after `step`."""
        self.each(lambda tracker: tracker.log(step, metrics))

    def pictures(self, step: int, pictures: Pictures) -> None:
        """Pictures of `step`, by name: (height, width, 3) uint8."""
        self.each(lambda tracker: tracker.pictures(step, pictures))

    def finish(self, metrics: Metrics) -> None:
        """The result, beside the knobs that it was reached with."""
        self.each(lambda tracker: tracker.finish(metrics))

    def close(self, is_done: bool) -> None:
        """Nothing comes any more; whether the run is at its end."""
        self.each(lambda tracker: tracker.close(is_done))
        self.open = {}

    def each(self, tell: Callable[[Tracker], object]) -> None:
        """Tell every tracker that has not failed."""
        for name, tracker in list(self.open.items()):
            with self.let_go_on_failure(name):
                tell(tracker)

    @contextmanager
    def let_go_on_failure(self, name: str) -> Iterator[None]:
        """A block after whose failure a tracker is told nothing more."""
        try:
            yield
        except Exception as error:  # of other people's code, a disk, a network: anything
            self.open.pop(name, None)
            reason = printable((str(error) or type(error).__name__).splitlines()[0])
            self.say(f"{name}: no more curves: {reason}; metrics.jsonl has all")


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker whose library is not there, before any work is done.

    Raises:
        UserError: with the command that installs it.
    """
    for name in names:
        if name in ("wandb", "trackio") and find_spec(name) is None:
            raise UserError(f"--run.trackers {name} needs a library: pip install {name}")


def shown_knobs(config: Config) -> Knobs:
    """What a result may depend on, for others to see: no paths of this machine, and no secrets."""
    return {
        flag(knob): value if isinstance(value, int | float) else without_secrets([str(value)])[0]
        for knob, value in flatten(config).items()
        if not knob.startswith(PRIVATE)
    }


def tensorboard(folder: Path, knobs: Knobs, start_step: int) -> Tracker:
    """Curves, pictures, hyper-parameters; what a killed run wrote after its last save is hidden."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def log(step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def pictures(step: int, named: Pictures) -> None:
        for name, picture in named.items():
            writer.add_image(name, picture, step, dataformats="HWC")
        writer.flush()

    def finish(metrics: Metrics) -> None:
        # `SummaryWriter.add_hparams` would put them in a second run beside this one. It takes a
        # bool for a number, so they go as words.
        words = {knob: str(v) if isinstance(v, bool) else v for knob, v in knobs.items()}
        for summary in hparams(words, dict.fromkeys(metrics)):
            writer.file_writer.add_summary(summary)
        writer.flush()

    return Tracker(log, pictures, finish, lambda _: writer.close())


def wandb(folder: Path, knobs: Knobs, start_step: int) -> Tracker:  # noqa: ARG001 - it has the id
    """Weights & Biases: the same run again for the same folder; on the disk alone without a key.

    Of the code, the terminal, the machine and the command line nothing is sent.
    """
    import wandb as library

    kept = folder / "wandb" / "id"
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        kept.write_text(uuid.uuid4().hex[:8])
    run = library.init(
        dir=str(folder),
        project=os.environ.get("WANDB_PROJECT") or project(),
        name=folder.resolve().name,
        id=kept.read_text().strip(),
        resume="allow",
        config=knobs,
        mode=None if os.environ.get("WANDB_MODE") or has_wandb_key() else "offline",
        settings=library.Settings(
            console="off",
            silent=True,
            init_timeout=SYNC_SECONDS,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        ),
    )

    def pictures(step: int, named: Pictures) -> None:
        run.log({name: library.Image(picture) for name, picture in named.items()}, step=step)

    return Tracker(
        log=lambda step, metrics: run.log(metrics, step=step),
        pictures=pictures,
        finish=run.summary.update,
        close=lambda is_done: run.finish(exit_code=0 if is_done else 1),
        note=f"kept here; to send it: wandb sync {folder}/wandb/offline-run-*"
        if run.offline
        else str(run.url),
    )


def has_wandb_key() -> bool:
    """Whether wandb knows who we are: it would ask at the terminal, and no run may stop there."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:  # where `wandb login` writes it
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def trackio(folder: Path, knobs: Knobs, start_step: int) -> Tracker:
    """trackio: a database in the run folder, or where `TRACKIO_DIR` says; no server is started.

    It looks at that variable once in a process.
    """
    os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").resolve()))
    import trackio as library

    with quiet():
        run = library.init(
            project=project(),
            name=folder.resolve().name,
            config=knobs,
            resume="allow" if start_step else "never",
            embed=False,
            auto_log_gpu=False,  # the device's readings are among our metrics
            auto_log_cpu=False,
        )

    def pictures(step: int, named: Pictures) -> None:
        run.log({name: library.Image(picture) for name, picture in named.items()}, step=step)

    def close(_: bool) -> None:
        with quiet():
            library.finish()

    return Tracker(
        log=lambda step, metrics: run.log(metrics, step=step),
        pictures=pictures,
        close=close,
        note=f"to see it: TRACKIO_DIR={library.TRACKIO_DIR} trackio show --project {project()}",
    )


TRACKERS: dict[str, Callable[[Path, Knobs, int], Tracker]] = {
    tracker.__name__: tracker for tracker in (tensorboard, wandb, trackio)
}


def project() -> str:
    """What the runs of this code are called together."""
    return __name__.partition(".")[0]


def quiet() -> contextlib.AbstractContextManager:
    """A block whose printed lines go nowhere."""
    return contextlib.redirect_stdout(io.StringIO())


def confusion_picture(confusion: Tensor) -> np.ndarray:
    """(height, width, 3) uint8 of a confusion matrix: right answers blue, wrong ones orange.

    As dark as the root of the share of the row, so that a mistake of one percent is seen too.
    """
    counts = confusion.double().numpy()
    shares = np.sqrt(counts / np.maximum(1, counts.sum(axis=1, keepdims=True)))[:, :, None]
    colours = np.where(np.eye(len(counts), dtype=bool)[:, :, None], RIGHT, WRONG)
    cells = (255 - shares * (255 - colours)).round().astype(np.uint8)
    side = max(1, PICTURE_SIDE // len(counts))
    return cells.repeat(side, axis=0).repeat(side, axis=1)
