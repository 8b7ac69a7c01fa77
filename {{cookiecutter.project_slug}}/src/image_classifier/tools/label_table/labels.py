"""Your own images by a table of their labels.

    path,label,split          columns in any order; all but path and label may be left out
    a/1.jpg,rose,train        a path is absolute, or relative to `data.root`
    a/2.jpg,rose|thorn,val    several labels; or, in place of `label`, a column of 0 and 1 per class

A row that is wrong is named by its number. The tool kaggle-tables finds columns by other names.
"""

import math
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...config import DataConfig
from ...data import ALL, PathList, Source, check_own, divide
from ...errors import UserError
from ...extensions import find_tool
from ...runtime.console import printable, some
from .cells import NO_FOLD, SPLITS, TEST, TRAIN, VALUES, Column, path_cells
from .classes import labels_of_columns, labels_of_texts
from .columns import Roles, flag_of, notes_of, roles_by_name
from .paths import path_of, root_of
from .rows import Table, open_table


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
    is_own = split == ALL or is_in_split(found, rows, is_new, data, split)
    own = torch.from_numpy(is_new & is_own).nonzero()[:, 0]
    if not len(own):
        where = f"{str(found.file)!a} has no images for {split}"
        if split == "val" and np.any(rows.columns.get("fold", NO_FOLD) != NO_FOLD):
            where += f" in fold {data.fold} of {folds_text(rows)}"
        raise UserError(where)
    weights = rows.columns.get("weight")
    weights = None if weights is None else torch.from_numpy(weights)[own].float()
    if weights is not None and not weights.any():
        if split == "train":
            what = f"weight is 0, and so are those of all {len(own):,} images for train"
            raise found.wrong(rows.numbers[own[0]], what)
        weights = None  # which only training reads
    labels = rows.labels[torch.from_numpy(rows.kinds)[own]]
    source = Source(labels, rows.classes, paths=rows.paths.picked(own), weights=weights)
    what = "images" if split == ALL else f"{split} images"
    about = f"{str(found.file)!a}: {len(own):,} {what}"
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
        notes.append(f"no {what} of {some(tuple(empty))}")
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
    rows = read_rows(found, data)
    own = torch.arange(len(rows.paths))
    number = rows.numbers[[*rows.paths.relatives(own)].index(name)]
    finder = find_tool("finder", "kaggle-tables")
    hint = finder.hint_at(name, data, found.file) if finder else "paths are from --data.root"
    raise found.wrong(
        number,
        f"there is no file {str(source.paths[missing[0]])!a}; {hint}; {len(missing):,} of "
        f"{len(source):,} are missing: `check` lists them",
    )


def has_test_rows(data: DataConfig) -> bool:
    """Whether the table `data.labels` has test images; `UserError` if it can't be read."""
    return TEST in read_rows(find_table(data), data).columns.get("split", ())


def has_parts(data: DataConfig) -> bool:
    """Whether the table `data.labels` divides its images; `UserError` if it can't be read."""
    return not {"split", "fold"}.isdisjoint(read_rows(find_table(data), data).columns)


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
    first, *others = sorted({*rows.columns["fold"].astype(int).tolist()} - {NO_FOLD})
    text = f"{first} .. {max(others, default=first)}"
    return f"{text}: --data.fold {first}, or number them from 0" if first else text


