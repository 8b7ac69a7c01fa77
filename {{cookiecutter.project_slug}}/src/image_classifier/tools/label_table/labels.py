"""Your own images by a table of their labels: CSV, JSON lines or Parquet.

    path,label,split          columns in any order; `split`, `fold` and `weight` may be left out
    a/1.jpg,rose,train        a path is absolute, or relative to `data.root`
    a/2.jpg,rose|thorn,val    several labels; or, in place of `label`, a column of 0 and 1 per class

A row that is wrong is named by its number.
"""

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...config import DataConfig
from ...data import VAL_NAMES, PathList, Source, is_val, val_part
from ...errors import UserError
from ...runtime.console import printable, some
from .rows import Table, open_table, text_of

COLUMNS = ("path", "label", "split", "fold", "weight")
TRAIN, VAL, TEST = range(3)
SPLITS = {"train": TRAIN, "val": VAL, "test": TEST}
SPLITS |= {"training": TRAIN, "testing": TEST} | dict.fromkeys(VAL_NAMES, VAL)
# In the column of a class: the image has the label, has it not, or that is unknown.
YES_OR_NO = dict.fromkeys(("1", "1.0", "true"), 1) | dict.fromkeys(("0", "0.0", "false"), 0)
YES_OR_NO |= dict.fromkeys(("", "-1", "-1.0", "nan"), -1)
NO_FOLD = -1  # of test images
MOST_KNOWN = 10_000  # different cells that are parsed only once


class Rows(NamedTuple):
    """The rows of a table as flat arrays."""

    paths: PathList
    hashes: np.ndarray  # (count,) int64, of the paths
    numbers: np.ndarray  # (count,) int64, of the rows
    kinds: np.ndarray  # (count,) int64, indices into `labels`
    labels: Tensor  # different labels that rows have, as a `Source` has those of images
    classes: tuple[str, ...]
    columns: dict[str, np.ndarray]  # (count,) each: split, fold, weight, if the table has them
    ignored: list[str]  # names of other columns


def table(data: DataConfig, split: str) -> Source:
    """The images that the table `data.labels` names for `split`, in the order of its rows.

    The classes are the labels of all splits, sorted. The images for validation are those with such
    a `split`; if there are none, the training images whose `fold` is `data.fold`; and without that
    column those that a hash of their path chooses, as in a folder.

    Raises:
        UserError: if the table can't be used; it names the row.
    """
    found = find_table(data)
    rows = read_rows(found, data)
    is_new = find_new(found, rows)
    is_own = is_in_split(found, rows, data, split)
    own = torch.from_numpy(is_new & is_own).nonzero()[:, 0]
    if not len(own):
        where = f"{str(found.file)!a} has no images for {split}"
        if split == "val" and "fold" in rows.columns:
            where += f" in fold {data.fold} of 0 .. {rows.columns['fold'].max():.0f}"
        raise UserError(where)
    weights = rows.columns.get("weight")
    source = Source(
        labels=rows.labels[torch.from_numpy(rows.kinds)[own]],
        classes=rows.classes,
        paths=rows.paths.picked(own),
        weights=None if weights is None else torch.from_numpy(weights)[own].float(),
    )
    notes = [f"{str(found.file)!a}: {len(own):,} images for {split}"]
    if rows.ignored:
        notes[0] += f"; ignored columns: {', '.join(map(printable, rows.ignored))}"
    if len(is_new) > (num_new := int(is_new.sum())):
        notes.append(f"{len(is_new) - num_new:,} rows repeat another, and are left out")
    if empty := [rows.classes[n] for n in (source.class_counts() == 0).nonzero()[:, 0]]:
        if split == "train" and not source.is_multi_label:
            raise UserError(
                f"{str(found.file)!a} has no images of class {empty[0]!a} for train: add some, or "
                "leave out the class"
            )
        notes.append(f"no {split} images of {some(tuple(empty))}")
    return replace(source, notes=tuple(notes))


def check_files(source: Source, data: DataConfig) -> None:
    """Raise `UserError` naming the row of the first image that is missing."""
    assert source.paths is not None
    missing = (source.paths.stats()[:, 0] < 0).nonzero()[:, 0].tolist()
    if not missing:
        return
    found, name = find_table(data), source.paths.relative(missing[0])
    column, root = columns_of(found)["path"], root_of(data)
    rows = found.rows([column, column])
    number = next((number for number, cells in rows if path_of(cells[0], root) == name), 0)
    raise found.wrong(
        number,
        f"there is no file {str(source.paths[missing[0]])!a}; paths are absolute or from "
        f"--data.root, and {len(missing):,} of {len(source):,} are missing: `check` lists them",
    )


