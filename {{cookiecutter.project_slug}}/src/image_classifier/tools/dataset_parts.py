"""What datasets of tools share: which part has the images of a split, and labels by name."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..config import DataConfig
from ..data import Source, divide, find_parts, numbers_as_names, val_part
from ..errors import UserError
from ..runtime.console import printable

Label = int | str | list[int] | list[str]  # a list: several labels for an image


def choose_part(parts: Collection[str], data: DataConfig, split: str) -> tuple[str, bool]:
    """The part of a dataset with the images of `split`, and whether `data.fold` divides it.

    Without a part for validation, that is a share of `train`.

    Raises:
        UserError: if there is no such part, or it is not divided and `data.fold` is not the first.
    """
    found = find_parts(parts)
    val = val_part(found.values(), data)
    part = "train" if split == "val" and val is None else split
    if part not in found:
        raise UserError(f"{data.root!a} has no {part!r}, only {', '.join(map(ascii, parts))}")
    return found[part], val is None and part == "train"


def divided(source: Source, names: Iterable[bytes], data: DataConfig, split: str) -> Source:
    """The images of `split` among those for training and validation; `names` decides, of each."""
    return source.picked(divide(names, source.labels, data, split))


def distinct(labels: Iterable[Label | None]) -> tuple[list[Label | None], np.ndarray]:
    """The distinct labels, and which of them each image has: (count,) int32.

    Names are as they can be printed and written anywhere.
    """
    places: dict[str, int] = {}
    found = []
    numbers = []
    for label in labels:
        number = places.setdefault(repr(label), len(places))
        if number == len(found):
            shown = [printable(one) if isinstance(one, str) else one for one in several(label)]
            found.append(shown if isinstance(label, list) else shown[0])
        numbers.append(number)
    return found, np.array(numbers, dtype=np.int32)


def class_names(labels: Iterable[Label]) -> tuple[str, ...]:
    """The classes of labels: their names, sorted, or the numbers up to the largest.

    Raises:
        UserError: if labels are neither all names nor all numbers from 0, or there are too many.
    """
    found = {one for label in labels for one in several(label)}
    if found and all(isinstance(one, str) for one in found):
        return tuple(sorted(found))
    if found and all(type(one) is int and one >= 0 for one in found):
        return numbers_as_names(max(found))
    some = ", ".join(sorted(map(ascii, found))[:3]) or "none"
    raise UserError(f"labels should be names, or numbers from 0, not {some}")


def numbered(labels: Sequence[Label], which: np.ndarray, classes: tuple[str, ...]) -> Tensor:
    """The label of each image, `labels[which]`, as a `Source` has it.

    (count,) int64, or, if images have several labels, (count, classes) int8.

    Raises:
        UserError: for a label that is not among the classes.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    numbers |= {number: number for number in range(len(classes))}
    rows = [[numbers.get(one, -1) for one in several(label)] for label in labels]
    if unknown := [label for label, row in zip(labels, rows, strict=True) if -1 in row]:
        raise UserError(
            f"label {unknown[0]!a} is none of the {len(classes)} classes, "
            f"{', '.join(map(ascii, classes[:5]))}"
        )
    if not any(isinstance(label, list) for label in labels):
        return torch.tensor(rows)[:, 0][torch.from_numpy(which)]
    table = torch.zeros((len(rows), len(classes)), dtype=torch.int8)
    for place, row in zip(table, rows, strict=True):
        place[row] = 1
    return table[torch.from_numpy(which)]


def several(label: Label) -> list[int] | list[str]:
    """A label as a list."""
    return label if isinstance(label, list) else [label]
