"""Your own images: `root/{train,val[,test]}/<class>/`, or `root/<class>/` split by file name."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
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

    Where there is no `val`, each training image falls to one side by a hash of its name: images
    that are added never move the others.

    Raises:
        UserError: if folders are missing or empty, or the splits' classes differ.
    """
    root = Path(data.root)
    if not root.is_dir():
        raise UserError(f"--data.root {data.root!a}: there is no such folder")
    val = val_folder(root)
    place = {"train": None, "val": val, "test": root / "test"}[split]
    train = root / "train"
    if not train.is_dir():
        if place is not None and place.is_dir():  # only to evaluate on: its classes are all
            return held_out(place, place, class_folders(place))
        train = undivided(root)
    classes = class_folders(train)
    if split == "train" or place is None:
        by_hash = data.val_fraction if val is None else None
        return split_by_name(train, classes, by_hash, split)
    return held_out(place, train, classes)


def splits_of(root: Path) -> list[str]:
    """The splits that `folder` finds in `root`, without a look at their images."""
    place = val_folder(root)
    held = {"val": place is not None, "test": (root / "test").is_dir()}
    is_held_out_only = any(held.values()) and not (
        {*map(os.fsdecode, class_folders(root))} - {"test", *VAL_NAMES}
    )
    if is_held_out_only:
        return [split for split in held if held[split]]
    return ["train", "val", *(["test"] if held["test"] else [])]


def val_folder(root: Path) -> Path | None:
    """The folder of validation images, if they have one of their own."""
    return next((root / name for name in VAL_NAMES if (root / name).is_dir()), None)


def undivided(root: Path) -> Path:
    """`root` itself, if the folders in it are classes and not parts of a dataset.

    Raises:
        UserError: if they are called as parts are.
    """
    parts = [show(name) for name in class_folders(root) if show(name).lower() in PART_NAMES]
    if parts:
        raise UserError(f"{str(root)!a} has a folder {parts[0]!r} but none called 'train'")
    return root


def split_by_name(
    place: Path, classes: list[bytes], val_fraction: float | None, split: str
) -> Source:
    """The training or validation part of `place`; all of it if there is no `val_fraction`."""
    paths: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = image_files(place, name)
        if not found:
            where = ascii(str(place / os.fsdecode(name)))
            raise UserError(
                f"class {show(name)!r} has no images in {where}: add some, or remove the folder"
            )
        if val_fraction is not None:
            chosen = [path for path in found if is_val(path, val_fraction) == (split == "val")]
            if not chosen and split == "train":
                raise UserError(
                    f"class {show(name)!r}: all of its {len(found)} images fall to validation; "
                    f"add some, or lower --data.val-fraction {val_fraction:g}"
                )
            found = chosen
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise UserError(
            f"no image of {str(place)!a} falls to validation: "
            f"add images, or raise --data.val-fraction {val_fraction:g}"
        )
    note = f"split by file name: {len(paths)} images for {split}" if val_fraction else ""
    return make_source(place, paths, labels, classes, (note,) if note else ())


def held_out(place: Path, train: Path, classes: list[bytes]) -> Source:
    """A split with a folder of its own, labelled as the training images are."""
    if not place.is_dir():
        raise UserError(f"{str(place.parent)!a} has no folder {place.name!r}")
    unknown = sorted(set(class_folders(place)) - set(classes))
    if unknown:
        names = ", ".join(repr(show(name)) for name in unknown[:5])
        raise UserError(f"{str(place)!a} has classes that {str(train)!a} has not: {names}")
    paths: list[bytes] = []
    labels: list[int] = []
    missing = []
    for label, name in enumerate(classes):
        found = image_files(place, name) if (place / os.fsdecode(name)).is_dir() else []
        if not found:
            missing.append(show(name))
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise UserError(f"{str(place)!a} has no images")
    notes = ()
    if missing:
        notes = (f"no {place.name} images of: {', '.join(missing)}",)
    return make_source(place, paths, labels, classes, notes)


def make_source(
    root: Path, paths: list[bytes], labels: list[int], classes: list[bytes], notes: tuple[str, ...]
) -> Source:
    """The source of files below `root`."""
    return Source(
        labels=torch.tensor(labels, dtype=torch.int64),
        classes=tuple(show(name) for name in classes),
        paths=PathList(root, paths),
        notes=notes,
    )


