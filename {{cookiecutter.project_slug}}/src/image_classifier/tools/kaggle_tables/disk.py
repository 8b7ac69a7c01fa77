"""Files as they are called on the disk.

A table may leave out `.jpg`, have the backslashes of Windows, or letters in another Unicode form,
as those of a Mac are: where only one file differs in that alone, it is the one.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from unicodedata import normalize

from ...config import DataConfig
from ...data import has_suffix

MOST_FOLDERS = 64  # whose names are kept


def on_disk(path: bytes, root: bytes) -> bytes:
    """The path of the one file that `path` means, or `path` itself if there is none."""
    if path.isascii() and b"\\" not in path and has_suffix(path):
        return path
    if os.path.isfile(os.path.join(root, path)):
        return path
    start, place = (b"/", b"/") if path.startswith(b"/") else (b"", root)
    parts = path.strip().strip(b"/").replace(b"\\", b"/").split(b"/")
    found = like(place, parts, is_same)
    return start + found[0] if len(found) == 1 else path


def like(
    place: bytes, parts: list[bytes], are_alike: Callable[[bytes, bytes], bool]
) -> list[bytes]:
    """The paths below `place` whose names are like these parts."""
    part, *rest = parts
    found = [part]
    if not rest or not os.path.isdir(os.path.join(place, part)):
        found = [name for name in names_in(place).get(loose(part), []) if are_alike(name, part)]
    if not rest:
        return found
    below = [(name, like(os.path.join(place, name), rest, are_alike)) for name in found]
    return [os.path.join(name, other) for name, others in below for other in others]


def is_same(name: bytes, part: bytes) -> bool:
    """Whether a name is `part`, or is with its suffix, whatever the Unicode form of its letters."""
    own = normalize("NFC", os.fsdecode(part))
    return own in (normalize("NFC", os.fsdecode(other)) for other in (name, stem(name)))


def stem(name: bytes) -> bytes:
    """The name of an image without its suffix."""
    return os.path.splitext(name)[0] if has_suffix(name) else name


def loose(name: bytes) -> str:
    """A name without suffix, case, spaces around it, and Unicode form."""
    return normalize("NFKC", os.fsdecode(stem(name))).casefold().strip()


def names_in(folder: bytes) -> dict[str, list[bytes]]:
    """The names in a folder, by what `loose` leaves of them."""
    with suppress(OSError):
        return listed(folder, os.stat(folder).st_mtime_ns)
    return {}


@lru_cache(MOST_FOLDERS)
def listed(folder: bytes, _: int) -> dict[str, list[bytes]]:
    """`names_in`, of a folder that has not changed since."""
    names: dict[str, list[bytes]] = {}
    for name in sorted(os.listdir(folder)):
        names.setdefault(loose(name), []).append(name)
    return names


def hint_at(path: bytes, data: DataConfig, table: Path) -> str:
    """Where a missing file may be: a name like it, or another `data.root`."""
    rule = "paths are absolute or from --data.root"
    if os.path.isabs(path):
        return rule
    root = Path(data.root)
    if near := like(os.fsencode(root), path.split(b"/"), lambda *_: True):
        return f"is it {' or '.join(ascii(os.fsdecode(other)) for other in near[:3])}?"
    folders: list[Path] = []
    with suppress(OSError):
        folders += sorted(place for place in root.iterdir() if place.is_dir())
    for place in (table.parent, Path(), root.parent, *folders):
        below = os.path.join(os.fsencode(place), b"")
        if os.path.isfile(os.path.join(below, on_disk(path, below))):
            return f"it is below {str(place)!a}: --data.root {str(place)!a}"
    return rule
