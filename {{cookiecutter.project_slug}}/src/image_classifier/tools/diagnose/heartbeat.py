"""Each rank writes where it stands, once per second; others report it if it does not answer."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...checkpoints import TrainState
from ...errors import EXIT_PEER_LOST, FaultError, is_peer_failure
from ...runtime.distributed import World
from ...runtime.files import open_plain, parse_object
from ...tracking import Setup

FILE = "heartbeats"  # in the run folder: a row of ROW_BYTES for each rank
ROW_BYTES = 512
BEAT_SECONDS = 1.0


class LostError(FaultError):
    """Another rank was killed, or does not answer; a new start may help."""

    code = EXIT_PEER_LOST


@contextmanager
def watch(setup: Setup, state: TrainState) -> Iterator[None]:
    """A block in which each rank writes where it stands; a process that is alone writes nothing.

    Raises:
        LostError: in place of an error that only says that another rank is gone; it names the rank.
    """
    world = setup.world
    if world.size == 1:
        yield
        return
    path = Path(setup.config.run.dir, FILE)
    is_over = threading.Event()
    lost = None
    hosts = [""] * world.size  # of each rank: machines need not share a run folder
    dist.all_gather_object(hosts, socket.gethostname())
    beat = partial(write_row, path, world, state, threading.get_ident())

    def beat_on() -> None:
        while not is_over.wait(BEAT_SECONDS):
            beat("runs")

    beat("runs")
    thread = threading.Thread(target=beat_on, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if not is_peer_failure(error):
            raise
        lost = error
    finally:
        is_over.set()
        thread.join()
        beat("waits" if lost else "left")
    if lost:
        time.sleep(2 * BEAT_SECONDS)  # until all ranks have written how they stand
        if (account := account_of(path, world, hosts)) is not None:
            raise LostError(account) from lost
        raise lost


def write_row(path: Path, world: World, state: TrainState, thread: int, how: str) -> None:
    """Write this rank's row: where its main `thread` is; a full disk must not end the run."""
    row = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "step": state.step,
        "line": line_of(sys._current_frames().get(thread)),
        "time": time.time(),
        "how": how,
    }
    text = json.dumps(row).encode()[: ROW_BYTES - 1].ljust(ROW_BYTES - 1) + b"\n"
    with suppress(OSError):
        path.touch()
        with path.open("r+b") as file:
            file.seek(world.rank * ROW_BYTES)
            file.write(text)


def account_of(path: Path, world: World, hosts: list[str]) -> str | None:
    """Which ranks are gone or hang, and where; None if each has told it, or this rank has no row.

    Empty on all remaining ranks but the first, or but the first of each machine if those have lost
    each other: one report is enough. `hosts` has the machine of each rank.
    """
    rows = {row["rank"]: row for row in rows_of(path) if row["host"] in hosts}
    hows = [rows[rank]["how"] if rank in rows else "" for rank in range(world.size)]
    silent = [rank for rank, how in enumerate(hows) if how not in ("left", "waits")]
    is_cut = set(hows) == {"waits"}  # all are alive: the network between machines is not
    if is_cut:
        silent = [rank for rank, host in enumerate(hosts) if host != hosts[world.rank]]
    if not silent or world.rank in silent:  # whose row could not be written
        return None
    if world.rank != min(set(range(world.size)) - {*silent}):
        return ""
    ranks = "; ".join(describe(rank, hosts[rank], rows.get(rank)) for rank in silent)
    lost = {hosts[rank] for rank in silent} - {hosts[world.rank]}
    again = f" on all machines, or without {' and '.join(sorted(lost))}" if lost else ""
    return f"no answer from {ranks}. What was saved is kept. Run the same command to resume{again}"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that `write_row` wrote to a file, and no others."""
    names = {"rank", "host", "process", "step", "line", "time", "how"}
    with suppress(OSError), open_plain(path) as file:
        lines = file.read().replace(b"\0", b"").splitlines()  # there is no row of another machine
        return [row for row in map(parse_object, lines) if row.keys() == names]
    return []


def describe(rank: int, host: str, row: dict[str, Any] | None) -> str:
    """A rank, what became of its process if that is on this machine, and where it was last."""
    if row is None:
        return f"rank {rank} on {host} (that machine is down, or its network, or its run failed)"
    fate = "on another machine"
    if host == socket.gethostname():
        fate = "which has ended"
        with suppress(OSError):
            letter = Path(f"/proc/{row['process']}/stat").read_text().rpartition(")")[2].split()[0]
            fate = {"Z": fate, "T": "which is stopped"}.get(letter, "which hangs")
    return (
        f"rank {rank} on {host} (process {row['process']}, {fate}): "
        f"last seen {time.time() - row['time']:.0f} s ago after step {row['step']}, "
        f"at {row['line']}"
    )


def line_of(frame: FrameType | None) -> str:
    """The innermost line outside torch and Python's library: `train.py:88 in train`."""
    library = f"{Path(torch.__file__).parent}{os.sep}", "<"
    standard = f"{Path(os.__file__).parent}{os.sep}"
    while frame is not None:
        name = frame.f_code.co_filename
        is_standard = name.startswith(standard) and "site-packages" not in name
        if not is_standard and not name.startswith(library):
            return f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "its end"