def class_folders(place: Path) -> list[bytes]:
    """The names of the folders in `place`, sorted; bytes, as they need not be valid text.

    Raises:
        UserError: if there are none; it says how many images lie there, and where they belong. Or
            if two are shown by the same text.
    """
    with os.scandir(os.fsencode(place)) as entries:
        found = [entry for entry in entries if not is_junk(entry.name)]
    names = sorted(entry.name for entry in found if is_folder(entry))
    if not names:
        count = sum(is_image(entry) for entry in found)
        images = f"{count:,} images but " if count else ""
        example = ascii(str(place / "<class>" / "1.jpg"))
        raise UserError(
            f"{str(place)!a} has {images}no folders: put the images of each class into a folder of "
            f"its own, such as {example}"
        )
    by_shown: dict[str, bytes] = {}
    for name in names:
        other = by_shown.setdefault(show(name), name)
        if other != name:
            raise UserError(
                f"two folders in {str(place)!a} would be one class, {show(name)!r}: their names "
                f"are the bytes {other!r} and {name!r}; rename one of them"
            )
    return names


def image_files(place: Path, name: bytes) -> list[bytes]:
    """The image files below `place/name`, from `place`, sorted."""
    start = os.path.join(os.fsencode(place), name)
    skip = len(os.fsencode(place)) + 1
    return [path[skip:] for path in walk(start, set())]


def walk(top: bytes, seen: set[tuple[int, int]]) -> Iterator[bytes]:
    """Image files below `top`, sorted; a folder that links back to one above is entered once only.

    Raises:
        UserError: if a folder can't be listed.
    """
    try:
        status = os.stat(top)
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(top) as entries:
            # Names alone, as entries take far more memory. Folders with the slash that follows
            # them: so the order is that of whole paths.
            folders_and_images = (
                entry.name + b"/" if is_folder(entry) else entry.name
                for entry in entries
                if not is_junk(entry.name) and (is_folder(entry) or is_image(entry))
            )
            found = sorted(folders_and_images)
    except OSError as error:
        where = ascii(os.fsdecode(top))
        raise UserError(f"cannot list folder {where}: {error.strerror}") from error
    for name in found:
        path = os.path.join(top, name)
        if name.endswith(b"/"):
            yield from walk(path[:-1], seen)
        else:
            yield path


def is_image(entry: os.DirEntry[bytes]) -> bool:
    """Whether it is called as an image is, and is a file."""
    return has_suffix(entry.name) and is_file(entry)


def has_suffix(path: bytes) -> bool:
    """Whether a file is called as an image is."""
    return os.fsdecode(path).lower().endswith(SUFFIXES)


def is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Whether it is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or what may not be asked for
        return False


def is_file(entry: os.DirEntry[bytes]) -> bool:
    """Whether it is a file, or a link that leads nowhere: an image that is missing.

    Not a pipe, a socket or a device: some of them never end.
    """
    try:
        return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:
        return True  # reading it says why


def skipped_files(root: Path) -> Counter[str]:
    """How many files below `root` are not taken for images, by what they are."""
    skipped: Counter[str] = Counter()
    top = os.fsencode(root)
    parts = {top, *(os.path.join(top, part.encode()) for part in ("train", "test", *VAL_NAMES))}
    for folder, folders, files in os.walk(top):
        junk = [name for name in folders if is_junk(name)]
        for name in junk:
            folders.remove(name)
            lost = sum(len(names) for _, _, names in os.walk(os.path.join(folder, name)))
            skipped["left behind by a system or tool"] += lost
        for name in files:
            suffix = os.path.splitext(os.fsdecode(name))[1].lower()
            if is_junk(name):
                skipped["left behind by a system or tool"] += 1
            elif suffix not in SUFFIXES:
                skipped[f"of suffix {suffix!a}" if suffix else "without a suffix"] += 1
            elif not os.path.isfile(os.path.join(folder, name)):
                skipped["a link to nothing, or no plain file"] += 1
            elif folder in parts:
                skipped["in no folder of a class"] += 1
    return +skipped


def is_junk(name: bytes) -> bool:
    """Whether systems and tools left this behind: `.ipynb_checkpoints`, `__MACOSX`, `._x.jpg`."""
    return name.startswith((b".", b"__"))


def is_val(path: bytes, val_fraction: float) -> bool:
    """Whether the image is for validation; decided by its path from the root alone."""
    digest = hashlib.blake2b(path, digest_size=8).digest()
    return int.from_bytes(digest, "big") < val_fraction * 2**64


def show(name: bytes) -> str:
    """A file's name as text that can be printed and written anywhere, in one line."""
    return printable(name.decode("utf-8", "backslashreplace"))
