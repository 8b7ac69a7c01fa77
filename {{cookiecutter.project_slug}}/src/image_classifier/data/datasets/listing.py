"""What lies in folders: images, and what runs, tools and systems have left there."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ...errors import UserError
from ...runtime.console import printable
from ...runtime.launch import UNCLEARED
from ...runtime.run_dir import WRITTEN, WRITTEN_FOLDERS
from ..decode import SUFFIXES

NO_CLASS = ".no_class"  # a file that says: no image of a dataset lies in this folder
RUN_FILES = {b".lock", UNCLEARED.encode(), *(name.encode() for name in WRITTEN)}
RUN_FOLDERS = {name.encode() for name in WRITTEN_FOLDERS}
MARKS = (NO_CLASS.encode(), b".lock", b"status.json")  # of folders to look into more closely


def walk(top: bytes, others: Counter[str] | None = None) -> Iterator[bytes]:
    """The image files below `top`, sorted; a folder to which several links lead is entered once.

    Folders of runs and of heat maps are left out. `others` counts other files by their suffix.

    Raises:
        UserError: if a folder can't be listed.
    """
    above = Path(os.path.realpath(os.fsdecode(top))).parents  # to which no link leads back
    yield from enter(top, {*map(os.fsencode, above)}, Counter() if others is None else others)


def enter(top: bytes, seen: set[bytes], others: Counter[str]) -> Iterator[bytes]:
    """`walk`, but not into folders that were `seen`, each without links in its path."""
    folders, files = listing(top)
    if (place := os.path.realpath(top)) in seen:
        return
    seen.add(place)
    # A folder has the slash that follows it: so the order is that of whole paths.
    for name in sorted([*files, *(name + b"/" for name in folders)]):
        path = os.path.join(top, name)
        if name.endswith(b"/"):
            yield from enter(path[:-1], seen, others)
        elif has_suffix(name):
            yield path
        else:
            others[os.path.splitext(os.fsdecode(name))[1].lower()] += 1


def listing(folder: bytes) -> tuple[list[bytes], list[bytes]]:
    """The folders and the files in a folder, but not those that are junk or output of a run."""
    _, folders, files = next(os.walk(folder, onerror=fail), (folder, [], []))
    left = RUN_FOLDERS if is_run({*folders, *files}) else ()
    folders = [n for n in folders if not (is_junk(n) or n in left or is_output(folder, n))]
    return folders, [name for name in files if not name.startswith(b".")]


def class_folders(place: bytes) -> list[bytes]:
    """The folders in `place` that may be classes, sorted; bytes, as names need not be text."""
    folders, _ = listing(place)
    paths = {name: os.path.join(place, name) for name in sorted(folders)}
    return [name for name, path in paths.items() if any(walk(path)) or not holds_output(path)]


def fail(error: OSError) -> None:
    """Raise the error for a folder that can't be listed."""
    where = ascii(os.fsdecode(error.filename))
    raise UserError(f"cannot list folder {where}: {error.strerror}") from error


def is_run(names: set[bytes]) -> bool:
    """Whether a folder with these in it is that of a run; it is locked before all else."""
    return names == {b".lock"} or len(names & RUN_FILES) > 1


def is_output(folder: bytes, name: bytes) -> bool:
    """Whether `folder/name` is of a run, without images of a dataset, or of heat maps."""
    path = os.path.join(folder, name)
    if not any(os.path.lexists(os.path.join(path, mark)) for mark in MARKS):
        return False  # as nearly all: it need not be listed
    names = {*os.listdir(path)}
    return MARKS[0] in names or (is_run(names) and not any(map(has_suffix, names)))


def holds_output(path: bytes) -> bool:
    """Whether runs or a cache lie below a folder, or could."""
    return os.path.basename(path) in (b"runs", b"wandb") or any(
        any(is_output(top, name) for name in folders)
        or any(name.endswith(b".safetensors") or name == b"quarantine.txt" for name in files)
        for top, folders, files in os.walk(path)
    )


def has_suffix(path: bytes) -> bool:
    """Whether a file is called as an image is."""
    return os.fsdecode(path).lower().endswith(SUFFIXES)


def is_junk(name: bytes) -> bool:
    """Whether systems and tools left this folder behind: `.ipynb_checkpoints`, `__MACOSX`."""
    return name.startswith((b".", b"__", b"@eaDir"))


def show(name: bytes) -> str:
    """A file's name as text that can be printed and written anywhere, in one line."""
    return printable(name.decode("utf-8", "backslashreplace"))
