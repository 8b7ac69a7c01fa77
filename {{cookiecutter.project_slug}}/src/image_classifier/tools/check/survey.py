"""All images of a dataset, each read once: statistics and a small gray image of each."""

import hashlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.pool import ThreadPool

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ...config import DataConfig
from ...data import BadImageError, Source, open_files, resize
from ...errors import UserError
from ...runtime.console import Progress, printable_path
from ...runtime.machine import num_cores, one_thread
from .near_duplicates import FINE_SIDE, SIDE

CHUNK = 64  # images per task
GRID = 64  # rows and columns of an image, about, whose pixels are counted
TO_WIDE = 257  # 255 becomes 65535
DARK = 64  # of 255: an image that stays below looks nearly black


def stats_of(channels: int) -> np.dtype:
    """What is kept of an image; numbers of 16 bits count as parts of 255, too."""
    return np.dtype(
        [
            ("digest", "u8"),  # of the file's bytes
            ("height", "i4"),  # 0: unreadable
            ("width", "i4"),
            ("mean", "f8", channels),  # of each channel, from 0 to 255
            ("square", "f8", channels),  # mean of the squares
            ("range", "u1"),  # brightest minus darkest, the largest of the channels
        ]
    )


class Images:
    """All images of some splits of a dataset, numbered consecutively."""

    def __init__(self, data: DataConfig, splits: Sequence[str]) -> None:
        """Open `splits` of the dataset that `data` names, as the original files, and read all.

        Raises:
            UserError: if one can't be opened, or a label is not the number of a class.
        """
        self.data = data
        sources = {split: open_files(data, split) for split in splits}
        self.splits = tuple(sources)
        for split, source in sources.items():
            source.check_labels(split)
        # A class has the same number in all splits, also where each has folders of its own.
        self.classes = tuple(dict.fromkeys(name for s in sources.values() for name in s.classes))
        self.sources = [source.numbered(self.classes, split) for split, source in sources.items()]
        self.split_of = np.repeat(np.arange(len(sources)), [len(s) for s in self.sources])
        self.number = np.concatenate([np.arange(len(s)) for s in self.sources])  # in its split
        self.labels = np.concatenate([s.labels.numpy() for s in self.sources])
        count = len(self.labels)
        self.stats = np.zeros(count, stats_of(data.channels))
        self.grays = np.zeros((count, SIDE, SIDE), np.uint8)
        self.kinds = [""] * count  # format and mode of each file
        self.unreadable: dict[int, str] = {}  # reasons by image number
        self.dark: dict[int, str] = {}  # highest values of dark 16-bit images, likewise
        progress = Progress(count)
        # In threads: decoding does not hold Python's lock.
        with one_thread(), ThreadPool(num_cores()) as pool:
            for done, _ in enumerate(pool.imap(self.read, range(count), CHUNK)):
                progress.show(done)
        self.unreadable = dict(sorted(self.unreadable.items()))
        self.dark = dict(sorted(self.dark.items()))

    def place(self, index: int) -> tuple[Source, int]:
        """The split that an image is in, and its number there."""
        return self.sources[self.split_of[index]], int(self.number[index])

    def read(self, index: int) -> None:
        """Read an image as training does, and keep what is checked."""
        source, number = self.place(index)
        if source.paths is None:
            pixels = source.read(number)
            content = pixels.numpy().tobytes()
        else:
            path = source.paths[number]
            try:
                pixels = source.paths.image(number, source.channels, source.bits)
                self.kinds[index] = sys.intern(path.suffix[1:].upper())
                content = source.paths.read(number)
                with suppress(UnidentifiedImageError), Image.open(io.BytesIO(content)) as image:
                    self.kinds[index] = sys.intern(f"{image.format} {image.mode}")
            except (BadImageError, OSError) as error:
                self.unreadable[index] = getattr(error, "reason", str(error))
                return
        height, width = pixels.shape[:2]
        grid = pixels[:: max(1, height // GRID), :: max(1, width // GRID)].flatten(0, 1).numpy()
        planes = grid.T.astype(np.float64, order="C")  # one per channel: a row is fast to sum
        if source.bits == 16:
            planes /= TO_WIDE
        if source.bits == 8 and planes.max() < DARK and source.paths is not None:
            self.look_at_dark(index, pixels.numpy())
        spread = (planes.max(1) - planes.min(1)).max()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        mean = planes.mean(1)
        square = np.square(planes).mean(1)
        self.stats[index] = digest, height, width, mean, square, spread
        self.grays[index] = gray(resize(pixels, SIDE, SIDE).numpy())

    def look_at_dark(self, index: int, pixels: np.ndarray) -> None:
        """Note an image if it is dark because only the upper 8 of its 16 bits are kept."""
        if (top := int(pixels.max())) >= DARK:
            return
        source, number = self.place(index)
        try:
            wide = source.paths.image(number, source.channels, 16).numpy()
            if (wide % TO_WIDE).any():  # else it has 8 bits
                self.dark[index] = f"its highest value is {int(wide.max()):,} of 65,535"
        except UserError:  # 16-bit colors, for which a library is missing
            self.dark[index] = f"its highest value is less than {(top + 1) << 8:,} of 65,535"

    def fine_grays(self, numbers: np.ndarray) -> Tensor:
        """Larger gray images of some, which are read again: (count, FINE_SIDE, FINE_SIDE) uint8.

        One that is unreadable by now is black.
        """
        grays = np.zeros((len(numbers), FINE_SIDE, FINE_SIDE), np.uint8)

        def read(row: int) -> None:
            source, number = self.place(numbers[row])
            with suppress(BadImageError, OSError):
                grays[row] = gray(resize(source.read(number), FINE_SIDE, FINE_SIDE).numpy())

        with one_thread(), ThreadPool(num_cores()) as pool:
            pool.map(read, range(len(numbers)))
        return torch.from_numpy(grays)

    def split(self, index: int) -> str:
        """The name of the split that an image is in."""
        return self.splits[self.split_of[index]]

    def name(self, index: int) -> bytes:
        """The file's path from `data.root`, or such as `train[5]` for an image in memory."""
        source, number = self.place(index)
        if source.paths is None:
            return f"{self.split(index)}[{number}]".encode()
        return source.paths.from_folder(self.data.root, number)

    def shown(self, index: int) -> str:
        """The path as the quarantine list has it."""
        return printable_path(self.name(index))

    def entry(self, index: int) -> dict[str, str]:
        """The image as a finding lists it."""
        label = self.labels[index]
        several = np.flatnonzero(label == 1) if self.labels.ndim == 2 else [label]
        name = "|".join(self.classes[number] for number in several)
        path = os.fsdecode(self.name(index))
        return {"path": path, "split": self.split(index), "class": name}

    def is_conflict(self, members: np.ndarray) -> bool:
        """Whether the labels of images differ; unknown ones do not."""
        labels = self.labels[members]
        if labels.ndim == 1:
            return bool(np.ptp(labels))
        return bool(((labels == 1).any(0) & (labels == 0).any(0)).any())

    def counts(self) -> dict[str, dict[str, int]]:
        """Images per class, by split."""
        tables = (source.class_counts().tolist() for source in self.sources)
        of_classes = (dict(zip(self.classes, table, strict=True)) for table in tables)
        return dict(zip(self.splits, of_classes, strict=True))


def gray(pixels: np.ndarray) -> np.ndarray:
    """(height, width, channels) -> (height, width) uint8: colors with the weights of JPEG."""
    pixels = pixels if pixels.dtype == np.uint8 else (pixels >> 8).astype(np.uint8)
    if pixels.shape[2] != 3:
        return pixels.mean(2).astype(np.uint8)
    return (pixels @ np.array([77, 150, 29], np.uint32) >> 8).astype(np.uint8)
