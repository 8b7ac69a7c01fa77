"""An audit of all images before training: what can't be read, or stands in two places.

Each file is read once, as training reads it (`survey.py`), and leaves a row of numbers and a small
grey picture, by which those that are the same are told (`twins.py`).
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...config import DataConfig, UserError
from ...data import format_quarantine, quarantine_path, read_quarantine, skipped_files, splits_of
from ...runtime.console import clock, say
from ...runtime.printable import printable_path
from ...runtime.run_dir import write_json, write_text
from .near_duplicates import find_twins, groups_of
from .survey import Images, Survey, look_at_all, run_in_threads

PLAIN = 8  # of 255: what the noise of a JPEG may make of one colour
TINY, HUGE_PIXELS = 16, 16_000_000  # pixels of the shorter side; and in all, slow to decode
IMBALANCED = 10  # times as many images as another class has
LINES, NAMES = 10, 3  # of each finding on the terminal, and of images in a line


@dataclass
class Finding:
    """Something that is not as it should be, as often as it was found."""

    name: str  # in JSON
    title: str
    is_serious: bool
    items: list[dict[str, Any]]  # each has `images` and what is said of them


def check(data: DataConfig, splits: Sequence[str], json: str, quarantine: bool) -> int:
    """Audit a dataset and say what is found; the number of serious findings that are left.

    With `json` all is written to that file, with `quarantine` what training should leave out is
    added to the dataset's list.

    Raises:
        UserError: if the dataset can't be opened, or a file not be written.
    """
    began = time.monotonic()
    is_folder = data.name == "folder" and Path(data.root).is_dir()
    images = Images(data, splits or (splits_of(Path(data.root)) if is_folder else ("train", "val")))
    if quarantine and images.sources[0].paths is None:
        raise UserError(f"--quarantine lists files, and {data.name} has none: it is in memory")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what is a finding here or of no matter
        survey = look_at_all(images)
    groups = find_groups(survey)
    findings = [
        *find_unreadable(images, survey),
        *find_copies(images, survey, groups),
        *find_odd(images, survey),
        *find_lopsided(images),
    ]
    left_out = choose_left_out(images, survey, groups)
    report = {
        "root": data.root,
        "images": images.counts(),
        **facts(images, survey),
        "skipped": dict(skipped_files(Path(data.root))) if is_folder else {},
        "findings": {finding.name: finding.items for finding in findings},
        "quarantine": {os.fsdecode(images.name(n)): why for n, why in left_out.items()},
    }
    if json:
        write_to(Path(json), lambda path: write_json(path, report))
    if quarantine and left_out:
        listed = read_quarantine(data) | {images.name(n): why for n, why in left_out.items()}
        write_to(quarantine_path(data), lambda path: write_text(path, format_quarantine(listed)))
    say(f"{len(images):,} images looked at in {clock(time.monotonic() - began)}")
    for line in lines(report, findings, images):
        say(line)
    serious = sum(len(finding.items) for finding in findings if finding.is_serious)
    say(verdict(images, serious, len(left_out), quarantine))
    return 0 if quarantine else serious


def find_groups(survey: Survey) -> list[np.ndarray]:
    """The numbers of images that are the same, wherever there is more than one; largest first."""
    numbers = np.flatnonzero(survey.looks["height"] > 0)  # of what could be read
    if not len(numbers):
        return []
    _, first, content = np.unique(
        survey.looks["digest"][numbers], return_index=True, return_inverse=True
    )
    same = torch.from_numpy(np.stack((numbers, numbers[first][content]), axis=1))
    # Of equal files one is compared with the others.
    alike = find_twins(survey.pictures, np.sort(numbers[first]), run_in_threads)
    group = groups_of(torch.cat((same, alike)), len(survey.looks)).numpy()
    members = np.flatnonzero(np.bincount(group)[group] > 1)
    members = members[np.argsort(group[members], kind="stable")]
    parts = np.split(members, np.flatnonzero(np.diff(group[members])) + 1)
    return sorted((part for part in parts if len(part)), key=len, reverse=True)


def find_unreadable(images: Images, survey: Survey) -> Iterator[Finding]:
    """Files that training would stop at."""
    items = [
        {"images": [images.entry(index)], "what": survey.unreadable[index]}
        for index in survey.unreadable
    ]
    yield Finding("unreadable", "files that can't be read", is_serious=True, items=items)


def find_copies(images: Images, survey: Survey, groups: list[np.ndarray]) -> Iterator[Finding]:
    """The same picture in several places: what is worst of each."""
    leaks, conflicts, copies = [], [], []
    for members in groups:
        is_leak = np.ptp(images.split_of[members]) > 0
        is_conflict = np.ptp(images.labels[members]) > 0
        digests = survey.looks["digest"][members]
        item = {
            "images": [images.entry(index) for index in members],
            "what": "the same bytes" if (digests == digests[0]).all() else "the same picture",
        }
        if is_leak:
            leaks.append(item)
        if is_conflict:
            conflicts.append(item)
        if not is_leak and not is_conflict:
            copies.append(item)
    yield Finding("leaks", "pictures in more than one split", is_serious=True, items=leaks)
    yield Finding(
        "conflicts", "pictures with more than one label", is_serious=True, items=conflicts
    )
    yield Finding("copies", "pictures that are in one split again", is_serious=False, items=copies)


def find_odd(images: Images, survey: Survey) -> Iterator[Finding]:
    """Images that can be read, and may be of no use."""
    height, width = survey.looks["height"], survey.looks["width"]
    shorter, pixels = np.minimum(height, width), height.astype(np.int64) * width
    for name, title, which in (
        ("plain", "images of one colour", (survey.looks["range"] <= PLAIN) & (shorter > 0)),
        (
            "tiny",
            f"images with a side of less than {TINY} pixels",
            (shorter > 0) & (shorter < TINY),
        ),
        (
            "huge",
            "images of more than 16 megapixels, which `prepare` makes smaller",
            pixels > HUGE_PIXELS,
        ),
    ):
        items = [
            {"images": [images.entry(n)], "what": f"{width[n]} x {height[n]}"}
            for n in np.flatnonzero(which)
        ]
        yield Finding(name, title, is_serious=False, items=items)
    items = [
        {"images": [images.entry(n)], "what": f"its highest value is {survey.dark[n]:,} of 65,535"}
        for n in survey.dark
    ]
    yield Finding(
        "dark",
        "16-bit grey images that become all but black: scale them, or save them with 8 bits",
        is_serious=False,
        items=items,
    )
    items = [
        {"images": [images.entry(n)], "what": f"it is {survey.misnamed[n]}"}
        for n in survey.misnamed
    ]
    yield Finding(
        "misnamed", "files of another format than their suffix says", is_serious=False, items=items
    )


def find_lopsided(images: Images) -> Iterator[Finding]:
    """Classes that are rare, or missing in a split."""
    items = []
    for split, counts in images.counts().items():
        most = max(counts, key=counts.__getitem__)
        for name, count in sorted(counts.items(), key=lambda pair: pair[1]):
            if count * IMBALANCED <= counts[most]:
                what = f"{split} has {count:,} images of {name!a}, and {counts[most]:,} of {most!a}"
                items.append({"images": [], "what": what})
    yield Finding("lopsided", "classes with few images", is_serious=False, items=items)


def choose_left_out(images: Images, survey: Survey, groups: list[np.ndarray]) -> dict[int, str]:
    """The images that training should leave out, and why, as long as the splits are the same.

    Of a picture in several splits all are left out but those of the last, so that a test stays the
    same test. Of those, all are if their labels differ, as no one knows which is right. Of files in
    training with the same bytes one is kept.
    """
    left_out = dict(survey.unreadable)
    for members in groups:
        split = images.split_of[members]
        kept = members[split == split.max()]
        for index in members[split < split.max()]:
            where = images.splits[split.max()]
            left_out[int(index)] = f"the picture is in {where} too: {show(images, kept[0])}"
        labels = images.labels[kept]
        if np.ptp(labels) > 0:
            other = kept[(labels != labels[0]).argmax()]
            for index, label in zip(kept, labels, strict=True):
                where = show(images, other if label == labels[0] else kept[0])
                left_out[int(index)] = f"the picture has another label too: {where}"
        elif images.splits[split.max()] == "train":
            kept_of: dict[int, int] = {}
            for index, digest in zip(kept, survey.looks["digest"][kept].tolist(), strict=True):
                first = kept_of.setdefault(digest, index)
                if first != index:
                    left_out[int(index)] = f"the same bytes as {show(images, first)}"
    return left_out


def show(images: Images, index: int) -> str:
    """The path of an image as a list has it."""
    return printable_path(images.name(index))


def facts(images: Images, survey: Survey) -> dict[str, Any]:
    """What the images are like."""
    readable = survey.looks["height"] > 0
    sizes, colours = {}, {}
    for side in ("width", "height"):
        if readable.any():
            low, middle, high = np.percentile(survey.looks[side][readable], (0, 50, 100))
            sizes[side] = {"min": int(low), "median": int(middle), "max": int(high)}
    first = survey.looks[readable & (images.split_of == 0)]  # of training, if that is there
    if len(first):
        mean, square = first["mean"].mean(0), first["square"].mean(0)
        std = np.sqrt(np.maximum(0, square - mean**2))
        colours = {"mean": (mean / 255).round(4).tolist(), "std": (std / 255).round(4).tolist()}
    return {"sizes": sizes, "kinds": dict(survey.kinds.most_common()), "colours": colours}


def lines(report: dict[str, Any], findings: list[Finding], images: Images) -> Iterator[str]:
    """The audit as a person reads it: the worst first, and then what all are like."""
    for finding in findings:
        if finding.items:
            mark = "! " if finding.is_serious else ""
            yield f"\n{mark}{finding.title}: {len(finding.items):,}"
        for item in finding.items[:LINES]:
            names = " = ".join(ascii(entry["path"]) for entry in spread(item["images"]))
            more = len(item["images"]) - NAMES
            names += f" and {more:,} more" if more > 0 else ""
            yield f"  {names}: {item['what']}" if names else f"  {item['what']}"
        if len(finding.items) > LINES:
            yield f"  and {len(finding.items) - LINES:,} more: --json FILE has all"
    counts = ", ".join(
        f"{split} {sum(classes.values()):,}" for split, classes in report["images"].items()
    )
    yield f"\nimages: {counts}; {len(images.classes):,} classes"
    for source in images.sources:
        yield from source.notes
    for name in ("kinds", "skipped"):
        told = ", ".join(f"{count:,} {what}" for what, count in report[name].items() if count)
        if told:
            yield {"kinds": "files: ", "skipped": "not taken for images: "}[name] + told
    if report["sizes"]:
        told = ", ".join(
            f"{side} {size['min']:,} to {size['max']:,} (median {size['median']:,})"
            for side, size in report["sizes"].items()
        )
        yield f"pixels: {told}"
    if report["colours"]:
        mean, std = (", ".join(map(str, report["colours"][name])) for name in ("mean", "std"))
        yield f"colours of {images.splits[0]}: mean=({mean}), std=({std})"


def spread(entries: list[dict[str, str]]) -> list[dict[str, str]]:
    """A few of the images of a picture, of different splits and classes first."""
    firsts = {(entry["split"], entry["class"]): entry for entry in reversed(entries)}
    others = [entry for entry in entries if entry not in firsts.values()]
    return [*reversed(firsts.values()), *others][:NAMES]


def verdict(images: Images, serious: int, num_left_out: int, quarantine: bool) -> str:
    """The last line."""
    path = ascii(str(quarantine_path(images.data)))
    if quarantine and num_left_out:
        return f"\n{num_left_out:,} more to leave out, as {path} says now"
    if not serious:
        return "\nnothing serious"
    in_files = images.sources[0].paths is not None
    advice = f"; with --quarantine training leaves them out ({path})" if in_files else ""
    return f"\n{serious:,} serious, marked by !{advice}"


def write_to(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file, and the folder that it is in.

    Raises:
        UserError: if it can't be.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!a}: {error.strerror}") from error
