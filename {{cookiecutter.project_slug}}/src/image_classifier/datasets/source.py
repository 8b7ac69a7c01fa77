"""What every dataset gives: labels, class names, and images that are in memory or in files."""

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ..decode import read_image

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PathList:
    """Paths as one array of bytes: forked workers share its memory, however often they read it.

    A Python list of strings would be copied into each worker by reference counting alone, a page
    at a time (https://github.com/pytorch/pytorch/issues/13246).
    """

    def __init__(self, root: Path, paths: list[bytes]) -> None:
        """Keep `paths`, which are relative to `root` and need not be valid text."""
        self.root = root
        lengths = torch.tensor([len(path) for path in paths], dtype=torch.int64)
        self.ends = lengths.cumsum(0)
        self.bytes = torch.frombuffer(bytearray(b"".join(paths)), dtype=torch.uint8)

    def __len__(self) -> int:
        """How many paths there are."""
        return len(self.ends)

    def relative(self, index: int) -> bytes:
        """The path of image `index`, from `root`."""
        start = int(self.ends[index - 1]) if index else 0
        return self.bytes[start : int(self.ends[index])].numpy().tobytes()

    def picked(self, indices: Tensor) -> "PathList":
        """The paths at `indices` alone."""
        return PathList(self.root, [self.relative(index) for index in indices.tolist()])

    def __getitem__(self, index: int) -> Path:
        """The path of image `index`."""
        return self.root / os.fsdecode(self.relative(index))


@dataclass(frozen=True)
class Source:
    """One split of a dataset. Either `pixels` or `paths` holds the images."""

    labels: Tensor  # (count,) int64
    classes: tuple[str, ...]
    pixels: Tensor | None = None  # (count, height, width, 3) uint8
    paths: PathList | None = None
    mean: tuple[float, float, float] = IMAGENET_MEAN  # of red, green and blue, from 0 to 1
    std: tuple[float, float, float] = IMAGENET_STD
    notes: tuple[str, ...] = field(default=(), compare=False)  # what the user should know of it

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)

    def read(self, index: int) -> Tensor:
        """Image `index`: (height, width, 3) uint8.

        Raises:
            UserError: if its file can't be read, naming it.
        """
        if self.pixels is not None:
            return self.pixels[index]
        assert self.paths is not None
        return read_image(self.paths[index])

    def thinned(self, count: int) -> "Source":
        """Only `count` of the images, spread evenly, so that all classes keep their share."""
        picked = torch.arange(count) * len(self) // count
        paths = self.paths and self.paths.picked(picked)
        pixels = None if self.pixels is None else self.pixels[picked]
        return replace(self, labels=self.labels[picked], pixels=pixels, paths=paths)

    def fingerprint(self) -> str:
        """A short name for exactly these images and labels: their pixels, or their paths."""
        digest = hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=8)
        digest.update("\0".join(self.classes).encode())
        content = self.pixels if self.paths is None else self.paths.bytes
        assert content is not None
        digest.update(content.numpy().data)
        return digest.hexdigest()
