"""Your own images by a table of their labels: CSV, JSON lines or Parquet.

    path,label,split          columns in any order; all but path and label may be left out
    a/1.jpg,rose,train        a path is absolute, or relative to `data.root`
    a/2.jpg,rose|thorn,val    several labels; or, in place of `label`, a column of 0 and 1 per class

`columns.py` finds the columns, also by other names. A row that is wrong is named by its number.
"""

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...config import DataConfig
from ...data import PathList, Source, check_fold, divide
from ...errors import UserError
from ...runtime.console import printable, some
from .cells import NO_FOLD, SPLITS, TEST, TRAIN, VAL, number_of
from .classes import labels_of_columns, labels_of_texts
from .columns import columns_of
from .paths import hint_at, path_of, root_of
from .rows import Table, open_table, text_of


class Rows(NamedTuple):
    """The rows of a table as flat arrays."""

    paths: PathList
    hashes: np.ndarray  # (count,) int64, of the paths
    numbers: np.ndarray  # (count,) int64, of the rows
    kinds: np.ndarray  # (count,) int64, indices into `labels`
    labels: Tensor  # different labels that rows have, as a `Source` has those of images
    classes: tuple[str, ...]
    columns: dict[str, np.ndarray]  # (count,) each: split, fold, weight, group, if it has them
    column_notes: list[str]  # what was taken for what
    class_notes: list[str]  # names of classes that may be a mistake


def find_dataset(data: DataConfig) -> Callable[[DataConfig, str], Source] | None:
    """What reads the images, if there is a table of them."""
    return table if data.labels else None


def table(data: DataConfig, split: str) -> Source:
    """The images that the table `data.labels` names for `split`, in the order of its rows.

    The classes are the labels of all splits, sorted. The images for validation are those with such
    a `split`; if there are none, the training images whose `fold` is `data.fold`; and without that
    column those that a hash of their path, or of their `group`, chooses.

    Raises:
        UserError: if the table can't be used; it names the row.
    """
    found = find_table(data)
    rows = read_rows(found, data)
    is_new = find_new(found, rows)
    is_own = is_in_split(found, rows, is_new, data, split)
    own = torch.from_numpy(is_new & is_own).nonzero()[:, 0]
    if not len(own):
        where = f"{str(found.file)!a} has no images for {split}"
        if split == "val" and "fold" in rows.columns:
            where += f" in fold {data.fold} of {folds_text(rows)}"
        raise UserError(where)
    weights = rows.columns.get("weight")
    weights = None if weights is None else torch.from_numpy(weights)[own].float()
    if weights is not None and not weights.any():
        if split == "train":
            what = f"weight is 0, and so are those of all {len(own):,} images for train"
            raise found.wrong(rows.numbers[own[0]], what)
        weights = None  # which only training reads
    source = Source(
        labels=rows.labels[torch.from_numpy(rows.kinds)[own]],
        classes=rows.classes,
        paths=rows.paths.picked(own),
        weights=weights,
    )
    about = f"{str(found.file)!a}: {len(own):,} images for {split}"
    notes = ["; ".join([about, *rows.column_notes])]
    if split == "train":
        notes += [f"warning: {str(found.file)!a}: {note}" for note in rows.class_notes]
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
    """Raise `UserError` naming the row of the first image that is missing, if it ends the run."""
    if not data.labels or getattr(data, "on_bad_image", "stop") == "skip":
        return
    assert source.paths is not None
    missing = (source.paths.stats()[:, 0] < 0).nonzero()[:, 0].tolist()
    if not missing:
        return
    found = find_table(data)
    name = source.paths.relative(missing[0])
    column = columns_of(found, data).path
    root = root_of(data)
    rows = found.rows([column, column])
    number = next((number for number, cells in rows if path_of(cells[0], root) == name), 0)
    raise found.wrong(
        number,
        f"there is no file {str(source.paths[missing[0]])!a}; {hint_at(name, data, found.file)}; "
        f"{len(missing):,} of {len(source):,} are missing: `check` lists them",
    )


def has_test_rows(data: DataConfig) -> bool:
    """Whether the table `data.labels` has test images; `UserError` if it can't be read."""
    splits = read_rows(find_table(data), data).columns.get("split", np.empty(0))
    return bool((splits == TEST).any())


def find_table(data: DataConfig) -> Table:
    """The table `data.labels`, from the current folder or from `data.root`.

    Raises:
        UserError: if there is none, or its name alone is given and each of the two has another.
    """
    places = Path(data.labels), Path(data.root, data.labels)
    files = [place for place in places if place.is_file()]
    if not files:
        where = f"here or in --data.root {data.root!a}"
        raise UserError(f"--data.labels {data.labels!a}: there is no such file {where}")
    # What `predict` wrote here must not be taken in silence for the table of the images.
    if len(files) == 2 and not os.path.dirname(data.labels) and not files[0].samefile(files[1]):
        other = os.path.join(os.curdir, data.labels)
        raise UserError(
            f"--data.labels {data.labels!a}: there is one here and one in --data.root "
            f"{data.root!a}: say {str(files[1])!a} or {other!a}"
        )
    return open_table(files[0])


