"""Any map-style torch `Dataset` of (image, label) as a `Source`."""

from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from ...config import DataConfig
from ...data import Source, fitted, image_pixels, unreadable
from ...errors import UserError
from ...runtime.console import printable
from ...runtime.out_of_memory import is_out_of_memory
from ..dataset_formats.arrays import channel_axis
from ..dataset_formats.labels import numbers_as_names


def to_source(found: Any, data: DataConfig) -> Any:  # noqa: ANN401 - whatever a function returns
    """What the function of a dataset returned; a torch `Dataset` as a `Source`."""
    return source_of(found, data.channels, data.bits) if isinstance(found, Dataset) else found


def source_of(dataset: Dataset, channels: int = 3, bits: int = 8) -> Source:
    """The labels of `dataset`, and its images with so many channels of so many bits.

    Labels are its `targets`, or are found by one pass over it: a class number each, or, where an
    image may have several, a row of 1 (has it), 0 (has it not) and -1 (unknown). Names of classes
    are its `classes`, or their numbers. A `Subset` has those of the whole. A `target_transform`
    makes other labels of `targets`, which are of other classes.

    Raises:
        UserError: if it is no map-style dataset, or its labels are neither.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UserError(f"{name} should be map-style: with __len__ and __getitem__")
    labels = on_host(find_in(dataset, "targets"))
    transform = find_in(dataset, "target_transform")
    notes = ()
    if labels is None:
        labels = [on_host(dataset[index][1]) for index in range(len(dataset))]
        notes = (f"{name} has no `targets`: labels were found by one pass over its images",)
    elif transform is not None:
        labels = [on_host(transform(label)) for label in np.asarray(labels).tolist()]
    try:
        labels = np.asarray(labels)
    except ValueError:  # rows of different lengths
        labels = np.asarray(labels, dtype=object)
    is_table = labels.ndim == 2 and labels.shape[1] > 1
    is_right = labels.dtype.kind in "biuf"
    is_right = is_right and (len(labels) if is_table else labels.size) == len(dataset)
    is_right = is_right and not (is_table and (np.abs(labels) > 1).any())
    if not is_right or (labels != labels.astype(np.int64)).any():
        raise UserError(
            f"labels of {name} should be {len(dataset):,} numbers of classes, one for each image, "
            f"or rows of 1, 0 and -1, not {labels.shape} {labels.dtype}"
        )
    labels = labels.astype(np.int8) if is_table else labels.astype(np.int64).reshape(-1)
    largest = labels.shape[1] - 1 if is_table else int(labels.max(initial=0))
    classes = find_in(dataset, "classes") if transform is None else None
    if classes is None or not len(classes):
        classes = numbers_as_names(largest)
    return Source(
        labels=torch.from_numpy(labels),
        classes=tuple(printable(str(name)) for name in classes),
        reader=partial(read, dataset, channels, bits),
        channels=channels,
        bits=bits,
        notes=notes,
        is_random=True,
    )


def find_in(dataset: Dataset, name: str) -> Any:  # noqa: ANN401 - whatever a dataset has
    """The attribute `name` of a dataset, or of that of which it is a subset; None without one."""
    found = getattr(dataset, name, None)
    if found is None and isinstance(dataset, Subset):
        found = find_in(dataset.dataset, name)
        if name == "targets" and found is not None:
            return np.asarray(on_host(found))[dataset.indices]
    return found


def on_host(labels: Any) -> Any:  # noqa: ANN401 - whatever a dataset has
    """Labels, those of a GPU in host memory: NumPy takes no others."""
    if isinstance(labels, Tensor):
        return labels.cpu()
    return [*map(on_host, labels)] if isinstance(labels, list | tuple) else labels


def read(dataset: Dataset, channels: int, bits: int, index: int) -> Tensor:
    """Image `index` of `dataset`: (height, width, channels)."""
    try:
        image, *_ = dataset[index]
        return to_pixels(image, channels, bits)  # a PIL image is perhaps decoded only here
    except (OSError, SyntaxError, RuntimeError) as error:  # Pillow's and torchvision's, of damage
        is_other = isinstance(error, RuntimeError) and type(error) is not RuntimeError
        if is_other or is_out_of_memory(error):
            raise
        raise unreadable(f"image {index}", error) from error


def to_pixels(image: Any, channels: int = 3, bits: int = 8) -> Tensor:  # noqa: ANN401 - any kind
    """An image as (height, width, channels) of `bits`: PIL, or a tensor or array of whole numbers.

    These are uint8 or uint16, and converted as those of files are. A tensor is taken for CHW, an
    array for HWC, where both are possible; other images are refused.
    """
    is_chw = isinstance(image, Tensor) and image.ndim == 3
    try:
        if isinstance(image, Image.Image):
            array = image_pixels(image, channels, bits)
        else:
            array = np.asarray(image.cpu() if isinstance(image, Tensor) else image)
            array = array[:, :, None] if array.ndim == 2 else array
            if array.ndim != 3 or not array.size or array.dtype not in (np.uint8, np.uint16):
                raise ValueError(f"it is a {type(image).__name__} {array.shape} {array.dtype}")
            axis = channel_axis(array.shape, channels, (0, 2) if is_chw else (2, 0))
            array = np.moveaxis(array, axis, 2)
        return torch.from_numpy(np.require(fitted(array, channels, bits), requirements="CW"))
    except ValueError as error:
        raise UserError(
            f"an image should be PIL or uint{bits} (height, width, {channels}), but {error}: leave "
            "out ToTensor and Normalize, which are made here"
        ) from error
