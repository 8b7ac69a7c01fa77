"""Checks all images before training: unreadable files, leakage between splits, conflicting labels.

Each file is read once (`survey.py`); near-duplicates are found by `near_duplicates.py`.
"""

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...config import DataConfig
from ...data import has_suffix, quarantine_path, read_quarantine
from ...errors import UserError
from ...runtime.console import clock, printable_path, say
from ...runtime.files import write_json, write_text
from .near_duplicates import connected_components, find_near_duplicates
from .survey import Images, Survey, survey_images

UNIFORM_RANGE = 8  # of 255: JPEG noise may spread a single colour so far
TINY_SIDE = 16  # pixels of the shorter side
IMBALANCE = 10  # times as many images as another class
MAX_LINES, MAX_NAMES = 10, 3  # on the terminal: items of a finding, images of an item


@dataclass
class Finding:
    """One kind of problem, and every place where it was found."""

    name: str  # in JSON
    title: str
    items: list[dict[str, Any]]  # `images`, and in `what` a description
    is_serious: bool = False


def check(data: DataConfig, splits: Sequence[str], json: str, quarantine: bool) -> int:
    """Check a dataset, print the findings, and return how many serious ones remain.

    `json` names a file for all findings; `quarantine` adds images to the list of those that
    training leaves out.

    Raises:
        UserError: if the dataset can't be opened, or a file can't be written.
    """
    began = time.monotonic()
    is_folder = data.name == "folder" and Path(data.root).is_dir()
    has_test = is_folder and Path(data.root, "test").is_dir()
    images = Images(data, splits or ("train", "val", "test")[: 2 + has_test])
    if quarantine and images.sources[0].paths is None:
        raise UserError(f"--quarantine lists files, and {data.name} has none: it is in memory")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's: they are findings here, or do not matter
        survey = survey_images(images)
    groups = group_duplicates(survey)
    findings = [
        *find_duplicates(images, survey, groups),
        *find_odd_images(images, survey),
        find_imbalance(images),
    ]
    left_out = choose_left_out(images, survey, groups)
    report = {
        "root": data.root,
        "images": images.counts(),
        **summarise(images, survey),
        "skipped": dict(skipped_files(images)) if is_folder else {},
        "findings": {finding.name: finding.items for finding in findings},
        "quarantine": {os.fsdecode(images.name(n)): why for n, why in left_out.items()},
    }
    if json:
        write_to(Path(json), lambda path: write_json(path, report))
    if quarantine and left_out:
        listed = read_quarantine(data) | {images.name(n): why for n, why in left_out.items()}
        text = "".join(f"{printable_path(name)}\t{listed[name]}\n" for name in sorted(listed))
        write_to(quarantine_path(data), lambda path: write_text(path, text))
    say(f"{len(images):,} images checked in {clock(time.monotonic() - began)}")
    for line in lines(report, findings, images):
        say(line)
    serious = sum(len(finding.items) for finding in findings if finding.is_serious)
    say(conclusion(images, serious, len(left_out), quarantine))
    return 0 if quarantine else serious


def skipped_files(images: Images) -> Counter[str]:
    """How many files below `data.root` are not taken for images, by suffix or place."""
    skipped: Counter[str] = Counter()
    root = Path(images.data.root)
    parts = {root, *(source.paths.root for source in images.sources if source.paths)}
    for path in root.rglob("*"):
        if not path.is_file():
            continue
        if any(part.startswith((".", "__")) for part in path.relative_to(root).parts):
            skipped["left behind by a system or tool"] += 1
        elif not has_suffix(os.fsencode(path)):
            suffix = path.suffix.lower()
            skipped[f"of suffix {suffix!a}" if suffix else "without a suffix"] += 1
        elif path.parent in parts:
            skipped["in no folder of a class"] += 1
    return skipped


