"""Turns labels that are names or numbers into those of a `Source`, and names its classes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...runtime.console import printable

MOST_NUMBERS = 100_000  # classes without names

Label = int | str | list[int] | list[str]  # a list: several labels for an image


def numbered(
    labels: Sequence[Label], classes: tuple[str, ...] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as numbers of classes, and the names of these, which can be printed anywhere.

    (count,) int64 or, if there are lists, (count, classes) int8. Without `classes` they are the
    names, sorted, or the numbers up to the largest.

    Raises:
        UserError: if labels are neither all names nor all numbers from 0, or none of the classes.
    """
    rows = [label if isinstance(label, list) else [label] for label in labels]
    found = {one for row in rows for one in row}
    shown = {one: printable(one) if isinstance(one, str) else one for one in found}
    if classes is None:
        classes = class_names({*shown.values()})
    numbers = {name: number for number, name in enumerate(classes)}
    numbers |= {number: number for number in range(len(classes))}
    if unknown := sorted(ascii(one) for one in shown.values() if one not in numbers):
        some = ", ".join(map(ascii, classes[:5]))
        raise UserError(f"label {unknown[0]} is none of the {len(classes)} classes, {some}")
    places = [[numbers[shown[one]] for one in row] for row in rows]
    if not any(isinstance(label, list) for label in labels):
        return torch.tensor(places)[:, 0], classes
    table = np.zeros((len(places), len(classes)), np.int8)
    for row, own in zip(table, places, strict=True):
        row[own] = 1
    return torch.from_numpy(table), classes


def class_names(labels: set[int | str]) -> tuple[str, ...]:
    """The classes of different labels: their names, sorted, or the numbers up to the largest."""
    if labels and all(isinstance(label, str) for label in labels):
        return tuple(sorted(labels))
    if labels and all(type(label) is int and label >= 0 for label in labels):
        return numbers_as_names(max(labels))
    some = ", ".join(sorted(map(ascii, labels))[:3]) or "none"
    raise UserError(f"labels should be names, or numbers from 0, not {some}")


def numbers_as_names(largest: int) -> tuple[str, ...]:
    """The names of classes that have only numbers, from 0 to `largest`.

    Raises:
        UserError: if there are so many that `largest` must be something else, such as an id.
    """
    if largest >= MOST_NUMBERS:
        raise UserError(
            f"the largest label is {largest:,}, and would make as many classes: number them from "
            "0, without gaps, or give their names"
        )
    return tuple(map(str, range(largest + 1)))
