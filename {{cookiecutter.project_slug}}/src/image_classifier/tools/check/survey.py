"""Reads every image once, as training does, and keeps statistics and a small grey image of each."""

import contextlib
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from ...config import DataConfig
from ...data import (
    BadImageError,
    Source,
    open_files,
    read_image,
    resize,
)
from ...runtime.console import clock, printable_path, say
from ...runtime.machine import num_cores, one_thread
from .near_duplicates import SIDE

CHUNK = 64  # images per task
GRID = 64  # rows and columns of an image, about, whose colours are counted
DARK = 64  # of 255: an image that stays below looks nearly black
LIVE_SECONDS, LOG_SECONDS = 0.5, 10  # between lines of progress, on a terminal and in a log

STATS = np.dtype(
    [
        ("digest", "u8"),  # of the file's bytes
        ("height", "i4"),  # 0: unreadable
        ("width", "i4"),
        ("mean", "f8", 3),  # of each colour, from 0 to 255
        ("square", "f8", 3),  # mean of the squares
        ("range", "u1"),  # brightest minus darkest, the largest of the colours
    ]
)


class Images:
    """All images of some splits of a dataset, numbered consecutively."""

    def __init__(self, data: DataConfig, splits: Sequence[str]) -> None:
        """Open `splits` of the dataset that `data` names, as the original files.

        Raises:
            UserError: if one can't be opened.
        """
        self.data, self.splits = data, tuple(splits)
        self.sources = [open_files(data, split) for split in splits]
        self.ends = np.cumsum([len(source) for source in self.sources])
        # A class has the same number in all splits, also where each has folders of its own.
        names = dict.fromkeys(name for source in self.sources for name in source.classes)
        self.classes = tuple(names)
        number_of = {name: number for number, name in enumerate(names)}
        numbers = [np.array([number_of[name] for name in s.classes]) for s in self.sources]
        parts = zip(numbers, self.sources, strict=True)
        self.labels = np.concatenate([n[source.labels.numpy()] for n, source in parts])
        self.split_of = np.repeat(np.arange(len(splits)), [len(s) for s in self.sources])

    def __len__(self) -> int:
        """The number of images."""
        return int(self.ends[-1])

    def find(self, index: int) -> tuple[Source, int]:
        """The source of image `index`, and its number there."""
        split = self.split_of[index]
        return self.sources[split], int(index - self.ends[split] + len(self.sources[split]))

    def name(self, index: int) -> bytes:
        """The file's path from `data.root`, or such as `train[5]` for an image in memory."""
        source, number = self.find(index)
        if source.paths is None:
            return f"{self.splits[self.split_of[index]]}[{number}]".encode()
        return source.paths.from_folder(self.data.root, number)

    def shown(self, index: int) -> str:
        """The path as the quarantine list has it."""
        return printable_path(self.name(index))

    def entry(self, index: int) -> dict[str, str]:
        """The image as a finding lists it."""
        split, label = self.split_of[index], self.labels[index]
        path = os.fsdecode(self.name(index))
        return {"path": path, "split": self.splits[split], "class": self.classes[label]}

    def counts(self) -> dict[str, dict[str, int]]:
        """Images per class, by split."""
        table = np.zeros((len(self.splits), len(self.classes)), dtype=int)
        np.add.at(table, (self.split_of, self.labels), 1)
        rows = zip(self.splits, table.tolist(), strict=True)
        return {split: dict(zip(self.classes, row, strict=True)) for split, row in rows}


@dataclass
class Survey:
    """What is kept of all images; dicts are by image number."""

    stats: np.ndarray  # (count,) of STATS
    greys: np.ndarray  # (count, SIDE, SIDE) uint8
    unreadable: dict[int, str] = field(default_factory=dict)  # the reason
    dark: dict[int, int] = field(default_factory=dict)  # highest 16-bit value
    kinds: Counter[str] = field(default_factory=Counter)  # format, mode and the like


def survey_images(images: Images) -> Survey:
    """Read every image once, in threads: decoding does not hold Python's lock."""
    count, began = len(images), time.monotonic()
    survey = Survey(np.zeros(count, STATS), np.zeros((count, SIDE, SIDE), np.uint8))
    starts, said, is_live = range(0, count, CHUNK), began, sys.stdout.isatty()

    def read(start: int) -> list[str]:
        indices = range(start, min(start + CHUNK, count))
        return [kind for index in indices for kind in read_into(survey, images, index)]

    with one_thread(), ThreadPoolExecutor(num_cores()) as pool:
        for start, kinds in zip(starts, pool.map(read, starts), strict=True):
            survey.kinds.update(kinds)
            now = time.monotonic()
            if start and now - said > (LIVE_SECONDS if is_live else LOG_SECONDS):
                said, eta = now, clock((now - began) / start * (count - start))
                say(f"read: {start / count:.0%}, ETA {eta}", is_last=not is_live)
    found = (survey.unreadable, survey.dark)  # threads fill them in any order
    survey.unreadable, survey.dark = (dict(sorted(by_image.items())) for by_image in found)
    return survey


def read_into(survey: Survey, images: Images, index: int) -> list[str]:
    """Read one image into `survey`, and return what kind of file it is."""
    (source, number), kinds = images.find(index), []
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
            return []
        with contextlib.suppress(Exception):  # the image was decoded; this only counts
            kinds = inspect_header(survey, index, path)
    height, width = pixels.shape[:2]
    grid = pixels[:: max(1, height // GRID), :: max(1, width // GRID)].reshape(-1, 3).numpy()
    planes = grid.T.astype(np.float64, order="C")  # one per colour: a row is fast to sum
    spread = (planes.max(1) - planes.min(1)).max()
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    mean, square = planes.mean(1), np.square(planes).mean(1)
    survey.stats[index] = digest, height, width, mean, square, spread
    survey.greys[index] = grey(resize(pixels, SIDE, SIDE).numpy())
    return kinds


def grey(pixels: np.ndarray) -> np.ndarray:
    """(height, width, 3) uint8 -> (height, width) uint8, with the weights of JPEG."""
    return (pixels @ np.array([77, 150, 29], np.uint32) >> 8).astype(np.uint8)


def inspect_header(survey: Survey, index: int, path: Path) -> list[str]:
    """Note what is odd about a file, and return what kind it is."""
    with Image.open(path) as image:
        form = "JPEG" if image.format == "MPO" else str(image.format)  # with a second picture
        has_exif = "exif" in image.info or form == "TIFF"
        is_animated = image.format != "MPO" and getattr(image, "is_animated", False)
        is_kind = {
            f"{form} {image.mode}": True,
            "rotated by EXIF": has_exif and image.getexif().get(ExifTags.Base.Orientation, 1) != 1,
            "animated: only the first frame is used": is_animated,
            "transparent: shown over white": image.has_transparency_data,
        }
        if image.mode.startswith("I"):  # 16-bit grey, of which `read_image` keeps the upper 8 bits
            highest = int(image.convert("I").getextrema()[1])
            if (highest >> 8 if highest > 255 else highest) < DARK:
                survey.dark[index] = highest
    return [kind for kind, holds in is_kind.items() if holds]