def group_duplicates(survey: Survey) -> list[np.ndarray]:
    """Groups of equal files and near-duplicates, as image numbers; the largest group first."""
    numbers = np.flatnonzero(survey.stats["height"] > 0)
    digests = survey.stats["digest"][numbers]
    _, first, content = np.unique(digests, return_index=True, return_inverse=True)
    same = torch.from_numpy(np.stack((numbers, numbers[first][content]), axis=1))
    # One of several equal files is compared with the others.
    near = find_near_duplicates(survey.greys, np.sort(numbers[first]))
    group = connected_components(torch.cat((same, near)), len(survey.stats)).numpy()
    members = np.flatnonzero(np.bincount(group)[group] > 1)
    members = members[np.argsort(group[members], kind="stable")]
    parts = np.split(members, np.flatnonzero(np.diff(group[members])) + 1)
    return sorted((part for part in parts if len(part)), key=len, reverse=True)


def find_duplicates(images: Images, survey: Survey, groups: list[np.ndarray]) -> Iterator[Finding]:
    """Groups in several splits, with several labels, or neither; and unreadable files."""
    unreadable = [item(images, [n], reason) for n, reason in survey.unreadable.items()]
    yield Finding("unreadable", "unreadable files", unreadable, is_serious=True)
    leaks, conflicts, duplicates = [], [], []
    for members in groups:
        digests = survey.stats["digest"][members]
        what = "the same bytes" if (digests == digests[0]).all() else "near-duplicates"
        lists = [leaks] * bool(np.ptp(images.split_of[members]))
        lists += [conflicts] * bool(np.ptp(images.labels[members]))
        for found in lists or [duplicates]:
            found.append(item(images, members, what))
    yield Finding("leaks", "images that leak between splits", leaks, is_serious=True)
    yield Finding("conflicts", "conflicting labels", conflicts, is_serious=True)
    yield Finding("duplicates", "duplicates within a split", duplicates)


def item(images: Images, members: Sequence[int] | np.ndarray, what: str) -> dict[str, Any]:
    """An item of a finding."""
    return {"images": [images.entry(index) for index in members], "what": what}


def find_odd_images(images: Images, survey: Survey) -> Iterator[Finding]:
    """Readable images that may be of no use."""
    height, width = survey.stats["height"], survey.stats["width"]
    shorter = np.minimum(height, width)
    for name, title, which in (
        ("uniform", "images of one colour", survey.stats["range"] <= UNIFORM_RANGE),
        ("tiny", f"images with a side of less than {TINY_SIDE} pixels", shorter < TINY_SIDE),
    ):
        found = np.flatnonzero((shorter > 0) & which)
        items = [item(images, [n], f"{width[n]} x {height[n]}") for n in found]
        yield Finding(name, title, items)
    title = "16-bit grey images that turn nearly black: scale them, or save them with 8 bits"
    dark = [(n, f"its highest value is {top:,} of 65,535") for n, top in survey.dark.items()]
    yield Finding("dark", title, [item(images, [n], what) for n, what in dark])


def find_imbalance(images: Images) -> Finding:
    """Classes that are rare in a split, or missing."""
    items = []
    for split, counts in images.counts().items():
        most = max(counts, key=counts.__getitem__)
        for name, count in sorted(counts.items(), key=lambda pair: pair[1]):
            if count * IMBALANCE <= counts[most]:
                what = f"{split} has {count:,} images of {name!a}, and {counts[most]:,} of {most!a}"
                items.append(item(images, [], what))
    return Finding("imbalance", "classes with few images", items)


def choose_left_out(images: Images, survey: Survey, groups: list[np.ndarray]) -> dict[int, str]:
    """The images that training should leave out, and why.

    A group in several splits stays in the last of them only, so that a test set remains the same.
    If its labels differ there, all of it is left out, as nobody knows which label is right. Of
    equal files in training, the first is kept.
    """
    left_out = dict(survey.unreadable)
    for members in groups:
        split = images.split_of[members]
        kept = members[split == split.max()]
        where, first = images.splits[split.max()], images.shown(kept[0])
        for index in members[split < split.max()]:
            left_out[int(index)] = f"a duplicate is in {where}: {first}"
        labels = images.labels[kept]
        if np.ptp(labels) > 0:
            other = images.shown(kept[(labels != labels[0]).argmax()])
            for index, label in zip(kept, labels, strict=True):
                rival = other if label == labels[0] else first
                left_out[int(index)] = f"conflicting label: {rival}"
        elif where == "train":
            kept_of: dict[int, int] = {}
            for index, digest in zip(kept, survey.stats["digest"][kept].tolist(), strict=True):
                original = kept_of.setdefault(digest, index)
                if original != index:
                    left_out[int(index)] = f"the same bytes as {images.shown(original)}"
    return left_out


