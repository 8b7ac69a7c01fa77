"""The run folder: made, checked and locked before any work; and what its environment is."""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TextIO

import torch

from ..config import Config
from ..errors import UserError
from .distributed import World
from .files import lock_file, remove_leftovers
from .launch import UNCLEARED
from .machine import device_name, proc

BAD_IMAGES = "bad_images.txt"  # whoever opens images adds to it
# What a run writes and `--run.fresh` deletes.
WRITTEN = ("metrics.jsonl", "config.json", "environment.json", "status.json", "report.html")
WRITTEN += ("micro_batch.json", "heartbeats", "predictions.safetensors")
WRITTEN += ("probe.safetensors", "late.safetensors", "test.json", "mlflow.id", BAD_IMAGES)
WRITTEN_FOLDERS = ("checkpoints", "tensorboard", "wandb", "trackio", "profile", "memory", "ray")
LIBRARIES = ("numpy", "pillow", "simplejpeg", "torchvision")  # by which images are decoded


@contextmanager
def open_run(config: Config, world: World) -> Iterator[None]:
    """A block in which the run folder exists, can be written, and is locked by this run.

    Each machine has one, which may be the same; rank 0 locks its own. If it raises before it wrote
    anything, it leaves no folder behind.

    Raises:
        UserError: if the folder can't be written, or another run is at work in it.
    """
    if world.local_rank > 0:
        yield
        return
    folder = Path(config.run.dir)
    places = (folder, *folder.parents) if world.is_main else ()
    made = [place for place in places if not place.exists()]
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if world.is_main:
                lock = (folder / ".lock").open("a+", errors="backslashreplace")
                hold(stack.enter_context(lock), folder)
            if config.run.fresh:
                (folder / BAD_IMAGES).unlink(missing_ok=True)  # before images are opened
                (folder / UNCLEARED).touch()
        except OSError as error:
            remove_unused(made)
            raise UserError(
                f"cannot write to the run folder {str(folder)!a}: {error.strerror}; "
                "set --run.dir to a folder that can be written"
            ) from error
        try:
            yield
        except BaseException:
            remove_unused(made)  # while it is locked: nobody else starts in it
            raise


def best_checkpoint(run: str) -> Path:
    """The checkpoint with the best weights of a run folder, or the one that is named itself."""
    return Path(run, "checkpoints", "best.pt") if Path(run).is_dir() else Path(run)


def remove_unused(made: list[Path]) -> None:
    """Remove folders, the innermost first, that hold nothing but the lock of a run."""
    for folder in made:
        with suppress(OSError):  # something else lies in it
            if {path.name for path in folder.iterdir()} <= {".lock", UNCLEARED}:
                (folder / UNCLEARED).unlink(missing_ok=True)
                (folder / ".lock").unlink(missing_ok=True)
            folder.rmdir()


def hold(lock: TextIO, folder: Path) -> None:
    """Lock a run folder until `lock` is closed or this process ends, and write who holds it."""
    lock.seek(0)
    is_taken = (
        f"{str(folder)!a} is in use by another run ({lock.read().strip() or 'unnamed'}); "
        "take another --run.dir, or end that run first"
    )
    if lock_file(lock, is_taken):
        remove_leftovers(folder / "checkpoints")
        for name in WRITTEN:
            remove_leftovers(folder, name)
    else:
        print(f"warning: {folder} can't be locked: start no second run in it")
    lock.truncate(0)
    # Not by the file's buffer, which would fail again when it is closed on a full disk.
    os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def clear_run(folder: Path, world: World) -> None:
    """Delete what an earlier run wrote, and nothing else that may lie there."""
    if world.local_rank == 0:
        for name in {*WRITTEN} - {BAD_IMAGES}:
            (folder / name).unlink(missing_ok=True)
        for name in WRITTEN_FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
    world.all_true(True)  # nobody reads from the folder before it is empty
    (folder / UNCLEARED).unlink(missing_ok=True)


def environment(world: World) -> dict[str, Any]:
    """What the result may depend on beside the config: versions, device, state of the code."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: next((d.version for d in distributions(name=name)), None) for name in LIBRARIES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": proc("driver/nvidia/version").partition("\n")[0],
        "platform": platform.platform(),
        "device": device_name(world.device),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "commit": git("rev-parse", "HEAD"),
        "changed": git("status", "--porcelain", "--untracked-files=no"),
    }


def git(*command: str) -> str | None:
    """What git says about the code that runs, or None without a repository."""
    try:
        return subprocess.check_output(  # noqa: S603 - our own words, and no shell
            # It may not refresh its index: killed while it does, it would leave it locked.
            ["git", "--no-optional-locks", *command],  # noqa: S607 - wherever the user has it
            cwd=Path(__file__).parent,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=5,
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None
