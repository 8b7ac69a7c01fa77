"""What every dataset gives: labels, class names, and images that are in memory or in files."""

import contextlib
import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...config import UserError
from ..decode import read_image
from .conversions import check_classes, check_images, check_labels, three_floats
from .paths import PathList
from .prepared import Prepared

READ_FILES = 64  # whose contents are compared when a run goes on
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Source:
    """One split of a dataset. Either `pixels` or `paths` holds the images."""

    labels: Tensor  # (count,) int64
    classes: tuple[str, ...]
    pixels: Tensor | None = None  # (count, height, width, 3) uint8
    paths: PathList | None = None
    prepared: Prepared | None = None  # those at `paths`, to be read instead
    mean: tuple[float, float, float] = IMAGENET_MEAN  # of red, green and blue, from 0 to 1
    std: tuple[float, float, float] = IMAGENET_STD
    notes: tuple[str, ...] = field(default=(), compare=False)  # what the user should know of it

    def __post_init__(self) -> None:
        """Refuse what is not as said above, as far as types, shapes and lengths tell.

        Raises:
            SourceError: that names the first, and what converts it.
        """
        check_labels(self.labels)
        check_classes(self.classes)
        check_images(self.pixels, self.paths, len(self.labels))
        for name in ("mean", "std"):
            object.__setattr__(self, name, three_floats(name, getattr(self, name)))
        if self.pixels is not None:
            # Rows of pixels are gathered as they lie in memory: were they only permuted, each step
            # would copy all of them.
            object.__setattr__(self, "pixels", self.pixels.contiguous())

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)

    def read(self, index: int, keep: int | None = None) -> Tensor:
        """Image `index`: (height, width, 3) uint8. A file may be reduced to `keep`: `read_image`.

        Raises:
            UserError: if its file can't be read, naming it.
        """
        if self.prepared is not None:
            return self.prepared.read(index, keep)
        if self.pixels is not None:
            return self.pixels[index]
        assert self.paths is not None
        return read_image(self.paths[index], keep)

    def thinned(self, count: int) -> "Source":
        """Only `count` of the images, spread evenly, so that all classes keep their share."""
        picked = torch.arange(count) * len(self) // count
        return replace(
            self,
            labels=self.labels[picked],
            pixels=None if self.pixels is None else self.pixels[picked],
            paths=self.paths and self.paths.picked(picked),
            prepared=self.prepared and self.prepared.picked(picked),
        )

    def fingerprint(self) -> str:
        """A short name for exactly these images and labels: their pixels, or their paths.

        Of prepared images it says so, as their pixels are others than those of the files.
        """
        digest = hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=8)
        digest.update("\0".join(self.classes).encode())
        content = self.pixels if self.paths is None else self.paths.bytes
        assert content is not None
        digest.update(content.numpy().data)
        return digest.hexdigest() + (
            f" {self.prepared.recipe}" if self.prepared is not None else ""
        )

    def file_digests(self) -> dict[str, str]:
        """What tells that files were replaced under the same names; nothing of images in memory.

        Digests of the sizes and of the times of all files, and of the contents of a few.
        """
        if self.paths is None:
            return {}
        stats, contents = self.paths.stats(), hashlib.blake2b(digest_size=8)
        for path in self.thinned(min(READ_FILES, len(self))).paths or ():
            with contextlib.suppress(OSError):  # a file that is gone has no size
                contents.update(hashlib.blake2b(path.read_bytes()).digest())
        sizes, times = (
            hashlib.blake2b(column.contiguous().numpy().data, digest_size=8) for column in stats.T
        )
        found = {"sizes": sizes, "times": times, "contents": contents}
        return {name: digest.hexdigest() for name, digest in found.items()}


def are_replaced(was: dict[str, str], now: dict[str, str]) -> bool:
    """Whether files of the same names hold other images, judged by two of their `file_digests`.

    Times alone also differ after a copy.
    """
    known = was.keys() & now.keys() - {"times"}
    return any(was[name] != now[name] for name in known)


def difference(was: str, now: str) -> str:
    """In which way the images of two fingerprints differ."""
    (images, _, recipe), (new_images, _, new_recipe) = was.partition(" "), now.partition(" ")
    if images != new_images:
        return "the training images have changed"
    form, new_form = (f"prepared images ({r})" if r else "the files" for r in (recipe, new_recipe))
    return f"it learned from {form}, not from {new_form}: see `prepare` and --data.no-prepared"


def check_numbers(source: Source, split: str) -> None:
    """Refuse labels that are not numbers of a class.

    Raises:
        UserError: naming the first.
    """
    count, labels = len(source.classes), source.labels.numpy()
    outside = np.flatnonzero((labels < 0) | (labels >= count))
    if len(outside):
        raise UserError(
            f"{len(outside):,} of {len(source):,} labels of the {split} images are "
            f"outside 0 .. {count - 1}, the numbers of the classes: the first is "
            f"{labels[outside[0]]}, of image {outside[0]}"
        )
