"""Checks all images before training: unreadable files, leakage between splits, conflicting labels.

Each file is read once (`survey.py`); the tool near-duplicates compares what the images show.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from json import dumps
from os import fsdecode
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...config import DataConfig
from ...data import NoLabelsError, find_folders, open_files
from ...errors import FaultError, UserError
from ...extensions import find_tool
from ...runtime.console import clock, printable, say
from .source import add_to_quarantine, quarantine_path, save
from .survey import Images

# Brightest minus darkest is less in an image of one color, for all JPEG noise; and in one of 12
# bits in a file of 16, of which only the upper 8 are read.
UNIFORM_RANGE = 16
TINY_SIDE = 16  # pixels of the shorter side
IMBALANCE = 10  # times as many images as another class
DARK_HINT = "black ones from files of 16 bits: scale them, or try --data.bits 16"
MAX_LINES, MAX_NAMES = 10, 3  # on the terminal: items of a finding, images of an item

Item = dict[str, Any]  # `images`, and in `what` a description
Group = np.ndarray  # numbers of images, in rising order


class Finding(NamedTuple):
    """One kind of problem, and every place where it was found."""

    name: str  # in JSON
    title: str
    items: list[Item]
    is_serious: bool = False
    hint: str = ""  # what may be done


def check(
    data: DataConfig,
    splits: Sequence[str],
    json: str,
    quarantine: bool,
    with_held_out: bool = False,
) -> int:
    """Check a dataset, print the findings, and return how many serious ones remain.

    `json` names a file for all findings; `quarantine` adds images to the list of those that
    are left out: training images and unreadable ones, or `with_held_out` those of all splits.

    Raises:
        UserError: if the dataset can't be opened, or a file can't be written.
    """
    began = time.monotonic()
    splits, not_checked = (splits, "") if splits else find_splits(data)
    images = Images(data, splits)
    are_files = images.sources[0].paths is not None
    if quarantine and not are_files:
        raise UserError(f"--quarantine lists files, and {data.name} has none: it is in memory")
    original = find_originals(images)
    copies, alike = group_images(images, original)
    findings = [
        *find_duplicates(images, copies, alike),
        *find_odd_images(images),
        Finding("imbalance", "classes with few images", rare_classes(images)),
    ]
    every = choose_left_out(images, copies, original)
    left_out = {
        n: why
        for n, why in every.items()
        if with_held_out or n in images.unreadable or images.split(n) == "train"
    }
    if json:
        report = {
            "root": data.root,
            "images": images.counts(),
            "findings": {finding.name: finding.items for finding in findings},
            "quarantine": {fsdecode(images.name(n)): why for n, why in left_out.items()},
        }
        save(Path(json), dumps(report, indent=2) + "\n")
    if quarantine and left_out:
        add_to_quarantine(data, {images.name(n): why for n, why in left_out.items()})
    say(f"{len(images.labels):,} images checked in {clock(time.monotonic() - began)}")
    print_findings(findings)
    print_summary(images)
    if not_checked:
        print(f"the test images are not checked, as {not_checked}")
    serious = [(kind.name, found) for kind in findings if kind.is_serious for found in kind.items]
    if quarantine and left_out:
        added = f"{len(left_out):,} image{'s' * (len(left_out) != 1)} added to "
        print(f"\n{added}{str(quarantine_path(data))!a}: training leaves them out")
    elif count := len(serious):
        advice = "; --quarantine makes training leave them out" * (are_files and bool(left_out))
        print(f"\n{count:,} serious finding{'s' * (count != 1)}, marked by !{advice}")
    else:
        print("\nnothing serious")
    kept = {images.entry(n)["path"] for n in every.keys() - left_out.keys()}
    if kept and are_files:
        still = "; their findings remain" * quarantine
        print(f"--quarantine-all leaves out {len(kept):,} validation and test images, too{still}")
    cured = ("unreadable", "leaks", "conflicts") if quarantine else ()
    return sum(
        name not in cured or any(image["path"] in kept for image in found["images"])
        for name, found in serious
    )


def find_splits(data: DataConfig) -> tuple[tuple[str, ...], str]:
    """The splits to check, and why test images are not, if they are not."""
    is_folder = data.name == "folder" and Path(data.root).is_dir()
    has_test = is_folder and "test" in find_folders(Path(data.root))
    why = ""
    if getattr(data, "labels", ""):
        has_test = find_tool("labels", "label-table").has_test_rows(data)
    elif has_test:
        try:
            open_files(data, "test")
        except NoLabelsError as error:
            has_test = False
            why = f"they have no labels: {str(error).partition(': put')[0]}"
    elif data.name != "folder":
        why = why_no_test(data)
        has_test = not why
    is_held_out = bool(getattr(data, "test_fraction", 0))
    return ("train", "val", "test")[: 2 + (has_test or is_held_out)], "" if is_held_out else why


def why_no_test(data: DataConfig) -> str:
    """Why a dataset that is no folder has no test images to check; empty if it has some."""
    val = open_files(data, "val")
    try:
        test = open_files(data, "test")
    except FaultError:
        raise
    except Exception as error:  # a dataset of the user raises any kind
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"there are none that can be opened: {printable(reason):.300}"
    if not len(val) or not len(test):
        return "there are none"
    return "they are those for validation" if val.has_same_images(test) else ""


def find_originals(images: Images) -> np.ndarray:
    """The first of the files with the same bytes as each image, or its own number: (count,)."""
    original = np.arange(len(images.labels))
    readable = original[images.is_readable]
    _, first, content = np.unique(images.digests[readable], return_index=True, return_inverse=True)
    original[readable] = readable[first][content]
    return original


def group_images(images: Images, original: np.ndarray) -> tuple[list[Group], list[Group]]:
    """Groups of copies: of equal files and near-duplicates; and of images that look alike."""
    tool = find_tool("copies", "near-duplicates")
    if tool is None:
        return members_of(original), []
    chosen = np.flatnonzero((original == np.arange(len(original))) & images.is_readable)
    group, alike = tool.group_images(images.grays, images.sizes.min(1), chosen)
    group = group[original]
    chains = members_of(alike[original])
    return members_of(group), [members for members in chains if np.ptp(group[members])]


def members_of(group: np.ndarray) -> list[Group]:
    """The members of each group of two or more, from the number of each one's group: (count,)."""
    order = np.argsort(group, kind="stable")
    ends = np.flatnonzero(np.diff(group[order])) + 1
    groups = (members for members in np.split(order, ends) if len(members) > 1)
    return sorted(groups, key=len, reverse=True)


