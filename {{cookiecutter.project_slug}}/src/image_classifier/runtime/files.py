"""Files: written whole or not at all, locked, and read as others may have left them."""

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from ..errors import UserError
from . import platform

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a file that appears under its name once all of it is on the disk."""
    temporary = unfinished(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the data before the name
        temporary.replace(path)
        sync_folder(path.parent)  # and the name itself
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and is_disk_full(error):  # torch raises its own after it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def unfinished(path: Path) -> Path:
    """A temporary name for what becomes `path`; no other process chooses the same."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(folder: Path, pattern: str = "*") -> None:
    """Remove `unfinished` files of killed processes whose names match `pattern`.

    Only for the holder of a lock, so that no living process is at work there.
    """
    for path in folder.glob(f".{pattern}.????????.tmp"):
        path.unlink(missing_ok=True)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk caused `error`; torch raises another one after it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return True
        error = error.__context__
    return False


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, where the system can."""
    with suppress(OSError):  # folders may be unreadable, or not be synced on their own
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    r"""Write a text file whole. Bytes of paths that are no UTF-8 are shown as `\udcff`."""
    write_whole(path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole; in ASCII, as names can hold anything."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def append_lines(path: Path, lines: list[str]) -> None:
    """Append lines to a file."""
    with path.open("a", encoding="ascii") as file:
        file.writelines(line + "\n" for line in lines)


def forget_rows_after(path: Path, step: int) -> None:
    """Drop JSON rows of steps after the last save of a killed run: it makes those steps again."""
    if not path.exists():
        return
    rows = (row for row in read_rows(path) if isinstance(row.get("step"), int | float))
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))


def give_name(path: Path, name: Path) -> None:
    """Make `name` a hard link to the file `path`; it replaces what had that name."""
    temporary = unfinished(name)
    try:
        temporary.hardlink_to(path)
    except OSError:  # a file system without links
        with path.open("rb") as file:
            write_whole(name, lambda copy: shutil.copyfileobj(file, copy))
        return
    temporary.replace(name)
    sync_folder(name.parent)


def lock_file(file: IO, is_taken: str) -> bool:
    """Lock `file` until it is closed or this process ends; False where there are no locks.

    Raises:
        UserError: `is_taken`, if another process holds the lock.
    """
    try:
        platform.lock(file)
    except (BlockingIOError, PermissionError):
        raise UserError(is_taken) from None
    except OSError:  # some file systems on a network
        return False
    return True


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read; OSError if it is a pipe or a device, some of which never end."""
    # Without waiting for the other end of a pipe.
    opener = lambda name, flags: os.open(name, flags | platform.NO_WAIT)  # noqa: E731
    file = open(path, "rb", opener=opener)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file", os.fspath(path))
    return file


def read_plain(path: Path) -> bytes:
    """The content of a file; OSError if it can't be read, or is a pipe or a device."""
    with open_plain(path) as file:
        return file.read()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it holds anything else; OSError if it can't be read."""
    return parse_object(read_plain(path))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON objects, one per line, in a file; skips others; OSError if it can't be read."""
    with open_plain(path) as file:
        return [row for line in file if (row := parse_object(line))]


def tensor_file(tensors: dict[str, Any], about: dict[str, Any]) -> bytes:
    """The content of a safetensors file, with JSON of what the tensors are in the key `about`.

    The library writes several keys in an order of chance: files of equal runs would differ.
    """
    from safetensors.torch import save

    return save(tensors, {"about": json.dumps(about, sort_keys=True)})


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file to read from; OSError or SafetensorError if it can't be read."""
    from safetensors import safe_open

    with open_plain(path) as file:
        name = os.fsencode(path)
        is_text = name.decode(errors="ignore").encode() == name  # the library opens no other names
        with safe_open(path if is_text else f"/dev/fd/{file.fileno()}", "pt") as tensors:
            yield tensors


def about_tensors(metadata: dict[str, str] | None, *old: str) -> dict[str, Any]:
    """What `tensor_file` says of its tensors, from the metadata of a file; empty if it has none.

    Older files had a key for each thing: those called as `old` held JSON, the others text.
    """
    keys = metadata or {}
    parsed = {name: json.loads(keys[name]) for name in old if name in keys}
    return parse_object(keys.get("about", "")) or keys | parsed


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in `text`; empty if it is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
