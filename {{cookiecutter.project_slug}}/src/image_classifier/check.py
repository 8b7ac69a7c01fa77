"""An audit of all images before training: what can't be read, or stands in two places.

Each file is read once, as training reads it, and leaves a row of numbers and a small grey picture,
of which `twins` tells those that are the same.
"""

import contextlib
import hashlib
import io
import multiprocessing
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from PIL import Image

from .config import DataConfig, UserError
from .datasets import open_dataset
from .datasets.folder import skipped_files, splits_of
from .datasets.quarantine import (
    format_quarantine,
    path_from_root,
    quarantine_path,
    read_quarantine,
    show_name,
)
from .datasets.source import Source
from .decode import FORMATS, ORIENTATION, read_image, resize
from .machine import call_libc, num_cores
from .prepare import say, work_in_threads
from .report import clock
from .run import write_json, write_text
from .stream import FORKS
from .twins import SIDE, find_twins, groups_of

TOGETHER = 64  # images that are looked at as one task
MANY = 1000  # images, from which on processes read them
GRID = 64  # rows and columns of an image, about, whose colours are counted
PLAIN = 8  # of 255: what the noise of a JPEG may make of one colour
TINY, HUGE_PIXELS = 16, 16_000_000  # pixels of the shorter side; and in all, slow to decode
IMBALANCED = 10  # times as many images as another class has
LINES, NAMES = 10, 3  # of each finding on the terminal, and of images in a line
SUFFIXES_OF = {"JPEG": (".jpg", ".jpeg"), "TIFF": (".tif", ".tiff")}  # others have their own name

# What is kept of an image. Colours are those of a grid of its pixels, from 0 to 255.
LOOK = np.dtype(
    [
        ("digest", "u8"),  # of the bytes of its file
        ("height", "i4"),
        ("width", "i4"),
        ("mean", "f8", 3),
        ("square", "f8", 3),
        ("range", "u1"),  # from the darkest to the brightest, in the channel where that is most
    ]
)


class Images:
    """All images of some splits of a dataset, numbered through."""

    def __init__(self, data: DataConfig, splits: Sequence[str]) -> None:
        """Open `splits` of the dataset that `data` names, as the files are.

        Raises:
            UserError: if one can't be.
        """
        self.data, self.splits = data, tuple(splits)
        data = replace(data, limit=0, prepared=False)
        self.sources = [open_dataset(data, split) for split in splits]
        self.ends = np.cumsum([len(source) for source in self.sources])
        # A class has the same number in each of them, also where each has folders of its own.
        names = dict.fromkeys(name for source in self.sources for name in source.classes)
        self.classes = tuple(names)
        number_of = {name: number for number, name in enumerate(names)}
        numbers = [np.array([number_of[name] for name in s.classes]) for s in self.sources]
        parts = zip(numbers, self.sources, strict=True)
        self.labels = np.concatenate([n[source.labels.numpy()] for n, source in parts])
        self.split_of = np.repeat(np.arange(len(splits)), [len(s) for s in self.sources])

    def __len__(self) -> int:
        """How many there are."""
        return int(self.ends[-1])

    def find(self, index: int) -> tuple[Source, int]:
        """The source of image `index`, and its number there."""
        split = self.split_of[index]
        return self.sources[split], int(index - self.ends[split] + len(self.sources[split]))

    def name(self, index: int) -> bytes:
        """The path of its file from `data.root`; of an image in memory, such as `train[5]`."""
        source, number = self.find(index)
        if source.paths is None:
            return f"{self.splits[self.split_of[index]]}[{number}]".encode()
        return path_from_root(source, self.data, number)

    def entry(self, index: int) -> dict[str, str]:
        """What a finding says of it."""
        split, label = self.split_of[index], self.labels[index]
        path = os.fsdecode(self.name(index))
        return {"path": path, "split": self.splits[split], "class": self.classes[label]}

    def counts(self) -> dict[str, dict[str, int]]:
        """Images of each class, by split."""
        table = np.zeros((len(self.splits), len(self.classes)), dtype=int)
        np.add.at(table, (self.split_of, self.labels), 1)
        rows = zip(self.splits, table.tolist(), strict=True)
        return {split: dict(zip(self.classes, row, strict=True)) for split, row in rows}


@dataclass
class Survey:
    """What was seen of all images."""

    looks: np.ndarray  # (count,) of LOOK
    pictures: np.ndarray  # (count, SIDE, SIDE) uint8, grey
    unreadable: dict[int, str] = field(default_factory=dict)  # the reason, by image
    misnamed: dict[int, str] = field(default_factory=dict)  # the format, by image
    kinds: Counter[str] = field(default_factory=Counter)  # formats, modes and the like


READER: Images | None = None  # in a process that reads: what it reads


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


