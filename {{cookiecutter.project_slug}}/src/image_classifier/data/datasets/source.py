"""The type of all datasets: labels, class names, and images in memory, in files or by a reader."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...runtime import seeding
from ...runtime.console import some
from ..arrays import dtype_of, take
from .parts import find_name
from .paths import PathList

Color = tuple[float, ...]  # of each channel
GOLDEN = (5**0.5 - 1) / 2  # whose multiples are spread over all shares of a step
COMPARED = 64  # images whose contents are compared
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Source:
    """One split of a dataset. The images are `pixels`, at `paths`, or what `reader` returns.

    To read them differently, replace the reader: `dataclasses.replace(source, reader=mine)`.
    Pixels are uint8 or, where `bits` is 16, uint16.
    """

    labels: Tensor  # (count,) int64 numbers of classes; or (count, classes) int8, where an image
    # may have several: 1 if it has the label, 0 if not, -1 if that is unknown
    classes: tuple[str, ...]
    pixels: Tensor | None = None  # (count, height, width, channels)
    paths: PathList | None = None
    reader: Callable[[int], Tensor] | None = None  # image `index`: (height, width, channels)
    channels: int = 3
    bits: int = 8  # of each number: 8 or 16
    mean: Color | None = None  # from 0 to 1; default: ImageNet's for 3 x 8 bits, else () until
    std: Color | None = None  # training has measured it
    weights: Tensor | None = None  # (count,) float32: how much each image counts in the loss
    notes: tuple[str, ...] = field(default=(), compare=False)  # lines for the user
    is_test: bool = field(default=False, compare=False)  # whether they are the test images
    is_random: bool = False  # whether `reader` draws random numbers
    recipe: str = ""  # how prepared images were written

    def __post_init__(self) -> None:
        """Raise `UserError` naming the first field of a wrong type, shape or length."""
        labels = self.labels
        pixels = self.pixels
        paths = self.paths
        kinds = {(torch.int64, 1), (torch.int8, 2)}
        is_labels = isinstance(labels, Tensor) and (labels.dtype, labels.ndim) in kinds
        check("labels", labels, is_labels, "(count,) int64 or (count, classes) int8, on the CPU")
        # A checkpoint with NumPy's strings could not be read.
        names = self.classes if type(self.classes) is tuple else ()
        is_names = len(names) > 0 and all(type(name) is str for name in names)
        check("classes", self.classes, is_names, "a tuple of str, the name of each class")
        twice = [name for name, count in Counter(names).items() if count > 1]
        check("classes", twice, not twice, "of different names")
        if pixels is not None:
            self.check_pixels("pixels", pixels, "count, height, width")
            # Batches gather rows; if the pixels were only permuted, each step would copy them all.
            object.__setattr__(self, "pixels", pixels.contiguous())
        if (weights := self.weights) is not None:
            is_weights = isinstance(weights, Tensor) and weights.dtype == torch.float32
            is_weights = is_weights and weights.shape == labels.shape[:1]
            is_weights = is_weights and bool((weights >= 0).all() and 0 < weights.sum() < torch.inf)
            check("weights", weights, is_weights, "(count,) float32, finite, >= 0, not all 0")
        is_paths = paths is None or isinstance(paths, PathList)
        check("paths", paths, is_paths, "PathList(folder, paths)")
        if (pixels is None) == (paths is None and self.reader is None):
            both = "neither" if pixels is None else "both"
            raise UserError(f"images of a Source should be in pixels or in paths, not in {both}")
        images = paths if pixels is None else pixels
        if images is not None and len(images) != len(labels):
            raise UserError(
                f"a Source has {len(labels):,} labels, but {len(images):,} images: one label each"
            )
        is_usual = (self.channels, self.bits) == (3, 8)
        for name, usual in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
            given = getattr(self, name)
            numbers = tuple(map(float, (usual if is_usual else ()) if given is None else given))
            is_share = len(numbers) == self.channels and all(0 <= value <= 1 for value in numbers)
            is_share = is_share and (name == "mean" or min(numbers) > 0)
            wanted = f"{self.channels} numbers, one for each channel, from 0 to 1"
            check(name, numbers, is_share or numbers == (), wanted)
            object.__setattr__(self, name, numbers)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_multi_label(self) -> bool:
        """Whether an image may have several labels."""
        return self.labels.ndim == 2

    @property
    def task(self) -> str:
        """The `model.task` that its labels are for."""
        return "multi-label" if self.is_multi_label else "single-label"

    def numbered(self, classes: tuple[str, ...], split: str) -> "Source":
        """With labels that are numbers of `classes`, if its own are some of them.

        Names may differ where a reader sees no difference. Rows of several labels stay.
        """
        if self.is_multi_label or self.classes == classes or not classes:
            return self
        numbers = [find_name(name, classes) for name in self.classes]
        if -1 in numbers or len({*numbers}) < len(numbers):
            return self
        self.check_labels(split)
        pairs = [(name, classes[n]) for name, n in zip(self.classes, numbers, strict=True)]
        notes = [f"{own!a} is taken for class {name!a}" for own, name in pairs if own != name]
        labels = torch.tensor(numbers)[self.labels]
        return replace(self, labels=labels, classes=classes, notes=(*self.notes, *notes))

    def fitted(self, task: str, split: str, classes: tuple[str, ...] = ()) -> "Source":
        """With labels as the task has them, rows or numbers: those of `classes`, if there are any.

        Raises:
            UserError: if the task is one label of each image, but some have not exactly one.
        """
        if classes:  # a source may have numbers now, or once it is fitted
            return self.numbered(classes, split).fitted(task, split).numbered(classes, split)
        if task == self.task:
            return self
        self.check_labels(split)
        if self.is_multi_label:
            labels = self.labels.numpy()
            is_one = (np.count_nonzero(labels == 1, axis=1) == 1) & (labels >= 0).all(1)
            if not is_one.all():
                first = int(np.argmin(is_one))
                notes = self.notes[:1]
                own = ", ".join(self.classes[n] for n in np.flatnonzero(labels[first] == 1))
                raise UserError(
                    f"{split}: {np.count_nonzero(~is_one):,} of {len(self):,} images have not "
                    f"exactly one label, such as {self.name(first)!a} ({own or 'none'}): mend the "
                    f"labels, or set --model.task multi-label{''.join(map('; {}'.format, notes))}"
                )
            return replace(self, labels=self.labels.argmax(1))
        note = f"{split}: no image has several labels, as a|b in a table: {some(self.classes, 5)}"
        labels = torch.zeros((len(self), len(self.classes)), dtype=torch.int8)
        labels.scatter_(1, self.labels[:, None], 1)
        return replace(self, labels=labels, notes=(*self.notes, note))

    def class_counts(self) -> Tensor:
        """The number of images that have each label: (classes,) int64."""
        if self.is_multi_label:  # by NumPy: torch would turn all of it into int64 first
            return torch.from_numpy(np.count_nonzero(self.labels.numpy() == 1, axis=0))
        count = len(self.classes)
        return self.labels[self.labels >= 0].bincount(minlength=count)[:count]

    @property
    def dtype(self) -> torch.dtype:
        """The type of pixels: uint8 or uint16."""
        return dtype_of(self.bits)

    @property
    def pixel_bytes(self) -> int:
        """The memory that a pixel takes."""
        return self.channels * self.bits // 8

    def empty(self, count: int, side: int) -> Tensor:
        """Memory for so many square images: (count, side, side, channels)."""
        return torch.empty((count, side, side, self.channels), dtype=self.dtype)

    def read(self, index: int, *place: int) -> Tensor:
        """Image `index`: (height, width, channels) uint8 or uint16.

        `place` is seed, epoch and number of the image in it, for a reader that `is_random`.

        Raises:
            BadImageError: if the image is unreadable.
        """
        if self.pixels is not None:
            return self.pixels[index]
        if self.reader is None:
            assert self.paths is not None
            return self.paths.image(index, self.channels, self.bits)
        drawn = (seeding.SAMPLE, *(place or (0, 0, index)), 2)
        with seeding.seeded(*drawn) if self.is_random else contextlib.nullcontext():
            image = self.reader(index)
        self.check_pixels("an image by the reader", image, "height, width")
        return image

    def check_pixels(self, name: str, pixels: object, sizes: str) -> None:
        """Raise `UserError` for what is no tensor of (`sizes`, channels), as crops read memory."""
        is_right = isinstance(pixels, Tensor) and pixels.dtype == self.dtype
        shape = pixels.shape if is_right else ()
        is_right = len(shape) == 2 + sizes.count(",") and shape[-1] == self.channels
        wanted = f"a CPU tensor ({sizes}, {self.channels}) uint{self.bits}"
        check(name, pixels, is_right, wanted)

    def prefetch(self, indices: np.ndarray) -> None:
        """Hear which images this thread reads next, (count,) int64: those far away are fetched."""
        if self.paths is not None and self.reader is None:
            self.paths.prefetch(indices)

    def name(self, index: int) -> str:
        """The image in a message: its path, or its number."""
        return f"image {index}" if self.paths is None else str(self.paths[index])

    def picked(self, indices: Tensor) -> "Source":
        """Only the images at `indices`, (count,) int64."""
        return replace(
            self,
            labels=self.labels[indices],
            weights=None if self.weights is None else self.weights[indices],
            pixels=None if self.pixels is None else take(self.pixels, indices),
            paths=self.paths and self.paths.picked(indices),
            reader=self.reader and partial(read_picked, self.reader, indices.numpy()),
        )

    def spread(self, count: int) -> Tensor:
        """The numbers of `count` evenly spread images, or of all if these are fewer: int64."""
        count = min(count, len(self))
        return torch.arange(count) * len(self) // max(1, count)

    def thinned(self, count: int) -> "Source":
        """`count` evenly spread images, so that all classes keep their share.

        Labels may alternate so that equal steps miss a class: then one anywhere in each step.
        """
        starts = torch.arange(count + 1) * len(self) // count
        found = self.picked(starts[:-1])
        num_found = int((found.class_counts() > 0).sum())
        if num_found == min(count, int((self.class_counts() > 0).sum())):
            return found
        shifts = torch.arange(count).double() * GOLDEN % 1
        other = self.picked(starts[:-1] + (shifts * starts.diff()).long())
        return other if int((other.class_counts() > 0).sum()) > num_found else found

    def fingerprint(self) -> str:
        """A digest of labels, weights, classes, pixels or paths, and how images were prepared.

        The images of another reader are not part of it.
        """
        digest = hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=8)
        digest.update("\0".join(self.classes).encode())
        content = self.pixels if self.paths is None else self.paths.bytes
        for tensor in (content, self.weights):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest() + (f" {self.recipe}" if self.recipe else "")

    @cached_property
    def file_digests(self) -> dict[str, str]:
        """Digests of all sizes and some contents of the files, looked at once; empty without files.

        They tell whether files were replaced under the same names.
        """
        if self.paths is None:
            return {}
        contents = hashlib.blake2b(digest_size=8)
        some = self.spread(COMPARED).numpy()
        self.paths.prefetch(some)
        for index in some.tolist():
            with contextlib.suppress(OSError):  # a file that is gone has no size
                contents.update(hashlib.blake2b(self.paths.read(index)).digest())
        sizes = self.paths.stats()[:, 0].contiguous().numpy().data
        sizes = hashlib.blake2b(sizes, digest_size=8).hexdigest()
        return {"sizes": sizes, "contents": contents.hexdigest()}

    def has_same_images(self, other: "Source") -> bool:
        """Whether two splits are one, whatever their labels: as far as some of the images tell."""
        if len(self) != len(other):
            return False
        with contextlib.suppress(Exception):  # a reader of the user raises any kind
            if self.paths is not None and other.paths is not None:
                return self.file_digests == other.file_digests
            numbers = self.spread(COMPARED).tolist()
            return all(torch.equal(self.read(n), other.read(n)) for n in numbers)
        return False

    def check_labels(self, split: str) -> None:
        """Raise `UserError` naming the first label that is not the number of a class."""
        count = len(self.classes)
        labels = self.labels.numpy()
        if self.is_multi_label:
            if labels.shape[1] != count or labels.min() < -1 or labels.max() > 1:
                raise UserError(
                    f"labels of the {split} images are {labels.shape}, {labels.min()} .. "
                    f"{labels.max()}: 1, 0 or -1 (unknown) for each of {count} classes is right"
                )
            return
        outside = np.flatnonzero((labels < 0) | (labels >= count))
        if len(outside):
            raise UserError(
                f"{len(outside):,} of {len(self):,} labels of the {split} images are "
                f"outside 0 .. {count - 1}, the numbers of the classes: the first is "
                f"{labels[outside[0]]}, of image {outside[0]}"
            )


def read_picked(reader: Callable[[int], Tensor], indices: np.ndarray, index: int) -> Tensor:
    """Image `indices[index]` of `reader`."""
    return reader(int(indices[index]))


def check(name: str, value: object, is_right: bool, wanted: str) -> None:
    """Raise `UserError` for a field of a `Source` that is not what it should be."""
    if not is_right:
        shape = getattr(value, "shape", None)
        dtype = getattr(value, "dtype", None)
        kind = type(value).__name__
        found = f"{value!a:.60}" if shape is None else f"a {kind} {tuple(shape)} {dtype}"
        raise UserError(f"{name} of a Source should be {wanted}, not {found}")


def are_replaced(was: dict[str, str], now: dict[str, str]) -> bool:
    """Whether two `file_digests` of the same names show other images."""
    return any(was[name] != now[name] for name in was.keys() & now.keys())
