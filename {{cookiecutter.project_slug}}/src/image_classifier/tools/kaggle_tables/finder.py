"""Columns of a table by what is in their cells, where their names do not say what they are.

A column of files has the paths, one of yes and no called `is_valid` is the split, and columns where
most cells are 0 or 1 are those of classes.
"""

import math
import os
from itertools import chain, islice

import numpy as np

from ...config import DataConfig
from ...errors import UserError
from ..label_table.cells import BLANK, SPLITS, Column, yes_or_no
from ..label_table.columns import Roles, flag_of, listing, short, words_for
from ..label_table.paths import path_of, root_of
from ..label_table.rows import Table
from .disk import hint_at, on_disk
from .names import notes_of_names

__all__ = [
    "hint_at",
    "limits_of_others",
    "notes_of_names",
    "on_disk",
    "roles_by_cells",
    "with_path",
]

# What others call labels and splits, in small letters and digits alone.
LABELS = "labels class classes classname classlabel category target tag tags species breed y"
LABELS += " labelname findinglabels"
SPLIT = "set subset partition phase usage dataset datasplit splits"
ID = "id"  # may be the path, as in `id,label`, or the label, as in `Image,Id`
LOOKED_AT = 50  # rows whose files tell whether a column has paths
MOST_DIFFERENT = 100  # cells of a column that may be that of a class or of a split


def with_path(found: Table, data: DataConfig, roles: Roles) -> Roles:
    """The roles of columns, with that of the paths."""
    return roles if "path" in roles else {"path": [find_path(found, data)]} | roles


def limits_of_others(found: Table, roles: Roles) -> dict[str, float]:
    """The columns whose cells tell what they are, and how many different cells each may have."""
    free = [name for name in found.names if name.strip() and name not in chain(*roles.values())]
    if "label" in roles or "labels" in roles:
        is_open = "split" not in roles
        free = [name for name in free if is_open and may_divide(name)]
    called = (*LABELS.split(), ID)
    return {name: math.inf if short(name) in called else MOST_DIFFERENT for name in free}


def may_divide(name: str) -> bool:
    """Whether a column of this name may say which part of a dataset an image is in."""
    return short(name) in SPLIT.split() or flag_of(name) is not None


def find_path(found: Table, data: DataConfig) -> str:
    """The column of the paths, by another name: most of its cells are files.

    Raises:
        UserError: if there is none, or there are others with other files.
    """
    root = root_of(data)
    names = [name for name in found.names if name.strip()]
    if not names:
        raise UserError(
            f"{str(found.file)!a}: its first line is blank, and should name the columns, such as "
            "path,label"
        )
    rows = [*islice(found.rows(names), LOOKED_AT)]
    paths = {
        name: [on_disk(path_of(row[n], root), root) for _, row in rows]
        for n, name in enumerate(names)
    }
    are_files = {name: [is_file(path, root) for path in own] for name, own in paths.items()}
    there = [name for name in names if 2 * sum(are_files[name]) > len(rows)]
    what = f"{str(found.file)!a} has no column 'path', but {listing(names)}: "
    if len({tuple(paths[name]) for name in there}) > 1:
        raise UserError(what + ", or ".join(words_for([name], "path") for name in there))
    if there and is_file(on_disk(path_of(there[0], root), root), root):
        raise UserError(f"{what}its first line should name the columns, such as path,label")
    if there:
        return there[0]
    what += "it should have path,label[,split][,fold][,weight][,group], or say --data.columns "
    what += "path=COLUMN label=COLUMN"
    if rows:
        name = max(names, key=lambda name: sum(are_files[name]))
        place = are_files[name].index(False)
        path = paths[name][place]
        what += f"; {name!a} in {found.row} {rows[place][0]}, {os.fsdecode(path)!a:.80}, is no "
        what += f"file: {hint_at(path, data, found.file)}"
    raise UserError(what)


def is_file(path: bytes, root: bytes) -> bool:
    """Whether there is such a file."""
    return os.path.isfile(os.path.join(root, path))


def roles_by_cells(found: Table, roles: Roles, columns: dict[str, Column]) -> Roles:
    """The columns of the labels and the split among `columns` that have no role yet.

    Raises:
        UserError: if there are no labels; or there is no way to tell.
    """
    taken = {*chain(*roles.values())}
    free = {n: column for n, column in columns.items() if n not in taken and column.is_whole()}
    more: Roles = {}
    if "split" not in roles and (names := find_split(found, free)):
        more["split"] = names
        free = {name: column for name, column in free.items() if name not in names}
    if "label" not in roles and "labels" not in roles:
        more |= find_labels(found, free)
    return more


def find_split(found: Table, columns: dict[str, Column]) -> list[str]:
    """The columns that say in which part of a dataset an image is, by other names than `split`.

    Raises:
        UserError: if they leave open in which.
    """
    flags = []
    for name, column in columns.items():
        texts = [text.lower() for text in column.texts()]
        if short(name) in SPLIT.split() and SPLITS.keys() >= {*texts}:
            return [name]
        # `is_valid` is clear: a cell that says neither is refused when it is read. But `valid`
        # alone may mean that the image is whole.
        agree = any if short(name).startswith("is") else all
        is_flag = flag_of(name) is not None and short(name) != "valid"
        if is_flag and agree(yes_or_no(text) in (0, 1) for text in texts):
            flags.append(name)
    if flags and not any(map(flag_of, flags)):
        raise UserError(
            f"{str(found.file)!a}: column {flags[0]!a} says which images are not for training, but "
            "not whether for validation or for the test: write a column split with train, val and "
            "test"
        )
    return [name for name in flags if flag_of(name)]


def find_labels(found: Table, columns: dict[str, Column]) -> Roles:
    """The columns of labels by another name than `label`.

    All cells decide: most of those of a class are 1 or 0.

    Raises:
        UserError: if there is none, or no way to tell.
    """
    called = [name for name in columns if short(name) in LABELS.split()]
    classes = [name for name, column in columns.items() if is_of_class(column)]
    if not called and not classes:
        ids = (name for name in columns if short(name) == ID)
        called = [name for name in ids if len(columns[name].cells) < len(columns[name].kinds)]
    others = [name for name in classes if name not in called]
    if len(called) > 1 or (called and len(others) > 1):
        choices = [words_for([name]) for name in called] + [words_for(others)] * bool(others)
        which = ", or ".join(choices)
        raise UserError(f"{str(found.file)!a}: which column has the labels? {which}")
    if called:
        return {"label": called}
    if classes:
        return {"labels": classes}
    raise UserError(
        f"{str(found.file)!a} has no column 'label', nor one per class with 0 and 1, but "
        f"{listing(found.names)}: --data.columns label=COLUMN"
    )


def is_of_class(column: Column) -> bool:
    """Whether most of the cells of a column say whether an image is of a class."""
    if flag_of(column.name) is not None:
        return False
    texts = column.texts()
    counts = np.bincount(column.kinds, minlength=len(texts))
    is_wrong = [yes_or_no(text) is None for text in texts]
    is_blank = [text.lower() in BLANK for text in texts]
    num_wrong = counts[is_wrong].sum()
    num_said = counts.sum() - num_wrong - counts[is_blank].sum()
    return num_said >= max(num_wrong, 1)