def look_at_all(images: Images) -> Survey:
    """Read every image once."""
    survey, count = empty_survey(len(images)), len(images)
    with open_readers(images) as read:

        def look(number: int) -> None:
            first = number * TOGETHER
            part = read(first, min(first + TOGETHER, count))
            survey.looks[first : first + TOGETHER] = part.looks
            survey.pictures[first : first + TOGETHER] = part.pictures
            told.append((part.unreadable, part.misnamed, part.kinds))

        told: list[tuple[dict[int, str], dict[int, str], Counter[str]]] = []
        run_in_threads(look, -(-count // TOGETHER), "read")
    for unreadable, misnamed, kinds in told:
        survey.unreadable |= unreadable
        survey.misnamed |= misnamed
        survey.kinds += kinds
    survey.unreadable = dict(sorted(survey.unreadable.items()))  # not as they were come upon
    survey.misnamed = dict(sorted(survey.misnamed.items()))
    return survey


def empty_survey(count: int) -> Survey:
    """A survey of images that are not looked at yet."""
    return Survey(np.zeros(count, LOOK), np.zeros((count, SIDE, SIDE), np.uint8))


@contextlib.contextmanager
def open_readers(images: Images) -> Iterator[Callable[[int, int], Survey]]:
    """What looks at images from one number to another, in a process of its own if there are many.

    With small images most of the work is Python's, of which threads do no more than one at a time.
    """
    if not FORKS or len(images) < MANY:
        yield lambda first, last: look_at_some(images, first, last)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_cores(), context, begin_reader, (images,)) as pool:
        pool.submit(int).result()  # forks all of them, before there are threads here
        yield lambda first, last: pool.submit(read_some, first, last).result()


def begin_reader(images: Images) -> None:
    """Let a process, which has been forked, read `images`."""
    global READER  # noqa: PLW0603 - a process has one
    READER = images
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process tells it to end
    call_libc("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG: and if that is killed, the kernel


def read_some(first: int, last: int) -> Survey:
    """`look_at_some` of this process's images."""
    assert READER is not None
    return look_at_some(READER, first, last)


def look_at_some(images: Images, first: int, last: int) -> Survey:
    """A survey of the images from `first` to `last`, by their numbers among all."""
    part = empty_survey(last - first)
    for row in range(last - first):
        look_at(images, first + row, part, row)
    return part


def run_in_threads(work: Callable[[int], None], count: int, name: str) -> None:
    """Do `work` for each number below `count`, in threads: decoding and products hold no lock."""
    began, done = time.monotonic(), [0] * count

    def counted(number: int) -> None:
        work(number)
        done[number] = 1

    def progress() -> str:
        share, seconds = sum(done) / count, time.monotonic() - began
        left = clock(seconds / share * (1 - share)) if share else "?"
        return f"{name}: {share:.0%}, left {left}"

    work_in_threads(counted, count, Event(), progress)


def look_at(images: Images, index: int, survey: Survey, row: int) -> None:
    """Fill an image's row of a survey, or say why it can't be read."""
    source, number = images.find(index)
    if source.paths is None:
        pixels = source.read(number)
        content = pixels.numpy().tobytes()
    else:
        path = source.paths[number]
        try:
            pixels = read_image(path)
            content = path.read_bytes()
        except (UserError, OSError) as error:
            reason = str(error).removeprefix(f"cannot read image {os.fspath(path)!a}: ")
            survey.unreadable[index] = reason
            return
        look_at_head(content, path, index, survey)
    look = survey.looks[row]
    look["digest"] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    look["height"], look["width"] = height, width = pixels.shape[:2]
    grid = pixels[:: max(1, height // GRID), :: max(1, width // GRID)].reshape(-1, 3).numpy()
    planes = grid.T.astype(np.float64, order="C")  # one for each colour: a row is fast to sum
    look["mean"], look["square"] = planes.mean(1), np.square(planes).mean(1)
    look["range"] = (planes.max(1) - planes.min(1)).max()
    survey.pictures[row] = grey(resize(pixels, SIDE, SIDE).numpy())


def grey(pixels: np.ndarray) -> np.ndarray:
    """(height, width, 3) uint8 -> (height, width) uint8, by the weights of JPEG."""
    return (pixels @ np.array([77, 150, 29], np.uint32) >> 8).astype(np.uint8)


def look_at_head(content: bytes, path: Path, index: int, survey: Survey) -> None:
    """Count what kind of file it is."""
    kinds = survey.kinds
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            form = "JPEG" if image.format == "MPO" else str(image.format)  # with a second picture
            kinds[f"{form} {image.mode}"] += 1
            has_exif = "exif" in image.info or form == "TIFF"
            kinds["turned by EXIF"] += has_exif and image.getexif().get(ORIENTATION, 1) != 1
            is_animated = image.format != "MPO" and getattr(image, "is_animated", False)
            kinds["animated: only the first picture is read"] += is_animated
            kinds["transparent: shown over white"] += image.has_transparency_data
    except Exception:  # it was read all the same, and this is only to count
        return
    if path.suffix.lower() not in SUFFIXES_OF.get(form, (f".{form.lower()}",)):
        survey.misnamed[index] = form


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
    return show_name(images.name(index))


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
