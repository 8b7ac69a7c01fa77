"""Checks all images before training: unreadable files, leakage between splits, conflicting labels.

Each file is read once (`survey.py`); near-duplicates are found by `near_duplicates.py`.
"""

import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...config import DataConfig
from ...data import NoLabelsError, find_folders, look, open_files, walk
from ...errors import UserError
from ...extensions import find_tool
from ...runtime.console import clock, printable_path, say
from ...runtime.files import write_text
from . import near_duplicates
from .source import quarantine_path, read_quarantine
from .survey import Images

UNIFORM_RANGE = 8  # of 255: JPEG noise may spread a single color so far
TINY_SIDE = 16  # pixels of the shorter side
IMBALANCE = 10  # times as many images as another class
MAX_COPIES = 10  # different files that may be one picture: a larger group is too alike to judge
DARK_CURE = ": scale them, or try --data.bits 16"
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
    is_folder = data.name == "folder" and Path(data.root).is_dir()
    splits, not_checked = (splits, "") if splits else find_splits(data, is_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's: they are findings here, or do not matter
        images = Images(data, splits)
    are_files = images.sources[0].paths is not None
    if quarantine and not are_files:
        raise UserError(f"--quarantine lists files, and {data.name} has none: it is in memory")
    copies, alike = group_duplicates(images)
    findings = [
        *find_duplicates(images, copies, alike),
        *find_odd_images(images),
        Finding("imbalance", "classes with few images", rare_classes(images)),
        find_similar_names(images),
    ]
    every = choose_left_out(images, copies)
    left_out = {
        n: why
        for n, why in every.items()
        if with_held_out or n in images.unreadable or images.split(n) == "train"
    }
    report = {
        "root": data.root,
        "images": images.counts(),
        **summarize(images),
        "skipped": skipped_files(images) if is_folder else {},
        "findings": {finding.name: finding.items for finding in findings},
        "quarantine": {os.fsdecode(images.name(n)): why for n, why in left_out.items()},
    }
    target = quarantine_path(data)
    texts = {Path(json): dumps(report, indent=2) + "\n"} if json else {}
    if quarantine and left_out:
        listed = read_quarantine(data) | {images.name(n): why for n, why in left_out.items()}
        rows = (f"{printable_path(name)}\t{listed[name]}\n" for name in sorted(listed))
        texts[target] = "".join(rows)
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        except OSError as error:
            raise UserError(f"cannot write {str(path)!a}: {error.strerror}") from error
    say(f"{len(images.labels):,} images checked in {clock(time.monotonic() - began)}")
    print_findings(findings)
    print_summary(report, images)
    if not_checked:
        print(f"the test images are not checked, as they have no labels: {not_checked}")
    serious = {finding.name: len(finding.items) for finding in findings if finding.is_serious}
    if quarantine and left_out:
        added = f"{len(left_out):,} image{'s' * (len(left_out) != 1)} added to {str(target)!a}"
        print(f"\n{added}: training leaves them out")
    elif count := sum(serious.values()):
        advice = "; --quarantine makes training leave them out" * (are_files and bool(left_out))
        print(f"\n{count:,} serious finding{'s' * (count != 1)}, marked by !{advice}")
    else:
        print("\nnothing serious")
    if (num_kept := len(every) - len(left_out)) and are_files:
        print(f"--quarantine-all leaves out {num_kept:,} validation and test images, too")
    cured = ("unreadable", "leaks", "conflicts") if quarantine else ()
    return sum(count for name, count in serious.items() if name not in cured)


def find_splits(data: DataConfig, is_folder: bool) -> tuple[tuple[str, ...], str]:
    """The splits to check, and why test images are not, if they have no labels: as on Kaggle."""
    has_test = is_folder and "test" in find_folders(Path(data.root))
    why = ""
    if getattr(data, "labels", ""):
        has_test = find_tool("labels", "label-table").has_test_rows(data)
    elif has_test:
        try:
            open_files(data, "test")
        except NoLabelsError as error:
            has_test = False
            why = str(error).partition(": put")[0]
    is_held_out = bool(getattr(data, "test_fraction", 0))
    return ("train", "val", "test")[: 2 + (has_test or is_held_out)], why


def skipped_files(images: Images) -> dict[str, int]:
    """How many files below `data.root` are not taken for images, by suffix, place or table."""
    root = os.fsencode(Path(images.data.root))
    others: Counter[str] = Counter()
    paths = [*walk(root, others)]
    skipped = {f"of suffix {end!a}" if end else "without a suffix": n for end, n in others.items()}
    if getattr(images.data, "labels", ""):
        listed = {os.path.join(root, images.name(n)) for n in range(len(images.labels))}
        skipped["not in the table"] = sum(path not in listed for path in paths)
    else:
        parts = {root, *(os.fsencode(source.paths.root) for source in images.sources)}
        skipped["in no folder of a class"] = sum(os.path.dirname(path) in parts for path in paths)
    return {what: count for what, count in skipped.items() if count}


def group_duplicates(images: Images) -> tuple[list[Group], list[Group]]:
    """Groups of equal files and near-duplicates; and of images that look alike, copies or not."""
    count = len(images.stats)
    numbers = np.flatnonzero(images.stats["height"] > 0)
    digests = images.stats["digest"][numbers]
    _, first, content = np.unique(digests, return_index=True, return_inverse=True)
    original = torch.arange(count)  # the first of equal files, which is compared with the others
    original[torch.from_numpy(numbers)] = torch.from_numpy(numbers[first][content])
    pairs, scores = near_duplicates.find_candidates(images.grays, np.sort(numbers[first]))
    seen = pairs.unique()
    grays = images.fine_grays(seen.numpy())
    sides = torch.from_numpy(np.minimum(images.stats["height"], images.stats["width"]))[seen]

    def compare(pairs: Tensor) -> Tensor:
        return near_duplicates.are_copies(grays, sides, torch.searchsorted(seen, pairs))

    are_same = compare(pairs)
    group = near_duplicates.group_copies(pairs[are_same], count, compare)
    num_files = group[original.unique()].bincount(minlength=count)
    group = torch.where(num_files[group] > MAX_COPIES, torch.arange(count), group)[original]
    look_alike = pairs[are_same | (scores > near_duplicates.LOOK_ALIKE)]
    chain = near_duplicates.connected_components(look_alike, count)[original]
    alike = [members for members in members_of(chain) if np.ptp(group.numpy()[members])]
    return members_of(group), alike


def members_of(group: Tensor) -> list[Group]:
    """The members of each group of two or more, from the number of each one's group: (count,)."""
    sizes = group.unique(return_counts=True)[1]
    groups = group.argsort(stable=True).split(sizes.tolist())
    return sorted((g.numpy() for g in groups if len(g) > 1), key=len, reverse=True)


def find_duplicates(images: Images, copies: list[Group], alike: list[Group]) -> list[Finding]:
    """Groups in several splits, with several labels, or neither; and unreadable files."""
    found = defaultdict(list)
    for members in copies:
        is_same = np.ptp(images.stats["digest"][members]) == 0
        kinds = ["leaks"] * bool(np.ptp(images.split_of[members]))
        kinds += ["conflicts"] * images.is_conflict(members)
        for kind in kinds or ["duplicates"]:
            what = "the same bytes" if is_same else "near-duplicates"
            found[kind].append(item(images, members, what))
    for members in alike:
        entries = [images.entry(index) for index in members]
        classes = len({entry["class"] for entry in entries})
        where = ", ".join(dict.fromkeys(entry["split"] for entry in entries))
        what = f"{len(members):,} images of {classes:,} class{'es' * (classes > 1)}, in {where}"
        found["alike"].append({"images": entries, "what": what})
    unreadable = [item(images, [n], reason) for n, reason in images.unreadable.items()]
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
        Finding("alike", too_alike, found["alike"]),
    ]