def find_duplicates(images: Images, copies: list[Group], alike: list[Group]) -> list[Finding]:
    """Groups in several splits, with several labels, or neither; and unreadable files."""
    found = defaultdict(list)
    for members in copies:
        kinds = ["leaks"] * bool(np.ptp(images.split_of[members]))
        kinds += ["conflicts"] * images.is_conflict(members)
        what = "near-duplicates" if np.ptp(images.digests[members]) else "the same bytes"
        for kind in kinds or ["duplicates"]:
            found[kind].append(item(images, members, what))
    unreadable = [item(images, [n], reason) for n, reason in images.unreadable.items()]
    look_alike = [item(images, members, "look alike") for members in alike]
    too_alike = "images too alike to judge: --quarantine leaves none out for that"
    root = Path(images.data.root)
    is_divided = images.data.name == "folder" and "val" not in find_folders(root)
    can_group = is_divided and getattr(images.data, "groups", None) == ""  # an option of a tool
    hint = "images of a burst or a patient stay in one split by --data.groups" * can_group
    return [
        Finding("unreadable", "unreadable files", unreadable, is_serious=True),
        Finding("leaks", "images that leak between splits", found["leaks"], True, hint),
        Finding("conflicts", "conflicting labels", found["conflicts"], is_serious=True),
        Finding("duplicates", "duplicates within a split", found["duplicates"]),
        Finding("alike", too_alike, look_alike),
    ]


def item(images: Images, members: Iterable[int], what: str) -> Item:
    """An item of a finding."""
    return {"images": [images.entry(index) for index in members], "what": what}


