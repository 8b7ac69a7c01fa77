"""Files as others may have left them: opened without waiting, read for what is sound there."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read.

    Raises:
        OSError: if that fails, or if it is a pipe or a device, of which some never end.
    """
    file = open(path, "rb", opener=open_at_once)  # noqa: SIM115 - the caller's to close
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file", os.fspath(path))
    return file


def open_at_once(path: str, flags: int) -> int:
    """`os.open`, which does not wait for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is anything else in it.

    Raises:
        OSError: if it can't be read.
    """
    with open_plain(path) as file:
        return parse_object(file.read())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file that has one in each line; other lines are left out.

    A kill may have cut the last one short.

    Raises:
        OSError: if it can't be read.
    """
    with open_plain(path) as file:
        return [row for line in file if (row := parse_object(line))]


def parse_object(text: bytes) -> dict[str, Any]:
    """The object that JSON stands for; empty if it is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
