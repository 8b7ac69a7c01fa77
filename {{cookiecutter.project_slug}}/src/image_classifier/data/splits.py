"""Opens a split of the dataset: its images, and the mean and std by which they are normalized."""

from dataclasses import replace
from socket import gethostname
from zlib import crc32

import torch
from torch import Tensor

from ..config import DataConfig
from ..errors import UserError
from ..extensions import find_tools, functions
from ..runtime.distributed import World
from .arrays import take
from .datasets import open_dataset
from .datasets.source import Color, Source
from .decode import BadImageError
from .samples import Note, load

MeanStd = tuple[Color, Color]  # mean and standard deviation of each channel
# Most and fewest images that are measured, and their pixels.
MOST_MEASURED, LEAST_MEASURED, MEASURED_PIXELS = 256, 8, 2**24


def open_split(
    data: DataConfig,
    split: str,
    world: World,
    folder: str,
    *,
    task: str,
    mean_std: MeanStd | None,
    classes: tuple[str, ...] = (),
) -> tuple[Source, Note]:
    """The images of `split`, and what to call for those that are unreadable.

    They are normalized by `mean_std`, else by the dataset's own mean and std; where it has none,
    these are measured on some of the images. `folder` is that of the run. Images of some of the
    `classes` of a model get its numbers as labels.

    Raises:
        UserError: if there are no images, they don't fit the task, or none can be read.
    """
    source = open_source(data, split, world, task, classes)
    note = open_note(source, data, folder)
    if mean_std is None and not source.mean:
        most = max(LEAST_MEASURED, min(MOST_MEASURED, MEASURED_PIXELS // data.image_size**2))
        pixels = load_spread(source, most, replace(data, fit="squash"), note, world)
        if not len(pixels):
            raise UserError("none of the images by which to normalize can be read")
        mean_std = mean_and_std(pixels)
        shown = (", ".join(f"{value:g}" for value in values) for values in mean_std)
        line = "mean {}, std {} of the channels, measured on {:,} images"
        source = replace(source, notes=(*source.notes, line.format(*shown, len(pixels))))
    mean, std = mean_std or (source.mean, source.std)
    return replace(source, mean=mean, std=std), note


def open_source(
    data: DataConfig, split: str, world: World, task: str, classes: tuple[str, ...] = ()
) -> Source:
    """A split of the dataset; one process opens it before the others, as it may download it.

    Raises:
        UserError: if there are no images, or of one class, their labels are not for the task, or
            another machine has other images.
    """
    with world.local_main_first(f"opening the {split} images"):
        source = open_dataset(data, split).fitted(task, split, classes)
    if world.size > world.local_size and not world.is_same(crc32(source.fingerprint().encode())):
        raise UserError(
            f"{split}: the {len(source):,} images on {gethostname()} are not those of another: "
            f"copy {data.root!a}, and its cache if one of them has it"
        )
    if not len(source):
        raise UserError(f"{split}: there are no images")
    if split == "train" and len(source.classes) == 1 and not source.is_multi_label:
        raise UserError(f"all images are of one class, {source.classes[0]!r}: several are needed")
    return source


def load_spread(source: Source, count: int, data: DataConfig, note: Note, world: World) -> Tensor:
    """Up to `count` evenly spread images that can be read: (count, size, size, channels)."""
    pixels, bad = load(source, source.spread(count), data, note, world)
    return take(pixels, (~bad).nonzero()[:, 0]) if bad.any() else pixels


def mean_and_std(pixels: Tensor) -> MeanStd:
    """Mean and standard deviation of each channel, from 0 to 1, of (count, side, side, channels).

    Sums of whole numbers are exact, so every machine finds the same. Four digits are kept.
    """
    largest = torch.iinfo(pixels.dtype).max
    sums = torch.zeros(2, pixels.shape[3], dtype=torch.int64)  # of numbers and of their squares
    for image in pixels:
        numbers = image.long()
        sums += torch.stack((numbers, numbers.square())).sum((1, 2))
    means, squares = sums.double() / pixels[..., 0].numel()
    stds = (squares - means.square()).clamp(min=1).sqrt()
    mean, std = ([float(f"{v / largest:.4g}") for v in found.tolist()] for found in (means, stds))
    return tuple(mean), tuple(std)


def open_note(source: Source, data: DataConfig, folder: str) -> Note:
    """What to call with the index of an unreadable image and the reason: it raises, or skips it."""

    def stop(index: int, reason: str) -> None:
        cures = ["replace it", *(tool.CURE for tool in find_tools("unreadable").values())]
        raise BadImageError(source.name(index), f"{reason}; {', or '.join(cures)}")

    notes = (open_tool(source, data, folder) for open_tool in functions("unreadable", "open_note"))
    return next(filter(None, notes), stop)
