"""Runs to be killed: forked from a process that has imported everything, or by the command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_classifier.train
import sklearn.metrics  # noqa: F401 - what a run imports on its way is imported here, once for all
import torch
import torch._dynamo
import torchvision.transforms.v2  # noqa: F401
from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import Config
from image_classifier.errors import FaultError
from image_classifier.presets import smoke
from image_classifier.runtime.config_dict import flatten, unflatten

from . import PROJECT
from .table import LossError

torch.set_num_threads(1)  # threads of this process would be missing in its children
TRAIN = PROJECT / "train.py"
SMALL = "smoke --optim.warmup-epochs 0 --run.trackers"
FAST = f"{SMALL} --run.processes 2"


def small(folder: Path, **knobs: Any) -> Config:  # noqa: ANN401
    """A run of a second or so: 10 steps in an epoch; `data__workers=2` is `data.workers`."""
    values = {
        "epochs": 3,
        "data__limit": 160,
        "data__batch_size": 16,
        "optim__warmup_epochs": 0,
        "run__dir": str(folder),
        "run__trackers": (),
        "run__processes": 1,
        **knobs,
    }
    return unflatten(
        flatten(smoke()) | {name.replace("__", "."): value for name, value in values.items()}
    )


def fork(function: Callable[..., object], *arguments: object) -> int:
    """Begin `function(*arguments)` in a process group of its own; what it prints goes nowhere."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        torch.set_num_threads(1)
        function(*arguments)
        code = 0
    except FaultError as fault:
        code = fault.code
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train(config: Config) -> None:
    """Train, in a child."""
    image_classifier.train.train(config)


def train_whole(config: Config) -> float:
    """Train to the end; the seconds that it took."""
    began = time.monotonic()
    code = wait(fork(train, config))
    if code:
        raise LossError(f"a run ended with exit code {code}")
    return time.monotonic() - began


def ends_within(pid: int, seconds: float) -> bool:
    """Whether a child comes to its end by itself within so many seconds; `wait` tells how."""
    latest = time.monotonic() + seconds
    while time.monotonic() < latest:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        time.sleep(0.001)
    return False


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a child and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


class Command:
    """A run by the command line, in a folder."""

    def __init__(self, words: str, cwd: Path, *, script: Path = TRAIN, launcher: str = "") -> None:
        """Start it; `launcher` are words for Python that come before the script."""
        cwd.mkdir(parents=True, exist_ok=True)
        self.cwd = cwd
        self.log = (cwd / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *launcher.split(), str(script), *words.split()],
            cwd=cwd,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return (self.cwd / "log").read_text()

    def until(self, text: str, seconds: float = 120) -> None:
        """Wait until it has printed `text`."""
        self.until_true(lambda: text in self.said, f"no {text!r} in {self.cwd}", seconds)

    def until_step(self, step: int, folder: str = "run") -> None:
        """Wait until it has logged a step."""
        rows = self.cwd / folder / "metrics.jsonl"
        self.until_true(
            lambda: rows.exists() and any(r["step"] >= step for r in read_rows(rows)),
            f"step {step} was not reached",
        )

    def until_true(self, holds: Callable[[], bool], otherwise: str, seconds: float = 120) -> None:
        """Wait until something holds.

        Raises:
            LossError: if it does not, or the run ends before.
        """
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end or self.process.poll() is not None:
                raise LossError(f"{otherwise}: {self.said[-300:]}")
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """The processes of its ranks, in order."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def wait(self, seconds: float = 300) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LossError(f"it did not end within {seconds:.0f} s: {self.said[-300:]}") from None
        finally:
            self.close()

    def close(self) -> None:
        """Leave nothing of it behind."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def family(self) -> list[int]:
        """Every process that still runs in its folder."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_zombie = " Z " in (folder / "stat").read_text().rpartition(")")[2][:4]
                if not is_zombie and (folder / "cwd").resolve() == self.cwd.resolve():
                    found.append(int(folder.name))
        return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a log; the last may not be through."""
    rows = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def losses(folder: Path) -> list[tuple]:
    """The rows of a run's log, without what depends on speed."""
    rows = read_rows(folder / "metrics.jsonl")
    return [(row["step"], row.get("train/loss"), row.get("val/loss")) for row in rows]


def status(folder: Path) -> dict[str, Any]:
    """How a run says that it stands."""
    return json.loads((folder / "status.json").read_text())


def assert_same_end(one: Path, other: Path) -> None:
    """Two runs ended alike: weights, optimizer, logged losses, test scores to the last bit.

    Raises:
        LossError: if not, naming what differs.
    """
    ends = (read_checkpoint(run / "checkpoints" / "last.pt")["state"] for run in (one, other))
    where = difference(*ends)
    if where is not None:
        raise LossError(f"weights or optimizer differ: {where}")
    if losses(one) != losses(other):
        raise LossError("the logged losses differ")
    tested = [path.read_bytes() for run in (one, other) for path in run.glob("test.json")]
    if len({*tested}) > 1 or len(tested) == 1:
        raise LossError("the scores on the test images differ")


def difference(one: object, other: object, where: str = "") -> str | None:
    """Where two nested values differ, if they do."""
    if isinstance(one, torch.Tensor):
        return None if torch.equal(one, other) else where
    if isinstance(one, dict):
        pairs = ((key, value, other[key]) for key, value in one.items())
    elif isinstance(one, list | tuple):
        pairs = ((key, value, other[key]) for key, value in enumerate(one))
    else:
        return None if one == other else where
    found = (difference(left, right, f"{where}/{key}") for key, left, right in pairs)
    return next(filter(None, found), None)


def expect(holds: bool, otherwise: str) -> None:
    """Raise a `LossError` that says `otherwise`, unless something holds."""
    if not holds:
        raise LossError(otherwise)
