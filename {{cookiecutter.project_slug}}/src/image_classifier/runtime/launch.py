"""How several processes are started, looked after, and started again."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from ..config import ComputeConfig, RunConfig
from .distributed import AGAIN, LOST, STORE
from .machine import num_threads
from .signals import obeyed

POLL_SECONDS = 0.05  # between two looks at the ranks
RESTARTS = 3  # after a process was killed or ran out of memory
GRACE_SECONDS = 15.0  # for the ranks to end, when one has failed


def is_launched() -> bool:
    """Whether torchrun or `launch` started this process."""
    return "RANK" in os.environ


def num_processes(run: RunConfig, compute: ComputeConfig) -> int:
    """How many processes to start: what was asked for, else one per GPU."""
    if run.processes != "auto":
        return run.processes
    if compute.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return 1


def launch(processes: int) -> int:
    """Run this very command in `processes` processes and return the exit code of the first to fail.

    They inherit the terminal. When one fails, the others are stopped; when it was killed, or asks
    for it, all are started again, up to RESTARTS times, and go on from the last save.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads(processes)))
    lost = 0
    while True:
        with meeting_place() as (variables, descriptors):
            code, fate = launch_once(processes, variables, descriptors)
        if code != AGAIN:
            if not fate or lost == RESTARTS:
                return code
            lost += 1
            print(f"{fate}: restart {lost} of {RESTARTS}, from the last save", file=sys.stderr)
        os.environ["RUN_RESTARTS"] = "1"


def launch_once(
    processes: int, variables: dict[str, str], descriptors: tuple[int, ...]
) -> tuple[int, str]:
    """One attempt: the exit code, and what befell the first to fail if a new start may help.

    Not by torchrun's agent, which it otherwise does the same as: that listens on all networks,
    waits 30 s for a rank that hangs, and may lose a signal in an `except` of its own.
    """
    job = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # none: they meet in a file
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        **variables,
    }
    ranks: list[subprocess.Popen] = []

    def forward(number: int, _: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in obeyed()}
    try:
        for rank in range(processes):
            environment = os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *sys.orig_argv[1:]]
            # A session of its own: Ctrl-C reaches it through us alone, and so once.
            ranks.append(
                subprocess.Popen(  # noqa: S603 - our own command
                    command, env=environment, start_new_session=True, pass_fds=descriptors
                )
            )
        while (failed := first_failure(ranks)) is None:
            if all(process.returncode == 0 for process in ranks):
                return 0, ""
            time.sleep(POLL_SECONDS)
        end(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    code = ranks[failed].returncode
    if code >= 0:
        return code, "a rank was lost" if code == LOST else ""
    name = signal.Signals(-code).name
    memory = " (out of memory?)" if name == "SIGKILL" else ""
    return 128 - code, f"rank {failed} (process {ranks[failed].pid}) was ended by {name}{memory}"


@contextmanager
def meeting_place() -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """A block with a file in which ranks meet: the variables and descriptors that they need for it.

    It has no name, and is gone with the last process that has it open: one with a name would stay
    if all were killed at once. Nothing where only Linux can; then ranks make a file themselves.
    """
    if not (hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")):
        yield {}, ()
        return
    with os.fdopen(os.memfd_create("store"), "wb") as file:
        yield {STORE: str(file.fileno())}, (file.fileno(),)


def first_failure(ranks: list[subprocess.Popen]) -> int | None:
    """The number of a rank that has ended, and not well."""
    return next((rank for rank, process in enumerate(ranks) if process.poll()), None)


def end(ranks: list[subprocess.Popen]) -> None:
    """Tell the ranks to end, and let them say what they have to, if it does not take too long."""
    patience_ends = time.monotonic() + GRACE_SECONDS
    for process in ranks:
        process.terminate()
    while any(process.poll() is None for process in ranks) and time.monotonic() < patience_ends:
        time.sleep(POLL_SECONDS)
