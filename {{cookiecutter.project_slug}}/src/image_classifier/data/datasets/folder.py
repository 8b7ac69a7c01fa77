"""Your own images: `root/{train,val[,test]}/<class>/`, or `root/<class>/` split by file name."""

import hashlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from ...config import DataConfig
from ...errors import UserError
from ...runtime.console import printable
from ..decode import SUFFIXES
from .paths import PathList
from .source import Source

VAL_NAMES = ("val", "valid", "validation")
PART_NAMES = ("training", "test", "testing", *VAL_NAMES)  # of a dataset, as nobody calls a class


def folder(data: DataConfig, split: str) -> Source:
    """The images below `data.root`; the folders in it, or in its `train`, are the classes.

    Without a folder `val`, a hash of each training image's name decides whether it is for
    validation: so images that are added never move the others. Each image is for validation in
    one `data.fold`.

    Raises:
        UserError: if folders are missing or empty, or the splits' classes differ.
    """
    root = Path(data.root)
    if not root.is_dir():
        raise UserError(f"--data.root {data.root!a}: there is no such folder")
    train, parts = root / "train", [name for name in VAL_NAMES if (root / name).is_dir()]
    val = val_part(parts, data, f"; --data.root {str(train)!a} divides the others")
    # The folder of the split alone.
    own = {"train": None, "val": val and root / val, "test": root / "test"}[split]
    if not train.is_dir():
        train = own if own is not None and own.is_dir() else undivided(root)
    classes = class_folders(train)
    place = own or train
    if place != train:
        check_classes(place, train, classes)
    is_divided = own is None and val is None
    paths: list[bytes] = []
    labels: list[int] = []
    empty = []
    for label, name in enumerate(classes):
        found = images_of(place, name)
        if is_divided:
            found = [p for p in found if is_val(p, data) == (split == "val")]
        if not found:
            empty.append(show(name))
        paths += found
        labels += [label] * len(found)
    if empty and (split == "train" or not paths):
        raise UserError(
            f"class {empty[0]!r} has no images for {split} in {str(place)!a}: "
            "add some, or remove the folder"
        )
    notes = []
    if is_divided:
        notes.append(f"split by file name: {len(paths)} images for {split}")
    if empty:
        notes.append(f"no {split} images of: {', '.join(empty)}")
    return Source(
        labels=torch.tensor(labels, dtype=torch.int64),
        classes=tuple(show(name) for name in classes),
        paths=PathList(place, paths),
        notes=tuple(notes),
    )


def val_part(parts: Collection[str], data: DataConfig, hint: str = "") -> str | None:
    """Which of the `parts` of a dataset has its validation images; None: the folds of `train` do.

    Raises:
        UserError: if one has, and `data.fold` is not the first; it ends with `hint`.
    """
    val = next((name for name in VAL_NAMES if name in parts), None)
    if val and data.fold:
        raise UserError(
            f"--data.fold {data.fold}: {data.labels or data.root!a} has validation images of its "
            f"own, in {val!r}{hint}"
        )
    return val


def check_classes(place: Path, train: Path, classes: list[bytes]) -> None:
    """Raise `UserError` unless `place` is there and its classes are among `classes` of `train`."""
    if not place.is_dir():
        raise UserError(f"{str(place.parent)!a} has no folder {place.name!r}")
    if unknown := sorted(set(class_folders(place)) - set(classes)):
        names = ", ".join(repr(show(name)) for name in unknown[:5])
        raise UserError(f"{str(place)!a} has classes that {str(train)!a} has not: {names}")


def images_of(place: Path, name: bytes) -> list[bytes]:
    """The image files below `place/name`, from `place`, sorted; none without such a folder."""
    top = os.path.join(os.fsencode(place), name)
    skip = len(top) - len(name)
    found = walk(top) if os.path.isdir(top) else ()
    return [path[skip:].replace(os.fsencode(os.sep), b"/") for path in found]  # as on Linux


def undivided(root: Path) -> Path:
    """`root` itself; `UserError` if a folder in it is called as a part of a dataset is."""
    parts = [show(name) for name in class_folders(root) if show(name).lower() in PART_NAMES]
    if parts:
        raise UserError(f"{str(root)!a} has a folder {parts[0]!r} but none called 'train'")
    return root


def class_folders(place: Path) -> list[bytes]:
    """The folders in `place`, sorted; bytes, as they need not be text. `UserError` if none."""
    top = os.fsencode(place)
    _, folders, files = next(os.walk(top, onerror=fail), (top, [], []))
    names = sorted(name for name in folders if not is_junk(name))
    if not names:
        count = sum(map(has_suffix, files))
        images = f"{count:,} images but " if count else ""
        example = ascii(str(place / "<class>" / "1.jpg"))
        raise UserError(
            f"{str(place)!a} has {images}no folders: put the images of each class into a folder of "
            f"its own, such as {example}"
        )
    return names


def walk(top: bytes, seen: set[tuple[int, int]] | None = None) -> Iterator[bytes]:
    """The image files below `top`, sorted; a folder to which several links lead is entered once.

    Raises:
        UserError: if a folder can't be listed.
    """
    seen = set() if seen is None else seen
    _, folders, files = next(os.walk(top, onerror=fail))
    status = os.stat(top)
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    # A folder has the slash that follows it: so the order is that of whole paths.
    for name in sorted([*filter(has_suffix, files), *(name + b"/" for name in folders)]):
        if is_junk(name):
            continue
        if name.endswith(b"/"):
            yield from walk(os.path.join(top, name[:-1]), seen)
        else:
            yield os.path.join(top, name)


def fail(error: OSError) -> None:
    """Raise the error for a folder that can't be listed."""
    where = ascii(os.fsdecode(error.filename))
    raise UserError(f"cannot list folder {where}: {error.strerror}") from error


def has_suffix(path: bytes) -> bool:
    """Whether a file is called as an image is."""
    return os.fsdecode(path).lower().endswith(SUFFIXES)


def is_junk(name: bytes) -> bool:
    """Whether systems and tools left this behind: `.ipynb_checkpoints`, `__MACOSX`, `._x.jpg`."""
    return name.startswith((b".", b"__"))


def is_val(path: bytes, data: DataConfig) -> bool:
    """Whether the image is for validation; decided by its path from the root alone."""
    digest = hashlib.blake2b(path, digest_size=8).digest()
    start, stop = (fold * data.val_fraction * 2**64 for fold in (data.fold, data.fold + 1))
    return start <= int.from_bytes(digest, "big") < stop


def show(name: bytes) -> str:
    """A file's name as text that can be printed and written anywhere, in one line."""
    return printable(name.decode("utf-8", "backslashreplace"))
