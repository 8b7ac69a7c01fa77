"""All images of a dataset, each read once: its size, its contrast, a digest, a small gray image."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool

import numpy as np

from ...config import DataConfig
from ...data import BadImageError, Source, open_files, resize
from ...runtime.console import Progress, printable_path
from ...runtime.machine import num_cores, one_thread

CHUNK = 64  # images per task
SIDE = 64  # pixels of a side of the small images


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
        self.sizes = np.zeros((count, 2), np.int32)  # height and width
        self.digests = np.zeros(count, np.uint64)  # of the files' bytes
        self.brightest = np.zeros(count, np.uint16)  # of the pixels of the small image
        self.spread = np.zeros(count, np.uint16)  # brightest minus darkest, largest of the channels
        self.grays = np.zeros((count, SIDE, SIDE), np.uint8)
        self.unreadable: dict[int, str] = {}  # reasons by image number
        progress = Progress(count)
        # In threads: decoding does not hold Python's lock. They would share what draws random
        # numbers.
        most = 1 if any(source.is_random for source in self.sources) else num_cores()
        with warnings.catch_warnings(), one_thread(), ThreadPool(most) as pool:
            warnings.simplefilter("ignore")  # Pillow's: they are findings here, or do not matter
            for done, _ in enumerate(pool.imap(self.read, range(count), CHUNK)):
                progress.show(done)
        self.unreadable = dict(sorted(self.unreadable.items()))
        self.is_readable = self.sizes[:, 0] > 0

    def place(self, index: int) -> tuple[Source, int]:
        """The split that an image is in, and its number there."""
        return self.sources[self.split_of[index]], int(self.number[index])

    def read(self, index: int) -> None:
        """Read an image as training does, and keep what is checked."""
        source, number = self.place(index)
        try:
            pixels = source.read(number)
            is_file = source.paths is not None
            content = source.paths.read(number) if is_file else pixels.numpy().tobytes()
        except (BadImageError, OSError) as error:
            self.unreadable[index] = getattr(error, "reason", str(error))
            return
        small = resize(pixels, SIDE, SIDE).numpy()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        self.sizes[index] = pixels.shape[:2]
        self.digests[index] = int.from_bytes(digest, "little")
        self.brightest[index] = small.max()
        self.spread[index] = np.ptp(small, axis=(0, 1)).max()
        self.grays[index] = gray(small)

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
        return {"path": os.fsdecode(self.name(index)), "split": self.split(index), "class": name}

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
