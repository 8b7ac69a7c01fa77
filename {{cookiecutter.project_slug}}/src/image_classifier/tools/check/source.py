r"""The list of files that training leaves out; users may edit it.

    train/ant/4.jpg    truncated

Each line is a path below `data.root`, a tab, and a reason. Bytes that cannot be printed are escaped
as `\xff`, and a backslash as two.
"""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from ...config import DataConfig
from ...data import Source, cache_folder
from ...errors import UserError
from ...runtime.console import printable_path
from ...runtime.files import read_plain, write_text


def quarantine_path(data: DataConfig) -> Path:
    """The path of the list: in the dataset's cache; if there is none, as without `data.cache`."""
    path = cache_folder(data) / "quarantine.txt"
    with suppress(UserError):  # nothing lies beside the root of a disk
        usual = cache_folder(replace(data, cache="")) / path.name
        return usual if usual.exists() and not path.exists() else path
    return path


def read_quarantine(data: DataConfig) -> dict[bytes, str]:
    """Reasons by path below `data.root`; empty if there is no list.

    Raises:
        UserError: if the list is unreadable.
    """
    path = quarantine_path(data)
    try:
        text = read_plain(path).decode("utf-8-sig")  # Notepad writes a mark
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the list {str(path)!a}: {reason}") from error
    lines = (line.partition("\t") for line in text.split("\n") if line.strip())
    return {path_of(name.rstrip("\r")): reason.strip() for name, _, reason in lines}


def add_to_quarantine(data: DataConfig, reasons: dict[bytes, str]) -> None:
    """Add images to the list, by their paths below `data.root`; `UserError` if it can't be."""
    listed = read_quarantine(data) | reasons
    rows = (f"{printable_path(name)}\t{listed[name]}\n" for name in sorted(listed))
    save(quarantine_path(data), "".join(rows))


def save(path: Path, text: str) -> None:
    """Write a file whole, or raise `UserError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!a}: {error.strerror}") from error


def without_quarantine(source: Source, data: DataConfig, split: str) -> Source:
    """The images of `source` that are not on the list; a note says how many are left out.

    Raises:
        UserError: if the list is unreadable, or leaves out a whole training class or split.
    """
    listed = read_quarantine(data)
    if not listed or source.paths is None:
        return source
    paths = source.paths
    is_kept = [paths.from_folder(data.root, index) not in listed for index in range(len(paths))]
    kept = torch.tensor(is_kept).nonzero()[:, 0]
    if len(kept) == len(source):
        return source
    said = f"{len(source) - len(kept):,} {split} images are left out, as "
    said += f"{str(quarantine_path(data))!a} says"
    if not len(kept):
        raise UserError(f"there are no {split} images: {said}")
    left = source.picked(kept)
    gone = ((source.class_counts() > 0) & (left.class_counts() == 0)).nonzero()[:, 0]
    if len(gone) and split == "train":
        raise UserError(f"class {source.classes[gone[0]]!a} has no {split} images: {said}")
    return replace(left, notes=(*source.notes, said))


def path_of(text: str) -> bytes:
    r"""The path that `printable_path` shows as `text`."""
    return re.sub(
        rb"\\(?:x([0-9a-f]{2})|\\)",
        lambda found: bytes.fromhex(found[1].decode()) if found[1] else b"\\",
        text.encode(),
    )