def item(images: Images, members: Iterable[int], what: str) -> Item:
    """An item of a finding."""
    return {"images": [images.entry(index) for index in members], "what": what}


def find_odd_images(images: Images) -> Iterator[Finding]:
    """Readable images that may be of no use."""
    height = images.stats["height"]
    width = images.stats["width"]
    shorter = np.minimum(height, width)

    def sized(which: np.ndarray) -> dict[int, str]:
        found = np.flatnonzero((shorter > 0) & which)
        return {n: f"{width[n]} x {height[n]}" for n in found.tolist()}

    uniform = sized(images.stats["range"] <= UNIFORM_RANGE)
    tiny = sized(shorter < TINY_SIDE)
    for name, title, found, cure in (
        ("uniform", "images of one color", uniform, ""),
        ("tiny", f"images with a side of less than {TINY_SIDE} pixels", tiny, ""),
        ("dark", "16-bit images that turn nearly black", images.dark, DARK_CURE),
    ):
        whole = "" if name == "tiny" else whole_splits(images, [*found])
        items = [item(images, [n], what) for n, what in found.items()]
        yield Finding(name, title + whole + cure, items, is_serious=bool(whole))


def whole_splits(images: Images, found: list[int]) -> str:
    """`, all of train`, if all readable images of that split are among `found`, or ``."""
    readable = Counter(images.split_of[images.stats["height"] > 0].tolist())
    odd = Counter(images.split_of[found].tolist())
    whole = [images.splits[n] for n in sorted(odd) if odd[n] == readable[n] > 1]
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


