"""Any map-style torch `Dataset` of (image, label) as a `Source`."""

from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from ...errors import UserError
from ..decode import rgb_pixels, unreadable
from .source import Source


def source_of(dataset: Dataset) -> Source:
    """The images and labels of `dataset`.

    Labels are its `targets`, or are found by one pass over it: a class number each, or, where an
    image may have several, a row of 1 (has it), 0 (has it not) and -1 (unknown). Names of classes
    are its `classes`, or their numbers. A `Subset` has those of the whole.

    Raises:
        UserError: if it is no map-style dataset, or its labels are neither.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UserError(f"{name} should be map-style: with __len__ and __getitem__")
    labels, notes = find_in(dataset, "targets"), ()
    if labels is None:
        labels = [dataset[index][1] for index in range(len(dataset))]
        notes = (f"{name} has no `targets`: labels were found by one pass over its images",)
    labels = np.asarray(labels)
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
    count = labels.shape[1] if is_table else int(labels.max()) + 1
    classes = find_in(dataset, "classes") or range(count)
    return Source(
        labels=torch.from_numpy(labels),
        classes=tuple(map(str, classes)),
        reader=partial(read, dataset),
        notes=notes,
        is_random=True,
    )


def find_in(dataset: Dataset, name: str) -> Any:  # noqa: ANN401 - whatever a dataset has
    """The attribute `name` of a dataset, or of that of which it is a subset; None without one."""
    found = getattr(dataset, name, None)
    if found is None and isinstance(dataset, Subset):
        found = find_in(dataset.dataset, name)
        if name == "targets" and found is not None:
            return np.asarray(found)[dataset.indices]
    return found


def read(dataset: Dataset, index: int) -> Tensor:
    """Image `index` of `dataset`: (height, width, 3) uint8."""
    try:
        image, *_ = dataset[index]
    except (OSError, SyntaxError) as error:  # what Pillow raises on damaged files
        raise unreadable(f"image {index}", error) from error
    return to_pixels(image)


def to_pixels(image: Any) -> Tensor:  # noqa: ANN401 - whatever a dataset returns
    """An image as (height, width, 3) uint8: PIL, or a uint8 tensor or array, color or gray.

    A tensor is taken for CHW, an array for HWC, where both are possible; other images are refused.
    """
    is_chw = isinstance(image, Tensor) and image.ndim == 3
    array = rgb_pixels(image) if isinstance(image, Image.Image) else np.asarray(image)
    if array.ndim == 2:
        array = array[:, :, None]
    axes = [axis for axis in ((0, 2) if is_chw else (2, 0)) if array.ndim == 3]
    channels = next((axis for axis in axes if array.shape[axis] in (1, 3)), None)
    if channels is None or array.dtype != np.uint8:
        raise UserError(
            "an image of a torch Dataset should be PIL or uint8 (height, width, 3), not a "
            f"{type(image).__name__} {array.shape} {array.dtype}: leave out ToTensor and "
            "Normalize, training does both"
        )
    pixels = torch.from_numpy(np.moveaxis(array, channels, 2))
    return pixels.expand(-1, -1, 3).contiguous()