def summarise(images: Images, survey: Survey) -> dict[str, Any]:
    """Sizes, file types and colours."""
    readable = survey.stats["height"] > 0
    sizes, colours = {}, {}
    for side in ("width", "height"):
        if readable.any():
            low, middle, high = np.percentile(survey.stats[side][readable], (0, 50, 100))
            sizes[side] = {"min": int(low), "median": int(middle), "max": int(high)}
    first = survey.stats[readable & (images.split_of == 0)]  # training, if it was checked
    if len(first):
        mean, square = first["mean"].mean(0), first["square"].mean(0)
        std = np.sqrt(np.maximum(0, square - mean**2))
        colours = {"mean": (mean / 255).round(4).tolist(), "std": (std / 255).round(4).tolist()}
    return {"sizes": sizes, "kinds": dict(survey.kinds.most_common()), "colours": colours}


def lines(report: dict[str, Any], findings: list[Finding], images: Images) -> Iterator[str]:
    """The report for the terminal: findings, serious ones first, then a summary."""
    for finding in findings:
        if finding.items:
            yield f"\n{'! ' * finding.is_serious}{finding.title}: {len(finding.items):,}"
        for found in finding.items[:MAX_LINES]:
            names = " = ".join(ascii(entry["path"]) for entry in examples(found["images"]))
            more = len(found["images"]) - MAX_NAMES
            names += f" and {more:,} more" if more > 0 else ""
            yield f"  {names}: {found['what']}" if names else f"  {found['what']}"
        if len(finding.items) > MAX_LINES:
            yield f"  and {len(finding.items) - MAX_LINES:,} more: --json FILE has all"
    counts = ", ".join(f"{split} {sum(n.values()):,}" for split, n in report["images"].items())
    yield f"\nimages: {counts}; {len(images.classes):,} classes"
    for source in images.sources:
        yield from source.notes
    for name, title in (("kinds", "files"), ("skipped", "not images")):
        if any(report[name].values()):
            pairs = report[name].items()
            yield f"{title}: " + ", ".join(f"{count:,} {what}" for what, count in pairs if count)
    if report["sizes"]:
        yield "pixels: " + ", ".join(
            f"{side} {size['min']:,} to {size['max']:,} (median {size['median']:,})"
            for side, size in report["sizes"].items()
        )
    if report["colours"]:
        mean, std = (", ".join(map(str, report["colours"][name])) for name in ("mean", "std"))
        yield f"colours of {images.splits[0]}: mean=({mean}), std=({std})"


def examples(entries: list[dict[str, str]]) -> list[dict[str, str]]:
    """A few images of a group, of different splits and classes first."""
    firsts = {(entry["split"], entry["class"]): entry for entry in reversed(entries)}
    others = [entry for entry in entries if entry not in firsts.values()]
    return [*reversed(firsts.values()), *others][:MAX_NAMES]


def conclusion(images: Images, serious: int, num_left_out: int, quarantine: bool) -> str:
    """The last line."""
    if quarantine and num_left_out:
        path = ascii(str(quarantine_path(images.data)))
        return f"\n{num_left_out:,} images added to {path}: training leaves them out"
    advice = (
        "; --quarantine makes training leave them out"
        if images.sources[0].paths is not None
        else ""
    )
    return (
        f"\n{serious:,} serious findings, marked by !{advice}" if serious else "\nnothing serious"
    )


def write_to(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file, and create its folder.

    Raises:
        UserError: if it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!a}: {error.strerror}") from error
