"""Whether folders that are taken for classes are none, and which images nobody uses.

A run asks, too, before it trains on the folders of `--data.root`.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from ...data import (
    WrapperError,
    class_folders,
    find_parts,
    has_suffix,
    is_junk,
    listing,
    look,
    part_of,
    role_of,
    show,
    walk,
)
from ...errors import UserError
from ...runtime.console import printable

OF_SYSTEMS = (b".ipynb_checkpoints", b"__MACOSX", b"__pycache__", b"@eaDir", b".git", b".venv")
# Suffixes of images that are not read; "": a name without one.
UNREAD = ("", ".avif", ".heic", ".heif", ".jp2", ".jxl", ".svg", ".tga", ".dng", ".cr2", ".nef")
MOST_COUNTED = 100_000  # images that are not used


def check_names(place: Path, classes: list[bytes], is_root: bool) -> None:
    """Raise `UserError` if folders in `data.root`, or in its part `place`, are parts."""
    names = [os.fsdecode(name) for name in classes]
    found = find_parts(names)
    if not is_root and "train" in found and len(found) > 1:
        raise UserError(
            f"{str(place)!a} holds parts of a dataset, {quoted(found.values())}: "
            f"--data.root {str(place)!a}"
        )
    if is_root and (parts := part_names(names)):
        raise UserError(
            f"{str(place)!a} has a folder {printable(parts[0])!r} but none called 'train': give "
            "that name to the folder of the training images, or another to a class"
        )


def check_classes(
    root: Path,
    place: Path,
    parts: dict[str, Path],
    images: dict[bytes, list[bytes]],
    others: dict[bytes, Counter[str]],
) -> list[str]:
    """Check that the folders in `place` are classes, by the paths of their images from there.

    `others` has the suffixes of other files in them; `parts` are the folders of train, val and test
    in `root`. Returns lines for the user.

    Raises:
        UserError: if a folder is no class; it says what is right.
    """
    shown = ascii(str(place))
    full = [name for name, paths in images.items() if paths]
    inside = {name: folders_of(images[name]) for name in full}  # b"" for images there
    deep = [name for name in full if b"" not in inside[name]]
    if len(full) == 1 and deep and (right := right_root(place, full[0])):
        cure = f"--data.root {str(right)!a}"
        if len(parts) > 1:
            cure = f"move the folders in {str(right)!a} up to {shown}"
        raise WrapperError(
            f"{shown} has only one class, {show(full[0])!r}, which holds folders alone, "
            f"{quoted(inside[full[0]])}: {cure}"
        )
    for name in full:
        found = find_parts(map(os.fsdecode, inside[name]))
        folder = place / os.fsdecode(name)
        if "train" in found and len(found) > 1:
            train = printable(found["train"])
            called = show(name)
            raise UserError(
                f"{str(folder)!a} is no class, it holds parts of a dataset, "
                f"{quoted(found.values())}: --data.root {str(folder)!a}, or move "
                f"'{called}/{train}' to '{train}/{called}'"
            )
    looks = {look(show(name)): name for name in full}
    for name in deep:
        known = [inner for inner in inside[name] if looks.get(look(show(inner)), name) != name]
        if known:
            raise UserError(
                f"{show(name)!r} in {shown} is no class, it holds folders called as the classes "
                f"{quoted(known)}: move it elsewhere, or its images into those"
            )
    unread = {kind: n for kind in UNREAD if (n := sum(other[kind] for other in others.values()))}
    listed = ", ".join(f"{n:,} {kind or 'without a suffix'}" for kind, n in unread.items())
    lines = [f"warning: files that cannot be read as images: {listed}"] if unread else []
    twins = {name: other for name in full if (other := looks[look(show(name))]) != name}
    lines += [
        f"warning: {show(name)!a} and {show(other)!a} are two classes; if they are one, merge them"
        for name, other in twins.items()
    ]
    classes = {look(show(name)) for name in images}
    return [*lines, *nested(place, inside, deep), *unused(root, place, parts, classes)]


def nested(place: Path, inside: dict[bytes, set[bytes]], deep: list[bytes]) -> Iterator[str]:
    """A line for classes `deep` that hold folders alone, if these may be the classes."""
    roots = (root for name in deep[:9] if (root := right_root(place, name)))
    same = next(iter(inside.values()), set())
    if len(deep) == len(inside) and len(same) > 1 and all(x == same for x in inside.values()):
        yield (
            f"warning: each class holds the folders {quoted(same)}: if these are the classes, and "
            f"{quoted(deep)} parts of a dataset, rename those to 'train', 'val', 'test'"
        )
    elif first := next(roots, None):
        yield (
            f"warning: {len(deep)} of {len(inside)} classes hold folders alone: all images below "
            f"one of them are one class; if the folders in {str(first)!a} are the classes, "
            f"--data.root {str(first)!a}"
        )


def folders_of(paths: list[bytes]) -> set[bytes]:
    """The folders that images have in that of their class; b"" for an image without one."""
    return {b"" if path.count(b"/") == 1 else path.split(b"/", 2)[1] for path in paths}


def right_root(place: Path, name: bytes) -> Path | None:
    """From `place/name` on the first folder that has several folders with images, if any has."""
    names = [name]
    while len(names) == 1:
        place /= os.fsdecode(names[0])
        top = os.fsencode(place)
        names = [name for name in class_folders(top) if any(walk(os.path.join(top, name)))]
    return place if names else None


def unused(root: Path, place: Path, parts: dict[str, Path], classes: set[str]) -> Iterator[str]:
    """A line for each folder of images in `root`, or in `place` for training, that nobody uses.

    `classes` are the looks of the names of those in `place`.
    """
    used = {os.fsencode(part.relative_to(root).parts[0]) for part in parts.values()}
    for folder in dict.fromkeys((root, place)):
        top = os.fsencode(folder)
        folders, files = listing(top)
        if count := sum(map(has_suffix, files)):
            yield f"warning: {count:,} images in {str(folder)!a} are not used: they are in no class"
        paths = (os.path.join(top, name) for name in sorted(files) if not has_suffix(name))
        if broken := [os.fsdecode(path) for path in paths if not os.path.exists(path)]:
            where = f"{len(broken):,}, such as {broken[0]!a} to {os.readlink(broken[0])!a}"
            yield f"warning: links in {str(folder)!a} that lead nowhere: {where}"
        others = [name for name in folders if name not in used] if parts and folder == root else []
        hidden = [name for name in next(os.walk(top))[1] if is_junk(name)]
        for name in sorted([*others, *(name for name in hidden if name not in OF_SYSTEMS)]):
            path = os.path.join(top, name)
            if not (count := sum(1 for _ in islice(walk(path), MOST_COUNTED))):
                continue
            cure = ": a name that begins with '.' or '__' is no class, rename it"
            if name not in hidden:
                cure = use_of(name, classes, root, place, parts)
            yield f"warning: {count:,} images in {os.fsdecode(path)!a} are not used{cure}"


def use_of(name: bytes, classes: set[str], root: Path, place: Path, parts: dict[str, Path]) -> str:
    """How the images in the folder `name` of `root` come to use, or why they do not."""
    role = role_of(os.fsdecode(name))[0]
    if role == "pred":
        return ", as they have no labels"
    if look(show(name)) in classes:
        return f": move it into {str(place)!a}, which has the classes"
    if role == "test" and role not in parts:
        return ": rename it to 'test'"
    if (part := role if role in parts else "val") in parts:
        other = ascii(parts[part].relative_to(root).parts[0])
        return f": the {part} folder is {other}; rename that to use these, or merge them"
    return ": rename it to 'val' for validation, or move the classes in it to 'train'"


def quoted(names: Iterable[bytes | str]) -> str:
    """The first few names."""
    shown = [show(name) if isinstance(name, bytes) else printable(name) for name in names]
    return ", ".join([*map(repr, sorted(shown)[:3]), *["..."] * (len(shown) > 3)])


def part_names(names: Collection[str]) -> list[str]:
    """Those of `names` that are no class, as they are called as a part of a dataset is.

    Names with other words are, if most names are: `train_a` and `test_b`, but not `steam_train`.
    """
    found = {name: role_of(name) for name in names if role_of(name)[0]}
    has_kinds = len({role for role, _ in found.values()}) > 1
    are_numbered = all(word.isdecimal() for _, others in found.values() for word in others)
    if 2 * len(found) > len(names) and (has_kinds or are_numbered):
        return [*found]
    return [name for name in found if part_of(name)]
