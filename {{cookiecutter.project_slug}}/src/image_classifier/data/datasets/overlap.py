"""Images of one split that are in another too, by a look that takes a few milliseconds."""

import filecmp
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .paths import PathList
from .source import Source

STATED = 2000  # training files that are asked for their size; more would take too long
COMPARED = 1000  # images, or pairs of files, that are compared as a whole at most


def find_overlap(train: Source, val: Source, most: int) -> tuple[int, list[str]]:
    """How many of the images of `val` were looked up in `train`, and what those are that are there.

    Up to `most` are, evenly spread; none where one source has files and the other has not.
    """
    count = min(most, len(val))
    picked = torch.arange(count) * len(val) // count
    if train.pixels is not None and val.pixels is not None:
        numbers = same_pixels(train.pixels, val.pixels, picked)
        return count, [f"image {number}" for number in numbers]
    if train.paths is not None and val.paths is not None:
        files = same_files(train.paths, val.paths.picked(picked))
        return count, [ascii(str(path)) for path in files]
    return 0, []


def same_pixels(train: Tensor, val: Tensor, picked: Tensor) -> list[int]:
    """Which of the validation images `picked` are among the training images, byte by byte.

    Both are (count, height, width, 3) uint8. Eight bytes of each image tell most of them apart.
    """
    if train.shape[1:] != val.shape[1:]:
        return []
    learned, asked = train.flatten(1).numpy(), val[picked].flatten(1).numpy()
    places = np.arange(1, 16, 2) * learned.shape[1] // 16
    keys, wanted = (np.take(images, places, 1).view(np.uint64)[:, 0] for images in (learned, asked))
    candidates = np.flatnonzero(np.isin(keys, wanted))[:COMPARED]
    known = {image.tobytes() for image in learned[candidates]}
    pairs = zip(picked.tolist(), asked, strict=True)
    return [index for index, image in pairs if image.tobytes() in known]


def same_files(train: PathList, val: PathList) -> list[Path]:
    """Which of the files `val` are among `train`: the same file by another way, or a copy.

    A copy is looked for under its own name, and in a small dataset by its size under any name.
    """
    names, wanted = ends_of_names(train), ends_of_names(val)
    by_name: dict[int, list[int]] = {}
    for index in np.flatnonzero(np.isin(names, wanted)).tolist():
        by_name.setdefault(int(names[index]), []).append(index)
    sizes = train.stats()[:, 0] if len(train) <= STATED else torch.empty(0)
    found = []
    left = COMPARED
    for name, path in zip(wanted.tolist(), val, strict=True):
        size = path.stat().st_size if path.exists() else -1
        same_size = (sizes == size).nonzero().flatten().tolist()
        for index in dict.fromkeys(by_name.get(name, []) + same_size):
            left -= 1
            if left < 0:
                return found
            if is_same_file(train[index], path):
                found.append(path)
                break
    return found


def ends_of_names(paths: PathList, length: int = 16) -> np.ndarray:
    """A hash of the last bytes of each path: (count,) uint64."""
    text, ends = paths.bytes.numpy(), paths.ends.numpy()
    starts = np.concatenate(([0], ends[:-1]))
    names = np.zeros(len(ends), dtype=np.uint64)
    for place in range(1, length + 1):
        at = ends - place
        byte = np.where(at >= starts, text[np.maximum(at, 0)], 0)
        names = names * np.uint64(0x9E3779B97F4A7C15) + byte.astype(np.uint64)
    return names


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, or to files of the same bytes."""
    try:
        return one.samefile(other) or filecmp.cmp(one, other, shallow=False)
    except OSError:  # gone, or not to be read: decoding will say so
        return False