def read_rows(found: Table, data: DataConfig) -> Rows:
    """Read the table once.

    Raises:
        UserError: if a column is missing, or a cell is not what it should be.
    """
    finder = find_tool("finder", "kaggle-tables")
    roles = roles_by_name(found, data)
    limits = {}
    if finder:
        roles = finder.with_path(found, data, roles)
        limits = finder.limits_of_others(found, roles)
    limits |= {name: math.inf for role, own in roles.items() if role != "path" for name in own}
    numbers = array("q")
    hashes = array("q")  # of 64 bits: those of different paths are different
    columns = {name: Column(found, name, numbers, most) for name, most in limits.items()}
    root = root_of(data)

    def paths() -> Iterator[bytes]:
        for number, cell in path_cells(found, roles["path"][0], columns):
            path = path_of(cell, root)
            if not path:
                raise found.wrong(number, f"{cell!a:.80} is no path of an image")
            if finder:
                path = finder.on_disk(path, root)
            numbers.append(number)
            hashes.append(hash(path))
            yield path
        if not numbers:
            raise UserError(f"{str(found.file)!a} has no rows")

    path_list = PathList(data.root, paths())
    if finder:
        roles |= finder.roles_by_cells(found, roles, columns)
    if "label" in roles:
        column = columns[roles["label"][0]]
        kinds = np.asarray(column.kinds)
        labels, spellings = labels_of_texts(column)
    else:
        kinds = np.arange(len(numbers))
        labels, spellings = labels_of_columns([columns[name] for name in roles["labels"]])
    return Rows(
        paths=path_list,
        hashes=np.asarray(hashes),
        numbers=np.asarray(numbers),
        kinds=kinds,
        labels=torch.from_numpy(labels),
        classes=tuple(map(printable, spellings)),
        columns=values_of(roles, columns),
        column_notes=notes_of(found, roles),
        class_notes=finder.notes_of_names(spellings) if finder else [],
    )


def values_of(roles: Roles, columns: dict[str, Column]) -> dict[str, np.ndarray]:
    """The values of the columns that are no labels: split, fold, weight, group, if there are."""
    values = {}
    for role in filter(VALUES.__contains__, roles):
        for name in roles[role]:
            part = flag_of(name) if role == "split" else None
            own = columns[name].values(*VALUES["flag" if part else role])
            if part:
                own = np.where(own == 1, part, values.get(role, TRAIN))
            values[role] = own
    return values


def find_new(found: Table, rows: Rows) -> np.ndarray:
    """Which rows do not repeat another row: (count,) bool.

    Raises:
        UserError: if a path has several labels, splits or folds.
    """
    _, firsts, places = np.unique(rows.hashes, return_index=True, return_inverse=True)
    first_of = firsts[places]
    is_new = first_of == np.arange(len(first_of))
    for second in np.flatnonzero(~is_new):
        first = first_of[second]
        path = os.fsdecode(rows.paths.relative(second))
        one, other = rows.labels[rows.kinds[[first, second]]]
        columns = {name: values for name, values in rows.columns.items() if name != "weight"}
        what = [name for name, values in columns.items() if values[first] != values[second]]
        if what or not torch.equal(one, other):
            raise found.wrong(
                rows.numbers[second],
                f"{path!a} has another {(what or ['label'])[0]} than in {found.row} "
                f"{rows.numbers[first]}",
            )
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
    parts = {part: part for part in ("val", "test") if (splits == SPLITS[part]).any()}
    if "val" in parts and folds is not None:
        raise UserError(
            f"{str(found.file)!a} has a split 'val', so there are no folds: leave out the column "
            "fold, or let val be train"
        )
    own_parts = parts if folds is None else parts | {"val": "fold"}
    others = data if folds is None else replace(data, fold=0)  # without that of the column
    check_own(own_parts, data.labels, others, split)
    is_held_out = getattr(data, "test_fraction", 0) and folds is None and "test" not in parts
    if "val" in parts or (split == "test" and not is_held_out):
        return splits == SPLITS[split]
    if folds is None:
        own = torch.from_numpy((splits == TRAIN) & is_new).nonzero()[:, 0]
        labels = rows.labels[torch.from_numpy(rows.kinds)[own]]
        names = rows.paths.relatives(own)
        if has_groups := "group" in rows.columns:
            names = [b"%d" % number for number in rows.columns["group"][own.numpy()]]
        is_chosen = np.zeros(len(splits), bool)
        is_chosen[own[divide(names, labels, data, split, has_groups)]] = True
        return is_chosen
    without = np.flatnonzero((folds == NO_FOLD) & (splits == TRAIN))
    if len(without):
        raise found.wrong(rows.numbers[without[0]], "fold is empty")
    return (splits == TRAIN) & ((folds == data.fold) == (split == "val"))
