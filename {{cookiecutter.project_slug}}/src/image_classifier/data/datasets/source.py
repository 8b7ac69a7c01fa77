"""The type of all datasets: labels, class names, and images in memory, in files or by a reader."""

import contextlib
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...runtime import seeding
from ..decode import read_image
from .paths import PathList

READ_FILES = 64  # files whose contents are compared when a run resumes
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class SourceError(UserError):
    """A field of a `Source` is not what it should be."""


@dataclass(frozen=True)
class Source:
    """One split of a dataset. The images are `pixels`, at `paths`, or what `reader` returns.

    To read them differently, replace the reader: `dataclasses.replace(source, reader=mine)`.
    """

    labels: Tensor  # (count,) int64
    classes: tuple[str, ...]
    pixels: Tensor | None = None  # (count, height, width, 3) uint8
    paths: PathList | None = None
    reader: Callable[[int], Tensor] | None = None  # image `index`: (height, width, 3) uint8
    mean: tuple[float, float, float] = IMAGENET_MEAN  # of red, green and blue, from 0 to 1
    std: tuple[float, float, float] = IMAGENET_STD
    notes: tuple[str, ...] = field(default=(), compare=False)  # lines for the user
    is_random: bool = False  # whether `reader` draws random numbers
    recipe: str = ""  # how `prepare` wrote the images
    sizes: Tensor | None = None  # (count, 2) int32: heights and widths, if known

    def __post_init__(self) -> None:
        """Check types, shapes and lengths.

        Raises:
            SourceError: naming the first wrong field.
        """
        labels, pixels = self.labels, self.pixels
        if not is_tensor(labels, torch.int64, 1):
            raise misfit("labels", labels, "a CPU tensor (count,) int64")
        # A checkpoint with NumPy's strings could not be read.
        names = self.classes if type(self.classes) is tuple else ()
        if not names or any(type(name) is not str for name in names):
            raise misfit("classes", self.classes, "a tuple of str, the name of each class")
        if pixels is not None and not (is_tensor(pixels, torch.uint8, 4) and pixels.shape[3] == 3):
            raise misfit("pixels", pixels, "a CPU tensor (count, height, width, 3) uint8")
        if self.paths is not None and not isinstance(self.paths, PathList):
            raise misfit("paths", self.paths, "PathList(folder, paths)")
        if (pixels is None) == (self.paths is None and self.reader is None):
            both = "neither" if pixels is None else "both"
            raise SourceError(f"images should be in pixels or in paths, not in {both}")
        images = self.paths if pixels is None else pixels
        if images is not None and len(images) != len(labels):
            raise SourceError(f"there are {len(labels):,} labels, but {len(images):,} images")
        for name in ("mean", "std"):
            object.__setattr__(self, name, three_floats(name, getattr(self, name)))
        if pixels is not None:
            # Batches gather rows; if the pixels were only permuted, each step would copy them all.
            object.__setattr__(self, "pixels", pixels.contiguous())

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)

    def read(self, index: int, *place: int) -> Tensor:
        """Image `index`: (height, width, 3) uint8.

        Args:
            index: From 0 to the number of images.
            place: Seed, epoch and number of the image in it, for a reader that `is_random`.

        Raises:
            BadImageError: if the image is unreadable.
        """
        if self.pixels is not None:
            return self.pixels[index]
        if self.reader is None:
            assert self.paths is not None
            return read_image(self.paths[index])
        if not self.is_random:
            return self.reader(index)
        with seeding.seeded(seeding.SAMPLE, *(place or (0, 0, index)), 2):
            return self.reader(index)

    def name(self, index: int) -> str:
        """The image in a message: its path, or its number."""
        return f"image {index}" if self.paths is None else str(self.paths[index])

    def picked(self, indices: Tensor) -> "Source":
        """Only the images at `indices`, (count,) int64."""
        return replace(
            self,
            labels=self.labels[indices],
            pixels=None if self.pixels is None else self.pixels[indices],
            paths=self.paths and self.paths.picked(indices),
            reader=self.reader and Picked(self.reader, indices.numpy()),
            sizes=None if self.sizes is None else self.sizes[indices],
        )

    def thinned(self, count: int) -> "Source":
        """`count` evenly spread images, so that all classes keep their share."""
        return self.picked(torch.arange(count) * len(self) // count)

    def fingerprint(self) -> str:
        """A digest of labels, classes, and pixels or paths, and the recipe of prepared images.

        The images of another reader are not part of it.
        """
        digest = hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=8)
        digest.update("\0".join(self.classes).encode())
        content = self.pixels if self.paths is None else self.paths.bytes
        if content is not None:
            digest.update(content.numpy().data)
        return digest.hexdigest() + (f" {self.recipe}" if self.recipe else "")

    def file_digests(self) -> dict[str, str]:
        """Digests of all sizes, all times and some contents of the files; empty without files.

        They tell whether files were replaced under the same names.
        """
        if self.paths is None:
            return {}
        stats, contents = self.paths.stats(), hashlib.blake2b(digest_size=8)
        for path in self.thinned(min(READ_FILES, len(self))).paths or ():
            with contextlib.suppress(OSError):  # a file that is gone has no size
                contents.update(hashlib.blake2b(path.read_bytes()).digest())
        columns = (column.contiguous().numpy().data for column in stats.T)
        sizes, times = (hashlib.blake2b(column, digest_size=8).hexdigest() for column in columns)
        return {"sizes": sizes, "times": times, "contents": contents.hexdigest()}

    def check_labels(self, split: str) -> None:
        """Check that each label is the number of a class.

        Raises:
            UserError: naming the first that is not.
        """
        count, labels = len(self.classes), self.labels.numpy()
        outside = np.flatnonzero((labels < 0) | (labels >= count))
        if len(outside):
            raise UserError(
                f"{len(outside):,} of {len(self):,} labels of the {split} images are "
                f"outside 0 .. {count - 1}, the numbers of the classes: the first is "
                f"{labels[outside[0]]}, of image {outside[0]}"
            )


