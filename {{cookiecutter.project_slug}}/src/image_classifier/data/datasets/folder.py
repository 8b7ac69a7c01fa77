"""Your own images: `root/{train,val[,test]}/<class>/`, or `root/<class>/` split by file name."""

import os
from collections import Counter
from pathlib import Path

import torch

from ...config import DataConfig
from ...errors import UserError, did_you_mean
from ...extensions import functions
from ...runtime.console import some
from ..decode import SUFFIXES
from .listing import class_folders, has_suffix, is_junk, listing, show, walk
from .parts import USUAL, check_own, divide, find_name, find_parts, look, part_of, role_of
from .paths import PathList
from .source import Source

ALL = "all"  # in place of a split: the images of a folder without parts, also of one class alone


class NoLabelsError(UserError):
    """A folder of images that has none of the classes."""


class WrapperError(UserError):
    """A folder that holds only the folder in which the classes are."""


def folder(data: DataConfig, split: str) -> Source:
    """The images below `data.root`; the folders in it, or in its `train`, are the classes.

    Without a folder `val`, a hash of each training image's name decides whether it is for
    validation: so images that are added never move the others, but for the first of a class. Each
    image is for validation in one `data.fold`.

    Raises:
        UserError: if folders are missing, empty or no classes, or the splits' classes differ.
    """
    root = Path(data.root)
    if not root.is_dir():
        what = "it is a file, no folder" if root.exists() else "there is no such folder"
        raise UserError(f"--data.root {data.root!a}: {what}")
    parts = find_folders(root)
    hint = f"; --data.root {str(parts.get('train', root))!a} divides the others"
    check_own({part: place.name for part, place in parts.items()}, data.root, data, split, hint)
    own = None if split == "train" else parts.get(split)  # the folder of the split alone
    if split == "test" and not own and ("val" in parts or not getattr(data, "test_fraction", 0)):
        raise UserError(f"{data.root!a} has no folder 'test'")
    train = parts.get("train") or own or root
    place = own or train
    classes = classes_in(train)
    for check_names in functions("folders", "check_names"):
        check_names(train, classes, is_root=train == root)
    folders = {name: name for name in classes}
    notes = []
    if place != train:
        folders, notes = match(place, train, classes)
    others = {name: Counter() for name in classes}
    images = {name: images_of(place, folders[name], others[name]) for name in classes}
    if own is None and split != ALL:
        notes += check_folders(root, place, parts, images, others) * (split == "train")
    paths = [path for found in images.values() for path in found]
    counts = torch.tensor([len(found) for found in images.values()])
    labels = torch.arange(len(classes)).repeat_interleave(counts)
    if not paths:
        raise no_images(place, classes[0], split, others[classes[0]])
    if own is None and split != ALL and "val" not in parts:
        kept = divide(paths, labels, data, split)
        paths = [paths[index] for index in kept.tolist()]
        labels = labels[kept]
        how = "group" if getattr(data, "groups", "") else "file name"  # an option of a tool
        notes.insert(0, f"split by {how}: {len(paths)} images for {split}")
    per_class = labels.bincount(minlength=len(classes)).tolist()
    names = tuple(map(show, classes))
    if empty := [name for name, count in zip(names, per_class, strict=True) if not count]:
        what = "images" if split == ALL else f"{split} images"
        notes.append(f"no {what} of {some(tuple(empty), 5)}")
    return Source(labels, names, paths=PathList(place, paths), notes=tuple(notes))


def are_in_folders(data: DataConfig) -> bool:
    """Whether images have a folder for each class, and no table with their labels."""
    return data.name == "folder" and not getattr(data, "labels", "")  # which a tool reads


def find_folders(root: Path) -> dict[str, Path]:
    """The folders of the parts train, val and test of a dataset, as far as they are there.

    `seg_train/seg_train` has the classes of `seg_train`, if nothing lies beside it.
    """
    found = {}
    names = find_parts(folders_in(root))
    for part in ("train", "val", "test"):
        if part not in names:
            continue
        found[part] = root / names[part]
        while len(inner := folders_in(found[part])) == 1 and role_of(inner[0])[0] == part:
            found[part] /= inner[0]
    return found


