"""The run folder: made and found writable before any work, and never seen half written."""

import contextlib
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

import torch

from ..config import Config, UserError
from .distributed import World
from .files import read_rows
from .machine import device_name

# All that a run writes, and so all that `--run.fresh` deletes.
WRITTEN = ("metrics.jsonl", "config.json", "environment.json", "status.json", "report.html")
WRITTEN += ("micro_batch.json", "nonfinite.jsonl", "heartbeats", "bad_images.txt")
WRITTEN += ("predictions.safetensors",)
WRITTEN_FOLDERS = ("checkpoints", "tensorboard", "wandb", "trackio", "profile")

SECRET = re.compile("token|secret|passw|api[-_]?key|credential", re.IGNORECASE)
USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")


@contextmanager
def open_run(config: Config, world: World) -> Iterator[None]:
    """A block in which the run folder is this run's alone: there, and found writable.

    A block that ends by an exception before it wrote anything leaves no folder behind.

    Raises:
        UserError: if it can't be written, or another run is at work in it.
    """
    if not world.is_main:
        yield
        return
    folder = Path(config.run.dir)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / ".writable", None)
        (folder / ".writable").unlink()
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        remove_unused(made)
        raise UserError(
            f"cannot write to the run folder {str(folder)!a}: {error.strerror}; "
            "set --run.dir to a folder that can be written"
        ) from error
    with lock:
        take(lock, folder)
        try:
            yield
        except BaseException:
            remove_unused(made)  # as long as it is locked: nobody else begins in it
            raise


def remove_unused(made: list[Path]) -> None:
    """Remove folders, the innermost first, as far as they hold nothing but the lock of a run."""
    for folder in made:
        with contextlib.suppress(OSError):  # something else lies in it
            if [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
            folder.rmdir()


def take(lock: TextIO, folder: Path) -> None:
    """Lock a run folder until `lock` is closed, or this process has ended in whatever way.

    A lock of POSIX, as a data worker, which is forked, would go on to hold one of `flock`. Of a
    dead process only the words are left, and they are replaced.

    Raises:
        UserError: if a living process holds it, naming that.
    """
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise UserError(
            f"{str(folder)!a} is in use by another run ({lock.read().strip() or 'unnamed'}); "
            "take another --run.dir, or end that run first"
        ) from None
    except OSError as error:  # some file systems on a network have no locks
        print(f"{folder} can't be locked ({error.strerror}): start no second run in it")
    else:
        remove_leftovers(folder / "checkpoints")
        for name in WRITTEN:
            remove_leftovers(folder, name)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def clear_run(folder: Path, world: World) -> None:
    """Delete what an earlier run wrote, and nothing else that may lie there."""
    if world.is_main:
        for name in WRITTEN:
            (folder / name).unlink(missing_ok=True)
        for name in WRITTEN_FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
    world.all_true(True)  # nobody reads from the folder before it is empty


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a file that appears under its name when all of it is on the disk."""
    temporary = unfinished(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the data before the name
        temporary.replace(path)
        sync_folder(path.parent)  # and the name itself
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """A name for what is to be `path`, which no other process takes for the same."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(folder: Path, pattern: str = "*") -> None:
    """Remove what was `unfinished` when a process was killed, of files that match `pattern`.

    Only for who holds a lock, so that no living process is at work there.
    """
    for path in folder.glob(f".{pattern}.????????.tmp"):
        path.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """A file of JSON; in ASCII, as names can hold anything."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    r"""A file of text. A path in it may hold bytes that are none: they are shown as `\udcff`."""
    content = text.encode("utf-8", "backslashreplace")
    write_whole(path, lambda file: file.write(content))


def append_lines(path: Path, lines: list[str]) -> None:
    """Add lines to a file."""
    with path.open("a", encoding="ascii") as file:
        file.writelines(line + "\n" for line in lines)


def forget_rows_after(path: Path, step: int) -> None:
    """Drop rows of JSON that a killed run wrote after its last save: it makes their steps again."""
    if not path.exists():
        return
    rows = (row for row in read_rows(path) if isinstance(row.get("step"), int | float))
    kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
    write_whole(path, lambda file: file.write(kept.encode()))


def give_name(path: Path, name: Path) -> None:
    """Make `name` another name of the file `path`, in place of what it named; no data is copied."""
    temporary = unfinished(name)
    try:
        temporary.hardlink_to(path)
    except OSError:  # a file system without links
        with path.open("rb") as file:
            write_whole(name, lambda copy: shutil.copyfileobj(file, copy))
        return
    temporary.replace(name)
    sync_folder(name.parent)


def lock_file(file: IO | int, is_taken: str) -> bool:
    """Let no other process lock `file` until it is closed, here and in what is forked from here.

    It may be the descriptor of a folder. False where the file system has no locks, as some on a
    network: then nobody knows who else is at work.

    Raises:
        UserError: saying `is_taken`, if another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(is_taken) from None
    except OSError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, where the system can."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def environment(world: World) -> dict[str, Any]:
    """What the result may depend on beside the config: versions, device and state of the code."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "platform": platform.platform(),
        "device": device_name(world.device),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "command": without_secrets(sys.argv),
        "commit": git("rev-parse", "HEAD"),
        "changed": git("status", "--porcelain", "--untracked-files=no"),
    }


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with `***` for the values of flags such as `--api-key`, and in URLs."""
    shown: list[str] = []
    is_secret = False
    for word in words:
        flag, equals, _ = word.partition("=")
        names_secret = flag.startswith("-") and SECRET.search(flag)
        if names_secret and equals:
            shown.append(f"{flag}=***")
        elif is_secret and not flag.startswith("-"):
            shown.append("***")
        else:
            shown.append(USER_OF_URL.sub("***@", word))
        is_secret = bool(names_secret and not equals)
    return shown


def git(*command: str) -> str | None:
    """What git says of the code that runs, or None where there is no repository."""
    try:
        where = Path(__file__).parent
        answer = subprocess.run(  # noqa: S603 - our own words, and no shell
            # It may not refresh its index: killed on the way, it would leave it locked.
            ["git", "--no-optional-locks", *command],  # noqa: S607 - wherever the user has it
            cwd=where,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