def has_test_rows(data: DataConfig) -> bool:
    """Whether the table `data.labels` has test images; `UserError` if it can't be read."""
    found = find_table(data)
    column = columns_of(found).get("split")
    rows = [] if column is None else found.rows([column, column])
    return any(SPLITS.get(text_of(cells[0]).lower()) == TEST for _, cells in rows)


def find_table(data: DataConfig) -> Table:
    """The table `data.labels`, from the current folder or from `data.root`.

    Raises:
        UserError: if there is none.
    """
    places = Path(data.labels), Path(data.root, data.labels)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        where = f"here or in --data.root {data.root!a}"
        raise UserError(f"--data.labels {data.labels!a}: there is no such file {where}")
    return open_table(file)


def columns_text(found: Table) -> str:
    """The names of some columns."""
    return some(tuple(map(printable, found.names)))


def columns_of(found: Table) -> dict[str, int]:
    """Where those of `COLUMNS` are that the table has.

    Raises:
        UserError: if there are no paths, or a column is there twice.
    """
    names = [name.strip().lower() for name in found.names]
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise UserError(f"{str(found.file)!a} has two columns {twice!a}")
    if "path" not in names:
        raise UserError(
            f"{str(found.file)!a} has no column 'path', but {columns_text(found)}: it should have "
            "path,label[,split][,fold][,weight]"
        )
    return {name: names.index(name) for name in COLUMNS if name in names}


def root_of(data: DataConfig) -> bytes:
    """What absolute paths below `data.root` begin with."""
    return os.path.join(os.fsencode(os.path.abspath(data.root)), b"")


def path_of(cell: object, root: bytes) -> bytes:
    """The path of an image, as a folder has it: from `root`, if it is below that.

    Raises:
        ValueError: if it can't be a path.
    """
    path = os.fsencode(cell) if isinstance(cell, str) else b""
    if not path or b"\0" in path:
        raise ValueError
    if b"./" in path or b"//" in path:
        path = os.path.normpath(path)
    return path.removeprefix(root)


@lru_cache(MOST_KNOWN)
def number_of(column: str, cell: object) -> float:
    """The value of a cell of the column split, fold or weight.

    Raises:
        ValueError: saying what it should be, if it has none.
    """
    text = text_of(cell).lower()
    if column == "split":
        if text not in SPLITS:
            raise ValueError("train, val or test")
        return SPLITS[text]
    if column == "fold" and not text:
        return NO_FOLD
    with suppress(ValueError):
        value = float(text)
        if 0 <= value < np.inf and (column == "weight" or value % 1 == 0):
            return value
    raise ValueError("0 or more" if column == "weight" else "0, 1, 2, ...")


def read_rows(found: Table, data: DataConfig) -> Rows:
    """Read the table once.

    Raises:
        UserError: if a column is missing, or a cell is not what it should be.
    """
    places = columns_of(found)
    others = [n for n, name in enumerate(found.names) if name.strip() and n not in places.values()]
    own = [places["label"]] if "label" in places else class_columns(found, places["path"], others)
    columns = {name: array("d") for name in COLUMNS[2:] if name in places}
    wanted = [places["path"], *own, *(places[name] for name in columns)]
    stop = 1 + len(own)
    numbers, hashes, kinds, root = array("q"), array("q"), array("q"), root_of(data)
    known: dict[Any, int] = {}  # the different labels

    def paths() -> Iterator[bytes]:
        for number, cells in found.rows(wanted):
            try:
                path = path_of(cells[0], root)
            except ValueError:
                raise found.wrong(number, f"{cells[0]!a:.80} is no path of an image") from None
            label = cells[1] if "label" in places else tuple(cells[1:stop])
            numbers.append(number)
            hashes.append(hash(path))
            kinds.append(known.setdefault(label, len(known)))
            for name, cell in zip(columns, cells[stop:], strict=True):
                try:
                    columns[name].append(number_of(name, cell))
                except ValueError as error:
                    what = f"{name} {text_of(cell)!a} should be {error}"
                    raise found.wrong(number, what) from None
            yield path

    found_paths = paths()
    if (first := next(found_paths, None)) is None:
        raise UserError(f"{str(found.file)!a} has no rows")
    path_list = PathList(data.root, chain((first,), found_paths))

    def wrong(kind: int, what: str) -> UserError:
        return found.wrong(numbers[kinds.index(kind)], what)

    if "label" in places:
        labels, names = labels_of_texts([*known], wrong)
    else:
        labels, names = labels_of_columns([*known], [found.names[n].strip() for n in own], wrong)
    return Rows(
        paths=path_list,
        hashes=np.asarray(hashes),
        numbers=np.asarray(numbers),
        kinds=np.asarray(kinds),
        labels=torch.from_numpy(labels),
        classes=tuple(map(printable, names)),
        columns={name: np.asarray(values) for name, values in columns.items()},
        ignored=[found.names[n] for n in others if n not in own],
    )