@dataclass(frozen=True)
class Picked:
    """A reader of the images at `indices` of another reader."""

    reader: Callable[[int], Tensor]
    indices: np.ndarray  # (count,) int64

    def __call__(self, index: int) -> Tensor:
        """Picked image `index`."""
        return self.reader(int(self.indices[index]))


def is_tensor(value: Any, dtype: torch.dtype, ndim: int) -> bool:  # noqa: ANN401 - people have all kinds
    """Whether it is a CPU tensor of this dtype and number of dimensions."""
    is_here = isinstance(value, Tensor) and value.device.type == "cpu"
    return is_here and value.dtype == dtype and value.ndim == ndim


def misfit(name: str, value: Any, wanted: str) -> SourceError:  # noqa: ANN401
    """The error for a wrong field."""
    if isinstance(value, np.ndarray | Tensor):
        found = f"a {type(value).__name__} {tuple(value.shape)} {value.dtype}"
        found += f" on {value.device}" if isinstance(value, Tensor) and value.is_cuda else ""
    elif isinstance(value, str | int | float | tuple) or value is None:
        found = f"{value!a:.60}"
    else:
        found = f"a {type(value).__name__}"
    return SourceError(f"{name} should be {wanted}, not {found}")


def three_floats(name: str, numbers: Any) -> tuple[float, float, float]:  # noqa: ANN401
    """The mean or standard deviation of each colour, as plain numbers.

    Raises:
        SourceError: if they are not three numbers that pixels from 0 to 1 can have.
    """
    with contextlib.suppress(TypeError, ValueError):
        red, green, blue = map(float, numbers)
        low = 0 if name == "std" else -math.inf
        if all(math.isfinite(value) and low < value <= 1 for value in (red, green, blue)):
            return red, green, blue
    raise misfit(name, numbers, "three numbers: red, green and blue, of pixels from 0 to 1")


def are_replaced(was: dict[str, str], now: dict[str, str]) -> bool:
    """Whether two `file_digests` of the same names show other images; a copy changes only times."""
    known = was.keys() & now.keys() - {"times"}
    return any(was[name] != now[name] for name in known)
