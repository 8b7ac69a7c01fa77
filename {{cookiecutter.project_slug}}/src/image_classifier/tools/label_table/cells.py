"""The columns of a table by their different cells, and what these say."""

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count, islice
from zlib import crc32

import numpy as np

from ...data import ROLES
from ...errors import UserError
from .rows import Table

TRAIN, VAL, TEST = range(3)
SPLITS = {"train": TRAIN, "val": VAL, "test": TEST}
SPLITS |= {name: SPLITS[role] for name, role in ROLES.items() if role in SPLITS}
NO_FOLD = -1  # of test images
CHUNK = 256  # rows at once: so few that the garbage collector has nothing to do
# Beyond these, a weight of float32 or the sum of a million would be 0 or infinite.
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30

# How programs write that a value is missing; `none` and `na` in small letters may be classes.
MISSING = {"NaN", "nan", "-nan", "NULL", "Null", "null", "N/A", "n/a", "<NA>", "#N/A", "None", "NA"}
BLANK = {"", "na", *map(str.lower, MISSING)}  # in the column of a class
YES_OR_NO = dict.fromkeys(("true", "yes", "y"), 1) | dict.fromkeys(("false", "no", "n"), 0)
YES_OR_NO |= dict.fromkeys(BLANK, -1)


class Column:
    """A column: the different cells that it has, and which of these each row has."""

    def __init__(self, table: Table, name: str, numbers: array, most: float) -> None:
        """Nothing is read yet; `numbers` are those of the rows, which come with the cells."""
        self.table = table
        self.name = name
        self.numbers = numbers
        self.most = most
        self.cells: dict[str, int] = defaultdict(count().__next__)  # numbered as they come
        self.kinds = array("i")  # of each row: the number of its cell

    def add(self, cells: Iterable[str]) -> None:
        """The cells of the next rows, unless there were too many different ones."""
        if self.is_whole():
            self.kinds.extend(map(self.cells.__getitem__, cells))

    def is_whole(self) -> bool:
        """Whether it has at most `most` different cells; if not, it is not read on."""
        return len(self.cells) <= self.most

    def texts(self) -> list[str]:
        """The different cells."""
        return [cell.strip() for cell in self.cells]

    def values(self, parse: Callable[[str], float | None], expected: str) -> np.ndarray:
        """The values of the rows, (count,), by a function that returns None for a wrong cell.

        Raises:
            UserError: naming the first row with a cell that is not what is `expected`.
        """
        texts = self.texts()
        values = [parse(text) for text in texts]
        if None in values:
            kind = values.index(None)
            raise self.wrong(kind, f"{self.name.strip()} {texts[kind]!a:.80} should be {expected}")
        return np.array(values)[np.asarray(self.kinds)]

    def wrong(self, kind: int, what: str) -> UserError:
        """What to raise for a cell, by its number."""
        return self.table.wrong(self.numbers[self.kinds.index(kind)], what)


def path_cells(found: Table, path: str, columns: dict[str, Column]) -> Iterator[tuple[int, str]]:
    """The cells of the column of paths, with the numbers of their rows; `columns` are read, too."""
    rows = found.rows([path, *columns])
    while chunk := [*islice(rows, CHUNK)]:
        paths, *others = zip(*(cells for _, cells in chunk), strict=True)
        for column, cells in zip(columns.values(), others, strict=True):
            column.add(cells)
        for (number, _), cell in zip(chunk, paths, strict=True):
            yield number, cell


def yes_or_no(text: str) -> int | None:
    """1, 0 or, for unknown, -1; None: the text is none of these."""
    text = text.lower()
    if text in YES_OR_NO:
        return YES_OR_NO[text]
    with suppress(ValueError):
        return {1.0: 1, 0.0: 0, -1.0: -1}.get(float(text))
    return None


def fold_of(text: str) -> float | None:
    """The number of a fold, if there is one."""
    is_whole = re.fullmatch(r"\d+(\.0*)?", text)
    return float(text) if is_whole else None if text else NO_FOLD


def weight_of(text: str) -> float | None:
    """A weight that a loss can count."""
    with suppress(ValueError):
        weight = float(text)
        return weight if weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT else None
    return None


# How the cells of each role are read, and what they should be.
VALUES: dict[str, tuple[Callable[[str], float | None], str]] = {
    "split": (lambda text: SPLITS.get(text.lower()), "train, val or test"),
    "flag": (lambda text: {1: 1, 0: 0}.get(yes_or_no(text)), "True or False"),
    "fold": (fold_of, "0, 1, 2, ..."),
    "weight": (weight_of, f"0 or more, from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"),
    # That of nothing is 0.
    "group": (lambda text: crc32(text.lower().encode(errors="replace")) or None, "a name"),
}