def class_columns(found: Table, path: int, others: list[int]) -> list[int]:
    """Which of the other columns are those of classes: they have 0, 1 or nothing in the first row.

    Raises:
        UserError: if there are none.
    """
    cells = next(found.rows([path, *others]), (0, ("",)))[1][1:] if others else ()
    own = [n for n, cell in zip(others, cells, strict=False) if text_of(cell).lower() in YES_OR_NO]
    if not own:
        raise UserError(
            f"{str(found.file)!a} has no column 'label', nor one per class with 0 and 1, but "
            f"{columns_text(found)}"
        )
    return own


def labels_of_texts(
    kinds: list[Any], wrong: Callable[[int, str], UserError]
) -> tuple[np.ndarray, list[str]]:
    """The labels in the different cells of a column, and the names of the classes.

    One each; several, if there is a list or a `|`: then nothing is none of the classes.
    """
    parts = [k if isinstance(k, tuple) else text_of(k).split("|") for k in kinds]
    has_several = any(isinstance(kind, tuple) or "|" in text_of(kind) for kind in kinds)
    texts = [[part.strip() for part in several] for several in parts]
    names = sorted({text for several in texts for text in several if text})
    places = {name: place for place, name in enumerate(names)}
    if not names or (not has_several and [""] in texts):
        raise wrong(
            next(n for n, several in enumerate(texts) if not any(several)), "label is empty"
        )
    if not has_several:
        return np.array([places[text] for (text,) in texts]), names
    labels = np.zeros((len(kinds), len(names)), np.int8)
    for row, several in enumerate(texts):
        labels[row, [places[text] for text in several if text]] = 1
    return labels, names


def labels_of_columns(
    kinds: list[Any], names: list[str], wrong: Callable[[int, str], UserError]
) -> tuple[np.ndarray, list[str]]:
    """The labels in different cells of a column per class, and the names of the classes."""
    order = sorted(range(len(names)), key=names.__getitem__)
    labels = np.zeros((len(kinds), len(names)), np.int8)
    for row, cells in enumerate(kinds):
        for place, column in enumerate(order):
            text = text_of(cells[column])
            if (label := YES_OR_NO.get(text.lower())) is None:
                what = f"{names[column]} {text!a} should be 1, 0, or empty for unknown"
                raise wrong(row, what)
            labels[row, place] = label
    return labels, sorted(names)


def find_new(found: Table, rows: Rows) -> np.ndarray:
    """Which rows do not repeat another row: (count,) bool.

    Raises:
        UserError: if a path has several labels, splits or folds.
    """
    is_new = np.ones(len(rows.numbers), bool)
    order = np.argsort(rows.hashes, kind="stable")
    hashes = rows.hashes[order]
    for place in np.flatnonzero(hashes[1:] == hashes[:-1]):
        first, second = order[place], order[place + 1]
        path = rows.paths.relative(first)
        if path != rows.paths.relative(second):
            continue
        one, other = rows.labels[rows.kinds[[first, second]]]
        columns = {name: values for name, values in rows.columns.items() if name != "weight"}
        what = [name for name, values in columns.items() if values[first] != values[second]]
        if what or not torch.equal(one, other):
            raise found.wrong(
                rows.numbers[second],
                f"{os.fsdecode(path)!a} has another {(what or ['label'])[0]} than in {found.row} "
                f"{rows.numbers[first]}",
            )
        is_new[second] = False
    return is_new


def is_in_split(found: Table, rows: Rows, data: DataConfig, split: str) -> np.ndarray:
    """Which rows are of `split`: (count,) bool.

    Raises:
        UserError: if they are divided in two ways, or a training image is in no fold.
    """
    splits = rows.columns.get("split", np.full(len(rows.numbers), TRAIN))
    folds, parts = rows.columns.get("fold"), ["val"] if (splits == VAL).any() else []
    if parts and folds is not None:
        raise UserError(
            f"{str(found.file)!a} has a split 'val', so there are no folds: leave out the column "
            "fold, or let val be train"
        )
    if val_part(parts, data) or split == "test":
        return splits == SPLITS[split]
    if folds is None:
        paths = rows.paths.relatives(torch.arange(len(rows.paths)))
        is_for_val = np.fromiter((is_val(path, data) for path in paths), bool)
    else:
        without = np.flatnonzero((folds == NO_FOLD) & (splits == TRAIN))
        if len(without):
            raise found.wrong(rows.numbers[without[0]], "fold is empty")
        is_for_val = folds == data.fold
    return (splits == TRAIN) & (is_for_val == (split == "val"))
