"""One look at every image of a dataset: what can be told of each by itself."""

import contextlib
import hashlib
import io
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import numpy as np
import torch
from PIL import Image

from ...config import DataConfig
from ...data import (
    CONTEXT,
    FORMATS,
    ORIENTATION,
    BadImageError,
    Source,
    highest_grey,
    is_dark,
    open_files,
    path_from_root,
    read_image,
    resize,
    work_in_threads,
)
from ...runtime.console import clock
from ...runtime.machine import end_with_parent, num_cores
from .near_duplicates import SIDE

TOGETHER = 64  # images that are looked at as one task
MANY = 1000  # images, from which on processes read them
GRID = 64  # rows and columns of an image, about, whose colours are counted
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
        self.sources = [open_files(data, split) for split in splits]
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
    dark: dict[int, int] = field(default_factory=dict)  # highest value of 16 bits, by image
    kinds: Counter[str] = field(default_factory=Counter)  # formats, modes and the like


READER: Images | None = None  # in a process that reads: what it reads


def look_at_all(images: Images) -> Survey:
    """Read every image once."""
    survey, count = empty_survey(len(images)), len(images)
    with open_readers(images) as read:

        def look(number: int) -> None:
            first = number * TOGETHER
            part = read(first, min(first + TOGETHER, count))
            survey.looks[first : first + TOGETHER] = part.looks
            survey.pictures[first : first + TOGETHER] = part.pictures
            told.append((part.unreadable, part.misnamed, part.dark, part.kinds))

        told: list[tuple[dict[int, str], dict[int, str], dict[int, int], Counter[str]]] = []
        run_in_threads(look, -(-count // TOGETHER), "read")
    for unreadable, misnamed, dark, kinds in told:
        survey.unreadable |= unreadable
        survey.misnamed |= misnamed
        survey.dark |= dark
        survey.kinds += kinds
    survey.unreadable = dict(sorted(survey.unreadable.items()))  # not as they were come upon
    survey.misnamed = dict(sorted(survey.misnamed.items()))
    survey.dark = dict(sorted(survey.dark.items()))
    return survey


def empty_survey(count: int) -> Survey:
    """A survey of images that are not looked at yet."""
    return Survey(np.zeros(count, LOOK), np.zeros((count, SIDE, SIDE), np.uint8))


@contextlib.contextmanager
def open_readers(images: Images) -> Iterator[Callable[[int, int], Survey]]:
    """What looks at images from one number to another, in a process of its own if there are many.

    With small images most of the work is Python's, of which threads do no more than one at a time.
    """
    if CONTEXT != "fork" or len(images) < MANY:
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
    end_with_parent(signal.SIGKILL)  # and if that is killed, the system


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
        except (BadImageError, OSError) as error:
            survey.unreadable[index] = getattr(error, "reason", str(error))
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
            highest = highest_grey(image)
            if highest is not None and is_dark(highest):
                survey.dark[index] = highest
    except Exception:  # it was read all the same, and this is only to count
        return
    if path.suffix.lower() not in SUFFIXES_OF.get(form, (f".{form.lower()}",)):
        survey.misnamed[index] = form
