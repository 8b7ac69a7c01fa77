"""Where every rank stands, once a second, for the others to say when it does not answer."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from .config import FaultError, RunConfig
from .runtime.distributed import LOST, World, is_peer_failure
from .runtime.files import read_rows
from .train_state import TrainState

ROWS = "heartbeats"  # file in the run folder, with a row of so many bytes for each rank
ROW_BYTES = 512
BEAT_SECONDS = 1.0


class LostError(FaultError):
    """Another rank was killed, or does not answer; a new start may help."""

    code = LOST


class Heartbeat:
    """Writes where this rank stands while a block runs; explains why another one is silent."""

    def __init__(self, run: RunConfig, world: World, state: TrainState) -> None:
        """Of a rank that trains `state`; a process that is alone has nobody to tell."""
        self.path = Path(run.dir, ROWS)
        self.world, self.state, self.timeout_seconds = world, state, run.timeout_seconds
        self.main_thread = threading.get_ident()
        self.is_over = threading.Event()

    def __enter__(self) -> "Heartbeat":
        """Begin to beat."""
        if self.world.size > 1:
            self.beat("runs")
            self.thread = threading.Thread(target=self.beat_on, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        """Say how it ended, and for whom this rank has waited in vain if that is why.

        Raises:
            LostError: in place of an error that only says that another rank has gone.
        """
        if self.world.size == 1:
            return
        self.is_over.set()
        self.thread.join()
        lost_contact = isinstance(error, Exception) and is_peer_failure(error)
        self.beat("waits" if lost_contact else "left")
        if not lost_contact:
            return
        time.sleep(2 * BEAT_SECONDS)  # until all have written how they stand
        account = self.account()
        if account is not None:
            raise LostError(account) from error

    def beat_on(self) -> None:
        """Beat until the block is left."""
        while not self.is_over.wait(BEAT_SECONDS):
            self.beat("runs")

    def beat(self, how: str) -> None:
        """Write this rank's row; a disk that is full must not end the run."""
        row = {
            "rank": self.world.rank,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "step": self.state.step,
            "line": line_of(self.main_thread),
            "time": time.time(),
            "how": how,
        }
        text = json.dumps(row).encode()[: ROW_BYTES - 1].ljust(ROW_BYTES - 1) + b"\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(descriptor, text, self.world.rank * ROW_BYTES)
            finally:
                os.close(descriptor)

    def account(self) -> str | None:
        """Which ranks are gone or hang, where they stood; None if those that went said why.

        Empty on all ranks but the first that is left: one account is enough.
        """
        rows = ranks_in(self.path)
        gone = [row for rank, row in rows.items() if rank < self.world.size and not said(row)]
        if not gone:
            return None
        silent = {row["rank"] for row in gone}
        if self.world.rank != min(set(range(self.world.size)) - silent):
            return ""
        places = "; ".join(describe(row) for row in gone)
        return (
            f"no answer from {places}. What was saved is kept, "
            "and the same command goes on from there"
        )


def said(row: dict[str, Any]) -> bool:
    """Whether a rank has ended with an account of its own, or waits as we do."""
    return row["how"] in ("left", "waits")


def describe(row: dict[str, Any]) -> str:
    """Who a rank is, what became of it, and where it stood."""
    return (
        f"rank {row['rank']} on {row['host']} (process {row['process']}, "
        f"{fate(row)}): last seen {time.time() - row['time']:.0f} s ago "
        f"after step {row['step']}, at {row['line']}"
    )


def fate(row: dict[str, Any]) -> str:
    """What became of the process of a row, as far as this machine knows."""
    if row["host"] != socket.gethostname():
        return "on another machine"
    try:
        status = Path(f"/proc/{row['process']}/stat").read_text()
    except OSError:
        return "which has ended"
    letter = status.rpartition(")")[2].split()[0]
    return {"Z": "which has ended", "T": "which is stopped"}.get(letter, "which hangs")


def ranks_in(path: Path) -> dict[int, dict[str, Any]]:
    """What each rank wrote last, by rank."""
    with contextlib.suppress(OSError):
        return {row["rank"]: row for row in read_rows(path) if is_row(row)}
    return {}


def is_row(row: dict[str, Any]) -> bool:
    """Whether a row is one that `Heartbeat.beat` writes: anybody may write to the file."""
    kinds = {"rank": int, "host": str, "process": int, "step": int, "line": str, "how": str}
    is_time = isinstance(row.get("time"), float)
    return is_time and all(isinstance(row.get(name), kind) for name, kind in kinds.items())


def line_of(thread: int) -> str:
    """The innermost line of our own code that a thread is in: `train.py:88 in train`."""
    library = str(Path(torch.__file__).parent)
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((library, "<")) and f"{os.sep}lib{os.sep}python" not in name:
            return f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "its end"