def find_odd_images(images: Images) -> list[Finding]:
    """Readable images that may be of no use."""

    def sized(found: np.ndarray) -> list[Item]:
        numbers = np.flatnonzero(found).tolist()
        sizes = (f"{width} x {height}" for height, width in images.sizes[numbers].tolist())
        return [item(images, [n], size) for n, size in zip(numbers, sizes, strict=True)]

    is_tiny = images.is_readable & (images.sizes.min(1) < TINY_SIDE)
    is_uniform = images.is_readable & (images.spread < UNIFORM_RANGE)
    is_dark = is_uniform & (images.brightest < UNIFORM_RANGE)
    hint = DARK_HINT * bool(is_dark.any() and images.data.bits == 8)
    whole = whole_splits(images, is_uniform)
    return [
        Finding("uniform", f"images of one color{whole}", sized(is_uniform), bool(whole), hint),
        Finding("tiny", f"images with a side of less than {TINY_SIDE} pixels", sized(is_tiny)),
    ]


def whole_splits(images: Images, found: np.ndarray) -> str:
    """`, all of train`, if all readable images of that split are `found`, (count,) bool, or ``."""
    readable = np.bincount(images.split_of[images.is_readable], minlength=3)
    odd = np.bincount(images.split_of[found], minlength=3)
    whole = [split for n, split in enumerate(images.splits) if odd[n] == readable[n] > 1]
    return f", all of {' and '.join(whole)}" if whole else ""


def rare_classes(images: Images) -> list[Item]:
    """Classes that are rare in a split, or missing."""
    items = []
    for split, counts in images.counts().items():
        most = max(counts, key=counts.__getitem__)
        for name in sorted(counts, key=counts.__getitem__):
            if counts[name] * IMBALANCE <= counts[most]:
                rare = f"{split} has {counts[name]:,} images of {name!a}"
                items.append(item(images, [], f"{rare}, and {counts[most]:,} of {most!a}"))
    return items


def choose_left_out(images: Images, groups: list[Group], original: np.ndarray) -> dict[int, str]:
    """The images that should be left out of all splits, and why.

    A group in several splits stays in the last of them only, so that a test set remains the same.
    If its labels differ there, all of it is left out, as nobody knows which label is right. Of
    equal files in training, the first is kept.
    """
    left_out = dict(images.unreadable)
    for members in groups:
        split = images.split_of[members]
        kept = members[split == split.max()]
        earlier = members[split < split.max()]
        where = images.splits[split.max()]
        first = images.shown(kept[0])
        left_out |= dict.fromkeys(earlier.tolist(), f"a duplicate is in {where}: {first}")
        if images.is_conflict(kept):
            others = " = ".join(map(images.shown, kept[:MAX_NAMES]))
            left_out |= dict.fromkeys(kept.tolist(), f"conflicting labels: {others}")
        elif where == "train":
            for index in kept[original[kept] != kept].tolist():
                left_out[index] = f"the same bytes as {images.shown(original[index])}"
    return left_out


def print_findings(findings: list[Finding]) -> None:
    """Print some items of each finding; serious ones are marked."""
    for finding in findings:
        if finding.items:
            print(f"\n{'! ' * finding.is_serious}{finding.title}: {len(finding.items):,}")
        for found in finding.items[:MAX_LINES]:
            paths = [ascii(entry["path"]) for entry in found["images"]]
            if len(paths) > MAX_NAMES:  # the last is in another split or class, if any is
                paths[2:-1] = [f"{len(paths) - MAX_NAMES:,} more"]
            print("  " + ": ".join(filter(None, (" = ".join(paths), found["what"]))))
        if len(finding.items) > MAX_LINES:
            print(f"  and {len(finding.items) - MAX_LINES:,} more: --json FILE has all")
        if finding.items and finding.hint:
            print(f"  {finding.hint}")


def print_summary(images: Images) -> None:
    """Print what is there."""
    of_splits = zip(images.splits, images.sources, strict=True)
    counts = ", ".join(f"{split} {len(source):,}" for split, source in of_splits)
    print(f"\nimages: {counts}; {len(images.classes):,} classes")
    for note in (note for source in images.sources for note in source.notes):
        print(note)
    sizes = images.sizes[images.is_readable]
    for side, pixels in ("width", sizes[:, 1]), ("height", sizes[:, 0]):
        if len(pixels):
            middle = np.median(pixels)
            print(f"{side}: {pixels.min():,} to {pixels.max():,} pixels, median {middle:,.0f}")
