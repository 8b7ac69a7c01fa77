"""The files that a table names, as they are called on the disk.

A table may leave out `.jpg`, have the backslashes of Windows, or letters in another Unicode form,
as those of a Mac are: where only one file differs in that alone, it is the one.
"""

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from unicodedata import normalize

from ...config import DataConfig
from ...data import has_suffix

MOST_FOLDERS = 64  # whose names are kept


def root_of(data: DataConfig) -> bytes:
    """What absolute paths below `data.root` begin with."""
    return os.path.join(os.fsencode(os.path.abspath(data.root)), b"")


def path_of(cell: object, root: bytes) -> bytes:
    """The path of an image, as a folder has it: from `root`, if it is below that.

    Raises:
        ValueError: if it can't be a path.
    """
    is_number = isinstance(cell, int) and not isinstance(cell, bool)
    path = os.fsencode(str(cell) if is_number else cell if isinstance(cell, str) else b"")
    if not path or b"\0" in path:
        raise ValueError
    if b"./" in path or b"//" in path:
        path = os.path.normpath(path)
    path = path.removeprefix(root)
    if path.isascii() and b"\\" not in path and has_suffix(path):
        return path
    found = on_disk(path, root)
    if is_number and found == path:
        raise ValueError
    return found


def on_disk(path: bytes, root: bytes) -> bytes:
    """The path of the one file that `path` means, or `path` itself if there is none."""
    if os.path.isfile(os.path.join(root, path)):
        return path
    place, found = (b"/", b"/") if path.startswith(b"/") else (root, b"")
    *folders, name = path.strip().strip(b"/").replace(b"\\", b"/").split(b"/")
    for part in folders:
        own: bytes | None = part
        if not os.path.isdir(os.path.join(place, part)):
            own = names_in(place)[0].get(key_of(part))
        if not own:
            return path
        place = os.path.join(place, own)
        found = os.path.join(found, own)
    whole, stems = names_in(place)
    own = whole.get(key_of(name)) if has_suffix(name) else stems.get(key_of(name))
    return os.path.join(found, own) if own else path


def key_of(name: bytes) -> str:
    """What is equal for names that look alike, whatever the Unicode form of their letters."""
    return normalize("NFC", os.fsdecode(name))


def names_in(folder: bytes) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The names in a folder by their keys, and those of images by their keys without a suffix."""
    with suppress(OSError):
        return listed(folder, os.stat(folder).st_mtime_ns)
    return {}, {}


@lru_cache(MOST_FOLDERS)
def listed(folder: bytes, _: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """`names_in`, of a folder that has not changed since."""
    names = sorted(os.listdir(folder))
    stems: dict[str, bytes] = {}
    for name in filter(has_suffix, names):
        stem = key_of(os.path.splitext(name)[0])
        stems[stem] = b"" if stem in stems else name  # of two files, none is certain
    return {key_of(name): name for name in names}, stems


def hint_at(path: bytes, data: DataConfig, table: Path) -> str:
    """Where a missing file may be: a name like it, or another `data.root`."""
    root = Path(data.root)
    near = [] if os.path.isabs(path) else like(os.fsencode(root), path.split(b"/"))
    if near:
        return f"is it {' or '.join(ascii(os.fsdecode(other)) for other in near[:3])}?"
    folders: list[Path] = []
    with suppress(OSError), os.scandir(root) as entries:
        folders += sorted(Path(entry) for entry in entries if entry.is_dir())
    for place in (table.parent, Path(), root.parent, *folders):
        below = on_disk(path, os.path.join(os.fsencode(place), b""))
        if not os.path.isabs(path) and os.path.isfile(os.path.join(os.fsencode(place), below)):
            return f"it is below {str(place)!a}: --data.root {str(place)!a}"
    return "paths are absolute or from --data.root"


def like(place: bytes, parts: list[bytes]) -> list[bytes]:
    """The paths below `place` like one of these parts."""
    names = names_in(place)[0].values()
    found = [name for name in names if loose(name) == loose(parts[0].strip())]
    if not parts[1:]:
        return found
    below = [(name, like(os.path.join(place, name), parts[1:])) for name in found]
    return [name + b"/" + rest for name, others in below for rest in others]


def loose(name: bytes) -> str:
    """A name without suffix, case and Unicode form."""
    stem, suffix = os.path.splitext(name)
    return normalize("NFKC", os.fsdecode(stem if has_suffix(name) else stem + suffix)).casefold()
