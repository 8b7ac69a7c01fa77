"""Disks that are full or can't be written."""

import os
import subprocess
from pathlib import Path

from image_classifier import checkpoint
from image_classifier.config import Config
from image_classifier.errors import FaultError
from image_classifier.models import read_checkpoint

from .children import expect, fork, read_rows, small, status, train, train_whole, wait
from .table import NotHereError

SIZE = "3m"  # of the disk; a checkpoint has 0.9 MB


def full(scratch: Path, tries: int) -> str:
    """Train on a disk that has space for two checkpoints or three, and keep all of them."""
    if os.geteuid():
        raise NotHereError("needs root, to mount a disk")
    for number in range(tries):
        disk = scratch / str(number)
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(disk)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            raise NotHereError("no disk can be mounted")
        try:
            fill(disk)
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
    return (
        "the run ended with exit code 1 at the first save that failed; every file is "
        "whole; with space again, the same command ended it"
    )


def fill(disk: Path) -> None:
    """Train until the disk is full, and on when it is not any more."""
    knobs = {"epochs": 4, "run__log_every_steps": 1}
    checkpoint.KEEP = 100
    config = small(disk / "run", run__evaluate_every_epochs=1, **knobs)
    code = wait(fork(fail_by_itself, config))
    expect(code == 0, f"it ended with {code}, and not for want of space")
    folder = Path(config.run.dir)
    kept = sorted(folder.glob("checkpoints/*.pt"))
    expect(len(kept) > 1, "nothing was saved")
    for path in kept:
        read_checkpoint(path)
    expect(not list(folder.glob("checkpoints/.*")), "half a file is left")
    (folder / "checkpoints" / "step_00000020.pt").unlink()  # somebody makes space
    checkpoint.KEEP = 1
    train_whole(small(disk / "run", run__evaluate_every_epochs=1, **knobs))
    expect(status(folder)["state"] == "done", "it did not go on")
    steps = [row["step"] for row in read_rows(folder / "metrics.jsonl") if "train/loss" in row]
    expect(steps == list(range(1, 41)), f"rows are missing: {steps}")


def fail_by_itself(config: Config) -> None:
    """Train, and expect to be told that a save failed."""
    try:
        train(config)
    except FaultError:
        return
    raise AssertionError("the disk was not full")