def folders_in(place: Path) -> list[str]:
    """The folders in `place`, without those of systems; none if they can't be listed."""
    folders = next(os.walk(os.fsencode(place)), (b"", [], []))[1]
    return [os.fsdecode(name) for name in folders if not is_junk(name)]


def classes_in(place: Path) -> list[bytes]:
    """The folders of classes in `place`, sorted.

    Raises:
        NoLabelsError: if there are none.
    """
    top = os.fsencode(place)
    if not (names := class_folders(top)):
        count = sum(map(has_suffix, listing(top)[1]))
        images = f"{count:,} images but " if count else ""
        example = ascii(str(place / "<class>" / "1.jpg"))
        other = f"; if {place.name!a} is a class, give it another name"
        raise NoLabelsError(
            f"{str(place)!a} has {images}no folders: put the images of each class into a folder of "
            f"its own, such as {example}, or name a table of labels, --data.labels "
            "(of the tool label-table)"
            f"{other if count and part_of(place.name) else ''}"
        )
    return names


def match(place: Path, train: Path, classes: list[bytes]) -> tuple[dict[bytes, bytes], list[str]]:
    """The folder in `place` of each class of `train`, and lines on names that only look alike.

    Raises:
        NoLabelsError: if none of the folders in `place` is a class.
        UserError: if one is no class.
    """
    found = classes_in(place)
    folders = {name: name for name in classes}
    known = [show(name) for name in classes]
    notes = []
    wrong = []
    numbers = {n: find_name(show(n), known) for n in found if n not in folders}
    for name, number in numbers.items():
        if number < 0 or classes[number] in found or [*numbers.values()].count(number) > 1:
            wrong.append(name)
        else:
            folders[classes[number]] = name
            notes.append(f"{str(place)!a}: {show(name)!a} is taken for class {known[number]!a}")
    if wrong:
        names = ", ".join(repr(show(name)) for name in wrong[:5])
        hint = did_you_mean(show(wrong[0]), known)
        if alike := [ascii(name) for name in known if look(name) == look(show(wrong[0]))]:
            hint = f"; {show(wrong[0])!a} looks like {' and '.join(alike)}"
        kind = UserError if len(wrong) < len(found) else NoLabelsError
        raise kind(f"{str(place)!a} has classes that {str(train)!a} has not: {names}{hint}")
    return folders, notes


def images_of(place: Path, name: bytes, others: Counter[str]) -> list[bytes]:
    """The image files below `place/name`, from `place`, sorted; none without such a folder."""
    top = os.path.join(os.fsencode(place), name)
    skip = len(top) - len(name)
    found = walk(top, others) if os.path.isdir(top) else ()
    return [path[skip:].replace(os.fsencode(os.sep), b"/") for path in found]  # as on Linux


def check_folders(
    root: Path,
    place: Path,
    parts: dict[str, Path],
    images: dict[bytes, list[bytes]],
    others: dict[bytes, Counter[str]],
) -> list[str]:
    """Check that there are several classes with images each, and what tools know of such folders.

    `images` are the files of each class in `place`, and `others` the suffixes of its other files.
    Returns lines for the user.
    """
    lines = []
    if any(part.parent != root or part.name not in USUAL for part in parts.values()):
        names = (f"{name}: {str(part.relative_to(root))!a}" for name, part in parts.items())
        lines.append(f"parts of the dataset: {', '.join(names)}")
    for check_classes in functions("folders", "check_classes"):
        lines += check_classes(root, place, parts, images, others)
    for name, paths in images.items():
        if not paths:
            raise no_images(place, name, "train", others[name])
    if len(images) == 1:
        raise UserError(
            f"{str(place)!a} has only one class, {show(*images)!r}: put the images of each class "
            "into a folder of its own"
        )
    return lines


def no_images(place: Path, name: bytes, split: str, others: Counter[str]) -> UserError:
    """The error for a class without images; `others` has the suffixes of its files."""
    why = "add some, or remove the folder"
    if others:
        kinds = ", ".join(repr(kind) if kind else "no suffix" for kind in sorted(others))
        why = f"its {others.total():,} files have {kinds}; images are {', '.join(SUFFIXES)}: "
        why += "convert them, or move the folder away"
    return UserError(f"class {show(name)!r} has no images for {split} in {str(place)!a}: {why}")
