"""The files that a table names."""

import os

from ...config import DataConfig


def root_of(data: DataConfig) -> bytes:
    """What absolute paths below `data.root` begin with."""
    return os.path.join(os.fsencode(os.path.abspath(data.root)), b"")


def path_of(cell: str, root: bytes) -> bytes:
    """The path of an image, as a folder has it: from `root`, if it is below that.

    It is empty for a cell that can't be a path.
    """
    try:
        path = os.fsencode(cell)
    except UnicodeEncodeError:
        return b""
    if not path or b"\0" in path:
        return b""
    if b"./" in path or b"//" in path:
        path = os.path.normpath(path)
    return path.removeprefix(root)
