"""A command's work, in as many processes as it needs: started, watched, started again, reported.

Nothing here imports torch before the command line is parsed.
"""

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ..config import ComputeConfig, RunConfig
from ..errors import (
    EXIT_DONE,
    EXIT_FAULT,
    EXIT_OUT_OF_MEMORY,
    EXIT_PEER_LOST,
    FaultError,
    UserError,
    is_peer_failure,
)
from . import platform
from .console import printable
from .files import is_disk_full
from .signals import stop_signals

MAX_RESTARTS = 3  # of a job whose process was killed; each continues from the last checkpoint
POLL_SECONDS = 0.05  # between two looks at the ranks
GRACE_SECONDS = 15.0  # for the other ranks to end, after one has failed
BEGAN = "RUN_BEGAN"  # variable with the time of the first start, see `seconds_since_start`
UNCLEARED = ".uncleared"  # a file in a run folder: `--run.fresh` is to delete what lies there
STORE = "RUN_STORE"  # variable with the descriptor of the file in which our ranks meet
# Variables that tell that this is not the first start of a job: ours, torchrun's, SLURM's.
RESTART_COUNTS = ("RUN_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def run_in_processes(work: Callable[[], None], run: RunConfig, compute: ComputeConfig) -> int:
    """Do `work` in this process, or in as many as the config asks for; return the exit code.

    Raises:
        UserError: if a launcher has started another number of processes.
    """
    if is_launched():
        seconds_since_start()  # which begins here, where torchrun started this process
        sizes = {os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        if str(run.processes) not in {"auto", "1", *sizes}:
            raise UserError(f"--run.processes {run.processes} needs no launcher: unset RANK")
        return attempt(work)
    os.environ[BEGAN] = str(time.monotonic())
    print("importing PyTorch ...", flush=True)  # which takes seconds, or a minute from a cold disk
    processes = num_processes(run, compute)
    if processes > 1:
        return launch(processes)
    while (code := attempt(work)) == EXIT_OUT_OF_MEMORY:
        os.environ[RESTART_COUNTS[0]] = "1"
        gc.collect()  # the failed attempt may be in reference cycles, with all that it holds
        import torch

        torch.cuda.empty_cache()  # does nothing if no GPU is in use
    return code


def is_launched() -> bool:
    """Whether torchrun or `launch` started this process."""
    return "RANK" in os.environ


def end_in_group(code: int) -> None:
    """End this process with `code` if it failed in a process group, which `join_world` left alone.

    At once, as to free the group at the end of Python may wait for other ranks, too.
    """
    dist = sys.modules.get("torch.distributed")
    if code != EXIT_DONE and dist is not None and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def of_this_start(run: RunConfig) -> RunConfig:
    """`run`, of which `fresh` counts until a start of the job has deleted what was there before."""
    is_restart = any(os.environ.get(name, "0") != "0" for name in RESTART_COUNTS)
    is_cleared = not Path(run.dir, UNCLEARED).exists()
    return replace(run, fresh=run.fresh and not (is_restart and is_cleared))


def seconds_since_start() -> float:
    """How long ago the user started this command, or torchrun this process."""
    return time.monotonic() - float(os.environ.setdefault(BEGAN, str(time.monotonic())))


def num_processes(run: RunConfig, compute: ComputeConfig) -> int:
    """How many processes to start: as many as asked for, else one per GPU."""
    if run.processes != "auto":
        return run.processes
    import torch

    return max(1, torch.cuda.device_count()) if compute.device in ("auto", "cuda") else 1


def attempt(work: Callable[[], None]) -> int:
    """Do `work`, report what goes wrong, and return the exit code.

    Raises:
        UserError: as `work` does; the command line reports it.
    """
    import torch  # noqa: F401 - Ctrl-C in the midst of this import would end in a traceback

    platform.hold_ctrl_c(False)  # which `launch_once` has held
    rank = os.environ.get("RANK")
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # shows the Python line of a crash in C code, on standard error
    try:
        work()
    except FaultError as fault:
        if str(fault):  # empty where another rank reports it
            line = printable(str(fault))
            print(f"rank {rank}: {line}" if rank else line, file=sys.stderr)
        return fault.code
    except UserError:
        raise
    except Exception as error:
        failed = f"failed on rank {rank}" if rank else "failed"
        if is_peer_failure(error):
            time.sleep(GRACE_SECONDS)  # the rank that failed reports why, and this one is stopped
            failed += ": the connection to another rank is lost"
        elif is_disk_full(error):
            failed += f": {error}. What was saved is kept. Free some space, and run it again"
        else:
            failed = f"{traceback.format_exc()}\n{failed}"
        print(failed, file=sys.stderr)  # in one write: the reports of several ranks do not mix
        return EXIT_FAULT
    return EXIT_DONE


def launch(processes: int) -> int:
    """Run this command in `processes` processes; return the exit code of the first to fail.

    When one fails, the others are stopped. All start again from the last checkpoint if it ran out
    of memory (as often as it does), or was killed (MAX_RESTARTS times).
    """
    lost = 0
    while True:
        with meeting_place() as (variables, descriptors):
            code, cause = launch_once(processes, variables, descriptors)
        if code != EXIT_OUT_OF_MEMORY:
            if not cause or lost == MAX_RESTARTS:
                return code
            lost += 1
            print(f"{cause}: restart {lost} of {MAX_RESTARTS}, from the last save", file=sys.stderr)
        os.environ[RESTART_COUNTS[0]] = "1"


def launch_once(  # noqa: C901 - one attempt, from its start to its end
    processes: int, variables: dict[str, str], descriptors: tuple[int, ...]
) -> tuple[int, str]:
    """One attempt: the exit code, and the cause if a process was lost, so a restart may help.

    This replaces torchrun's agent, which listens on all networks, waits 30 s for a rank that hangs,
    and may lose a signal in an `except` of its own.
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
    signals: list[int] = []  # that we were sent

    def forward(number: int, _: FrameType | None) -> None:
        is_second = bool(signals) and number == signal.SIGINT  # a rank that hangs obeys none
        signals.append(number)
        for process in ranks:
            process.kill() if is_second else platform.send_signal(process, number)

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        for rank in range(processes):
            environment = os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *sys.orig_argv[1:]]
            # In a session of its own, so that Ctrl-C reaches it once: through `forward`. Until it
            # can report that in a line, in `attempt`, it lets the signal wait.
            platform.hold_ctrl_c(True)
            how = {"env": environment, "start_new_session": True, "pass_fds": descriptors}
            ranks.append(subprocess.Popen(command, **how))  # noqa: S603 - our own command
            for number in signals:  # that came before `forward` knew of it
                platform.send_signal(ranks[-1], number)
            platform.hold_ctrl_c(False)
        while not (failed := [process for process in ranks if process.poll()]):
            if all(process.returncode == 0 for process in ranks):
                return EXIT_DONE, ""
            time.sleep(POLL_SECONDS)
        end(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    code = failed[0].returncode
    if signals and (code < 0 or code in (EXIT_PEER_LOST, EXIT_OUT_OF_MEMORY)):  # they end the job
        return 128 + signals[0], ""
    if code >= 0:
        return code, "a rank was lost" if code == EXIT_PEER_LOST else ""
    name = signal.Signals(-code).name
    memory = " (out of memory?)" if name == "SIGKILL" else ""
    rank = ranks.index(failed[0])
    return 128 - code, f"rank {rank} (process {failed[0].pid}) was ended by {name}{memory}"


def end(ranks: list[subprocess.Popen]) -> None:
    """Ask the ranks to end, and give them time to report."""
    deadline = time.monotonic() + GRACE_SECONDS
    for process in ranks:
        process.terminate()
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@contextmanager
def meeting_place() -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """A file in which ranks meet: the variables and the descriptors that they need for it.

    It has no name, so it goes with the last process that has it open, even if all are killed at
    once. Only Linux can do that; elsewhere this is empty and the ranks make a file themselves.
    """
    if not platform.HAS_NAMELESS_FILES:
        yield {}, ()
        return
    with os.fdopen(os.memfd_create("store"), "wb") as file:
        yield {STORE: str(file.fileno())}, (file.fileno(),)
