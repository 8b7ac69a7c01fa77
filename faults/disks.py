"""Disks that are full or can't be written."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from image_classifier.checkpoints import saving as checkpoint
from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import Config
from image_classifier.errors import FaultError

from .children import (
    FAST,
    Command,
    assert_same_end,
    expect,
    fork,
    read_rows,
    small,
    status,
    train,
    train_whole,
    wait,
)
from .table import NotHereError

SIZE = "3m"  # of the disk; a checkpoint has 0.9 MB
SHARDED = f"{FAST} --compute.parallel fsdp --epochs 4 --data.limit 160 --data.batch-size 16"
SHARDED += " --run.log-every-steps 1 --run.evaluate-every-epochs 1 --run.dir {folder}"


def full(scratch: Path, tries: int) -> str:
    """Train on a disk that has space for two checkpoints or three, and keep all of them."""
    on_small_disks(scratch, tries, fill)
    return (
        "the run ended with exit code 1 at the first save that failed; every file is "
        "whole; with space again, the same command ended it"
    )


def sharded(scratch: Path, tries: int) -> str:
    """Train by FSDP on such a disk: each rank writes its part, and one finds no space."""
    unbroken = Command(SHARDED.format(folder="run"), scratch / "unbroken")
    expect(unbroken.wait() == 0, f"the unbroken run failed: {unbroken.said[-300:]}")

    def fill_sharded(disk: Path) -> None:
        words = SHARDED.format(folder=disk / "run")
        command = Command(words, scratch / f"of {disk.name}")
        code = command.wait()
        expect(code == 1, f"it ended with {code}")
        for rank in (0, 1):
            said = f"rank {rank}: cannot save step 30 in "
            expect(said in command.said, f"not said: {said}")
        expect("no space left; that of step 20 is kept" in command.said, "what is kept is not said")
        subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
        expect(Command(words, command.cwd).wait() == 0, "it did not go on")
        assert_same_end(disk / "run", unbroken.cwd / "run")

    on_small_disks(scratch, tries, fill_sharded)
    return (
        "both ranks named the step that was not saved and the one that is kept; with space again, "
        "the same command ended as the unbroken run, to the last bit"
    )


def on_small_disks(scratch: Path, tries: int, inject: Callable[[Path], None]) -> None:
    """Mount a disk of `SIZE`, as often as asked, for `inject` to fill."""
    if os.geteuid():
        raise NotHereError("needs root, to mount a disk")
    for number in range(tries):
        disk = scratch / str(number)
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(disk)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            raise NotHereError("no disk can be mounted")
        try:
            inject(disk)
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


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