def find_similar_names(images: Images) -> Finding:
    """Classes whose names a reader can hardly tell from each other."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in images.classes:
        alike[look(name)].append(ascii(name))
    items = [item(images, [], " and ".join(names)) for names in alike.values() if names[1:]]
    return Finding("names", "classes whose names look alike: rename or merge them", items)


def choose_left_out(images: Images, groups: list[Group]) -> dict[int, str]:
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
            originals: dict[int, int] = {}
            for index in kept.tolist():
                original = originals.setdefault(int(images.stats["digest"][index]), index)
                if original != index:
                    left_out[index] = f"the same bytes as {images.shown(original)}"
    return left_out


def summarize(images: Images) -> dict[str, Any]:
    """Sizes, file types and colors."""
    readable = images.stats["height"] > 0
    sizes = {}
    colors = {}
    for side in ("width", "height") if readable.any() else ():
        low, middle, high = np.percentile(images.stats[side][readable], (0, 50, 100))
        sizes[side] = {"min": int(low), "median": int(middle), "max": int(high)}
    first = images.stats[readable & (images.split_of == 0)]  # training, if it was checked
    if len(first):
        mean = first["mean"].mean(0)
        std = np.sqrt(np.maximum(0, first["square"].mean(0) - mean**2))
        colors = {"mean": (mean / 255).round(4).tolist(), "std": (std / 255).round(4).tolist()}
    kinds = Counter(filter(None, images.kinds)).most_common()
    return {"sizes": sizes, "kinds": dict(kinds), "colors": colors}


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


def print_summary(report: dict[str, Any], images: Images) -> None:
    """Print what is there."""
    sizes = zip(images.splits, map(len, images.sources), strict=True)
    counts = ", ".join(f"{split} {size:,}" for split, size in sizes)
    print(f"\nimages: {counts}; {len(images.classes):,} classes")
    for note in (note for source in images.sources for note in source.notes):
        print(note)
    for name, title in (("kinds", "files"), ("skipped", "not used")):
        if pairs := report[name].items():
            print(f"{title}: " + ", ".join(f"{count:,} {what}" for what, count in pairs))
    for side, size in report["sizes"].items():
        print(f"{side}: {size['min']:,} to {size['max']:,} pixels, median {size['median']:,}")
    for name, values in report["colors"].items():
        print(f"{name} of the colors of {images.splits[0]}: {', '.join(map(str, values))}")
