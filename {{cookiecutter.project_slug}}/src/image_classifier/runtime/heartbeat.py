"""Each rank writes where it stands, once per second; others report it if it does not answer."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..config import RunConfig
from ..errors import EXIT_PEER_LOST, FaultError
from .distributed import World, is_peer_failure
from .files import read_rows
from .profiler import line_of

FILE = "heartbeats"  # in the run folder: a row of ROW_BYTES for each rank
ROW_BYTES = 512
BEAT_SECONDS = 1.0


class Stepping(Protocol):
    """Whatever counts the steps of a run."""

    step: int


class LostError(FaultError):
    """Another rank was killed, or does not answer; a new start may help."""

    code = EXIT_PEER_LOST


class Heartbeat:
    """Writes where this rank stands while a block runs; explains why another rank is silent."""

    def __init__(self, run: RunConfig, world: World, progress: Stepping) -> None:
        """A rank at step `progress.step`; a process that is alone writes nothing."""
        self.path, self.world, self.progress = Path(run.dir, FILE), world, progress
        self.main_thread = threading.get_ident()
        self.is_over = threading.Event()

    def __enter__(self) -> "Heartbeat":
        """Start the thread that writes."""
        if self.world.size > 1:
            self.beat("runs")
            self.thread = threading.Thread(target=self.beat_on, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        """Write how the block ended, and name the ranks for which this one waited in vain.

        Raises:
            LostError: in place of an error that only says that another rank is gone.
        """
        if self.world.size == 1:
            return
        self.is_over.set()
        self.thread.join()
        if not (isinstance(error, Exception) and is_peer_failure(error)):
            self.beat("left")
            return
        self.beat("waits")
        time.sleep(2 * BEAT_SECONDS)  # until all ranks have written how they stand
        if (account := self.account()) is not None:
            raise LostError(account) from error

    def beat_on(self) -> None:
        """Write once per second until the block ends."""
        while not self.is_over.wait(BEAT_SECONDS):
            self.beat("runs")

    def beat(self, how: str) -> None:
        """Write this rank's row; a full disk must not end the run."""
        row = {
            "rank": self.world.rank,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "step": self.progress.step,
            "line": line_of(sys._current_frames().get(self.main_thread)),
            "time": time.time(),
            "how": how,
        }
        text = json.dumps(row).encode()[: ROW_BYTES - 1].ljust(ROW_BYTES - 1) + b"\n"
        with suppress(OSError):
            self.path.touch()
            with self.path.open("r+b") as file:
                file.seek(self.world.rank * ROW_BYTES)
                file.write(text)

    def account(self) -> str | None:
        """Which ranks are gone or hang, and where; None if each of them reported it itself.

        Empty on all remaining ranks but the first: one report is enough.
        """
        rows = [row for row in rows_of(self.path) if row["rank"] < self.world.size]
        silent = [row for row in rows if row["how"] not in ("left", "waits")]
        if not silent:
            return None
        if self.world.rank != min(set(range(self.world.size)) - {row["rank"] for row in silent}):
            return ""
        ranks = "; ".join(map(describe, silent))
        return f"no answer from {ranks}. What was saved is kept. Run the same command to resume"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that `Heartbeat` wrote to a file, and no others."""
    names = {"rank", "host", "process", "step", "line", "time", "how"}
    with suppress(OSError):
        return [row for row in read_rows(path) if row.keys() == names]
    return []


def describe(row: dict[str, Any]) -> str:
    """A rank, what became of its process if that is on this machine, and where it was last."""
    fate = "on another machine"
    if row["host"] == socket.gethostname():
        fate = "which has ended"
        with suppress(OSError):
            letter = Path(f"/proc/{row['process']}/stat").read_text().rpartition(")")[2].split()[0]
            fate = {"Z": fate, "T": "which is stopped"}.get(letter, "which hangs")
    return (
        f"rank {row['rank']} on {row['host']} (process {row['process']}, {fate}): "
        f"last seen {time.time() - row['time']:.0f} s ago after step {row['step']}, "
        f"at {row['line']}"
    )