def folds_text(rows: Rows) -> str:
    """Which folds there are, and what to do if they do not begin with 0."""
    folds = sorted({*rows.columns["fold"].astype(int).tolist()} - {NO_FOLD})
    first = folds[0]
    last = folds[-1]
    whole = len(folds) == last - first + 1
    text = f"{first} .. {last}" if whole else some(tuple(map(str, folds)), 10)
    if first:
        text += f": --data.fold {first}, or number them from 0, as cross-validate does"
    return text


def read_rows(found: Table, data: DataConfig) -> Rows:
    """Read the table once.

    Raises:
        UserError: if a column is missing, or a cell is not what it should be.
    """
    where = columns_of(found, data)
    columns = {role: array("d") for role in where.others}
    wanted = [where.path, *where.labels, *where.others.values()]
    stop = 1 + len(where.labels)
    numbers = array("q")
    hashes = array("q")
    kinds = array("q")
    root = root_of(data)
    known: dict[Any, int] = {}  # the different labels

    def paths() -> Iterator[bytes]:
        for number, cells in found.rows(wanted):
            try:
                path = path_of(cells[0], root)
            except ValueError:
                raise found.wrong(number, f"{cells[0]!a:.80} is no path of an image") from None
            label = cells[1] if where.has_text else tuple(cells[1:stop])
            numbers.append(number)
            hashes.append(hash(path))
            kinds.append(known.setdefault(label, len(known)))
            for name, cell in zip(columns, cells[stop:], strict=True):
                try:
                    columns[name].append(number_of(name, cell))
                except ValueError as error:
                    column = found.names[where.others[name]].strip()
                    what = f"{column} {text_of(cell)!a:.80} should be {error}"
                    raise found.wrong(number, what) from None
            yield path

    found_paths = paths()
    if (first := next(found_paths, None)) is None:
        raise UserError(f"{str(found.file)!a} has no rows")
    path_list = PathList(data.root, chain((first,), found_paths))

    def wrong(kind: int, what: str) -> UserError:
        return found.wrong(numbers[kinds.index(kind)], what)

    if where.has_text:
        labels, names, notes = labels_of_texts([*known], wrong)
    else:
        own = [found.names[n].strip() for n in where.labels]
        labels, names, notes = labels_of_columns([*known], own, wrong)
    return Rows(
        paths=path_list,
        hashes=np.asarray(hashes),
        numbers=np.asarray(numbers),
        kinds=np.asarray(kinds),
        labels=torch.from_numpy(labels),
        classes=tuple(map(printable, names)),
        columns=with_split({name: np.asarray(values) for name, values in columns.items()}),
        column_notes=where.notes,
        class_notes=notes,
    )


def with_split(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns with `split` for those that say whether an image is for validation or a test."""
    for role, part in (("is_val", VAL), ("is_test", TEST)):
        if (is_part := columns.pop(role, None)) is not None:
            was = columns.get("split", np.full(len(is_part), TRAIN))
            columns["split"] = np.where(is_part == 1, part, was)
    return columns


def find_new(found: Table, rows: Rows) -> np.ndarray:
    """Which rows do not repeat another row: (count,) bool.

    Raises:
        UserError: if a path has several labels, splits or folds.
    """
    is_new = np.ones(len(rows.numbers), bool)
    order = np.argsort(rows.hashes, kind="stable")
    hashes = rows.hashes[order]
    for place in np.flatnonzero(hashes[1:] == hashes[:-1]):
        first = order[place]
        second = order[place + 1]
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


def is_in_split(
    found: Table, rows: Rows, is_new: np.ndarray, data: DataConfig, split: str
) -> np.ndarray:
    """Which of the rows that are new, (count,) bool, are of `split`, alike.

    Raises:
        UserError: if they are divided in two ways, or a training image is in no fold.
    """
    splits = rows.columns.get("split", np.full(len(rows.numbers), TRAIN))
    folds = rows.columns.get("fold")
    val = "val" if (splits == VAL).any() else None
    if val and folds is not None:
        raise UserError(
            f"{str(found.file)!a} has a split 'val', so there are no folds: leave out the column "
            "fold, or let val be train"
        )
    check_fold(val, data.fold, data.labels)
    is_held_out = getattr(data, "test_fraction", 0) and folds is None
    if val or (split == "test" and not is_held_out):
        return splits == SPLITS[split]
    if folds is None:
        own = torch.from_numpy((splits == TRAIN) & is_new).nonzero()[:, 0]
        labels = rows.labels[torch.from_numpy(rows.kinds)[own]]
        names = rows.paths.relatives(own)
        if has_groups := "group" in rows.columns:
            names = [b"%d" % number for number in rows.columns["group"][own]]
        is_chosen = np.zeros(len(splits), bool)
        is_chosen[own[divide(names, labels, data, split, has_groups)]] = True
        return is_chosen
    without = np.flatnonzero((folds == NO_FOLD) & (splits == TRAIN))
    if len(without):
        raise found.wrong(rows.numbers[without[0]], "fold is empty")
    return (splits == TRAIN) & ((folds == data.fold) == (split == "val"))
