"""Ordinary runs in processes of their own, for tools that need several."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from ...runtime.console import printable
from ...runtime.files import lock_file

# What tells a process that it is a rank or an attempt of another run.
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RUN_", "TORCHELASTIC_")
# A run whose parent dies gets SIGTERM and saves. Its ranks, started with the same words, have RANK.
PROGRAM = """
import os, signal, sys
from {package}.cli import main
from {package}.runtime.platform import end_with_parent
end_with_parent(signal.SIGTERM)
if "RANK" not in os.environ and os.getppid() != {parent}:
    sys.exit(1)
sys.exit(main())
"""
POLL_SECONDS = 0.1  # between two looks at a run


def start_run(words: Sequence[str], output: Path, **variables: str) -> subprocess.Popen:
    """Start `train` with these words: a preset and flags, `--run.dir` among them.

    What it prints is added to the file `output`; `variables` are added to its environment. It runs
    in a session of its own, so a Ctrl-C in the terminal reaches only the tool.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)} | variables
    paths = [str(Path(__file__).parents[3]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    program = PROGRAM.format(package=__name__.partition(".")[0], parent=os.getpid())
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        return subprocess.Popen(  # noqa: S603 - our own command, and no shell
            [sys.executable, "-c", program, "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def wait_until_free(folder: Path, seconds: float) -> bool:
    """Wait until no run is at work in a folder, as one that saves after its parent was killed.

    Whether none is; after `seconds` one may be.
    """
    latest = time.monotonic() + seconds
    while (folder / ".lock").exists() and time.monotonic() < latest:
        with (folder / ".lock").open("a+") as lock, suppress(UserError):
            lock_file(lock, "in use")
            return True
        time.sleep(POLL_SECONDS)
    return not (folder / ".lock").exists()


def end_run(process: subprocess.Popen, seconds: float) -> int:
    """Ask a run to save and end, kill it after `seconds`, and return its exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def last_line(output: Path) -> str:
    """The last line in the file `output` that says anything: below a traceback stands `failed`."""
    lines = output.read_text("utf-8", "replace").split("\n")
    said = [line for line in lines if not re.fullmatch(r"\s*(failed( on rank \d+)?)?\s*", line)]
    return printable(said[-1].strip()) if said else "it printed nothing"
