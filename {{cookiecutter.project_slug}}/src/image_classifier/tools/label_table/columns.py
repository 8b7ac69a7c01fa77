"""Which columns of a table are the paths, the labels and the split.

They are called `path`, `label` and as `ROLES` says, or `data.columns` names them. Names that are
usual elsewhere, such as `Image,Id`, count where the cells prove that they are meant.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ...config import DataConfig
from ...errors import UserError, did_you_mean
from ...runtime.console import printable, some
from .cells import BLANK, SPLITS, yes_or_no
from .paths import hint_at, path_of, root_of
from .rows import Table, open_table, text_of

ROLES = ("path", "label", "split", "fold", "weight", "group")
# What others call these, in small letters and digits alone.
PATHS = "image images img photo picture file files filename filenames filepath filepaths fname"
PATHS += " imagepath imagefile imagefilename imagename imageid imageindex imgpath imgname imgid"
PATHS += " photoid paths name id"
LABELS = "labels class classes classname classlabel category target tag tags species breed y"
LABELS += " labelname findinglabels"
SPLIT = "set subset partition phase usage dataset datasplit splits"
ID = "id"  # may be the path, as in `id,label`, or the label, as in `Image,Id`
# Yes and no in these say which part of a dataset an image is in, as fastai's `is_valid` does; and
# `valid` alone may mean that the image is whole. None of them is a class.
FLAG = re.compile(
    r"(?:is)?(?:(?P<train>train(?:ing)?)|(?P<is_test>test(?:ing)?)|(?P<is_val>val(?:idation)?|(?<=is)valid)"
    r"|(?P<valid>valid))(?:set|split|img|image)?"
)
LOOKED_AT = 50  # rows whose files tell whether a column has paths
CHUNK = 10_000  # rows that are counted at once
MOST_DIFFERENT = 100  # cells of a column that may be that of a class or of a split
SHOWN = 20  # names of columns


class Columns(NamedTuple):
    """Where the columns of a table are."""

    path: int
    labels: list[int]  # the column of the labels, or one for each class
    has_text: bool  # whether it is the first of these
    others: dict[str, int]  # split, fold, weight, group, is_val, is_test
    notes: list[str]  # what was taken for what, if its name does not say so, and what for nothing


def columns_of(found: Table, data: DataConfig) -> Columns:
    """The columns of a table.

    Raises:
        UserError: if there are no paths or labels, or they may be in several columns; or a column
            is there twice.
    """
    status = found.file.stat()
    stamp = status.st_size, status.st_mtime_ns
    return find_columns(found.file, stamp, data.root, data.columns)


@lru_cache(8)
def find_columns(file: Path, _: tuple[int, int], root: str, columns: tuple[str, ...]) -> Columns:
    """`columns_of`, of a file that has not changed since."""
    found = open_table(file)
    data = DataConfig("folder", root, labels=str(file), columns=columns)
    names = [name.strip().lower() for name in found.names]
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise UserError(f"{str(file)!a} has two columns {twice!a}")
    places, labels = named_columns(found, columns)
    for role in ROLES:
        place = names.index(role) if role in names else -1
        if place < 0 or place in (*places.values(), *labels):
            continue
        if role == "label":
            labels = labels or [place]
        elif role != "split" or not divides(places):
            places.setdefault(role, place)
    if "path" not in places:
        places["path"] = find_paths(found, data)
    free = [n for n, name in enumerate(names) if name and n not in (*places.values(), *labels)]
    parts = [n for n in free if FLAG.fullmatch(short(names[n])) or short(names[n]) in SPLIT.split()]
    counted = free if not labels else [] if divides(places) else parts
    counts = count_cells(found, places["path"], counted)
    if not divides(places):
        places |= find_split(found, counts)
    has_text = len(labels) == 1
    if not labels:
        free = [n for n in free if n not in places.values()]
        labels, has_text = find_labels(found, places["path"], free, counts)
    return Columns(
        path=places["path"],
        labels=labels,
        has_text=has_text,
        others={role: place for role, place in places.items() if role != "path"},
        notes=notes_of(found, places, labels, has_text),
    )


def short(name: str) -> str:
    """A name in small letters and digits alone: `Image Id` -> `imageid`."""
    return re.sub(r"[\W_]", "", name.lower())


def divides(places: dict[str, int]) -> bool:
    """Whether a column says in which part an image is."""
    return bool(places.keys() & {"split", "is_val", "is_test"})


def listing(found: Table, columns: list[int]) -> str:
    """The names of columns."""
    names = [printable(found.names[n].strip()) for n in columns]
    return ", ".join(names[:SHOWN]) + f", ... ({len(names):,})" * (len(names) > SHOWN)


def columns_text(found: Table) -> str:
    """The number of columns, and the names of some."""
    return some(tuple(map(printable, found.names)), SHOWN)


def words_for(found: Table, labels: list[int]) -> str:
    """What names columns of labels, as words of a command line."""
    words = [quote(f"label={printable(found.names[n].strip())}") for n in labels[:SHOWN]]
    return " ".join(words or ["label=COLUMN"]) + " ..." * (len(labels) > SHOWN)


def notes_of(found: Table, places: dict[str, int], labels: list[int], has_text: bool) -> list[str]:
    """What was taken for what, and what is ignored."""
    said = {role: [n] for role, n in places.items()}
    said |= {"label" if has_text else "labels": labels}
    notes = []
    for role, own in said.items():
        kind = {"is_val": "split", "is_test": "split"}.get(role, role)
        if [found.names[n].strip().lower() for n in own] != [kind]:
            notes.append(f"{kind}: column{'s' * (len(own) > 1)} {listing(found, own)}")
    if not has_text and len(labels) == 1:
        notes[-1] += f", its yes and no as two classes: --data.columns {words_for(found, labels)}"
    taken = {*places.values(), *labels}
    ignored = [n for n, name in enumerate(found.names) if name.strip() and n not in taken]
    if ignored:
        notes.append(f"ignored columns: {listing(found, ignored)}")
    return notes


def named_columns(found: Table, columns: tuple[str, ...]) -> tuple[dict[str, int], list[int]]:
    """The columns that `data.columns` names: by their roles, and those of labels.

    Raises:
        UserError: if there is no such column, or no such role.
    """
    places: dict[str, int] = {}
    labels: list[int] = []
    names = [name.strip() for name in found.names]
    for word in columns:
        role, _, name = word.partition("=")
        same = [n for n, own in enumerate(names) if own.lower() == name.strip().lower()]
        if role not in ROLES or not name or (role != "label" and role in places):
            raise UserError(
                f"--data.columns {word!a} should be such as path=Image label=Id, each of "
                f"{', '.join(ROLES)} once; label=ant label=bee are columns of 0 and 1"
            )
        if not same:
            raise UserError(
                f"--data.columns {word!a}: {str(found.file)!a} has {columns_text(found)}"
                f"{did_you_mean(name, names)}"
            )
        if role == "label":
            labels.append(same[0])
            continue
        flag = FLAG.fullmatch(short(name)) if role == "split" else None
        kind = flag.lastgroup if flag else role
        places[role if kind == "train" else "is_val" if kind == "valid" else kind] = same[0]
    return places, labels


def find_paths(found: Table, data: DataConfig) -> int:
    """The column of the paths, by another name: most of its cells are files.

    Raises:
        UserError: if there is none.
    """
    names = [short(name) for name in found.names]
    called = [n for n, name in enumerate(names) if name in PATHS.split()]
    called.sort(key=lambda n: names[n] == ID)
    for column in called:
        if has_files(found, column, data):
            return column
    what = f"{str(found.file)!a} has no column 'path', but {columns_text(found)}: "
    others = [n for n in range(len(names)) if n not in called and has_files(found, n, data)]
    if any(is_file(path_of(found.names[n], root_of(data)), data) for n in others if names[n]):
        raise UserError(f"{what}its first line should name the columns, such as path,label")
    if others:
        choices = [quote(f"path={printable(found.names[n].strip())}") for n in others]
        raise UserError(f"{what}--data.columns {', or '.join(choices)}")
    what += "it should have path,label[,split][,fold][,weight][,group]"
    what += ", or say --data.columns path=COLUMN label=COLUMN"
    for number, path in paths_in(found, called[0], data) if called else ():
        if not is_file(path, data):
            hint = hint_at(path or b"", data, found.file)
            what += f"; {found.names[called[0]]!a} in {found.row} {number}, "
            what += f"{os.fsdecode(path or b'')!a:.80}, is no file: {hint}"
            break
    raise UserError(what)


def has_files(found: Table, column: int, data: DataConfig) -> bool:
    """Whether most of the first cells of a column are files."""
    there = [is_file(path, data) for _, path in paths_in(found, column, data)]
    return sum(there) * 2 > len(there)


def paths_in(found: Table, column: int, data: DataConfig) -> Iterator[tuple[int, bytes | None]]:
    """The first cells of a column as paths, with the numbers of their rows; None: it is no path."""
    root = root_of(data)
    for number, cells in islice(found.rows([column, column]), LOOKED_AT):
        path = None
        with suppress(ValueError):
            path = path_of(cells[0], root)
        yield number, path


def is_file(path: bytes | None, data: DataConfig) -> bool:
    """Whether there is such a file."""
    return path is not None and os.path.isfile(os.path.join(os.fsencode(data.root), path))


def count_cells(found: Table, path: int, columns: list[int]) -> dict[int, Counter[str]]:
    """How often each text is in some columns, without those with many different ones."""
    counts: dict[int, Counter[object]] = {n: Counter() for n in columns}
    rows = (cells for _, cells in found.rows([path, *columns])) if columns else iter(())
    while counts and (chunk := [*islice(rows, CHUNK)]):
        for n, cells in zip((path, *columns), zip(*chunk, strict=True), strict=True):
            if n in counts:
                counts[n].update(cells)
                if len(counts[n]) > MOST_DIFFERENT:
                    del counts[n]
    texts: dict[int, Counter[str]] = {n: Counter() for n in counts}
    for n, count in counts.items():
        for cell, times in count.items():
            texts[n][text_of(cell)] += times
    return texts


def find_split(found: Table, counts: dict[int, Counter[str]]) -> dict[str, int]:
    """The columns that say in which part of a dataset an image is, by other names than `split`.

    Raises:
        UserError: if they leave open in which.
    """
    flags: dict[str, int] = {}
    for n, cells in counts.items():
        name = short(found.names[n])
        if name in SPLIT.split() and all(text.lower() in SPLITS for text in cells):
            return {"split": n}
        flag = FLAG.fullmatch(name)
        said = [yes_or_no(text) in (0, 1) for text in cells]
        # `is_valid` is clear: a cell that says neither is refused when it is read.
        if flag and (any(said) if name.startswith("is") else all(said)):
            flags.setdefault(str(flag.lastgroup), n)
    if own := {role: n for role, n in flags.items() if role.startswith("is_")}:
        return own
    if "train" in flags:
        name = found.names[flags["train"]]
        raise UserError(
            f"{str(found.file)!a}: column {name!a} says which images are not for training, but not "
            "whether for validation or for the test: write a column split with train, val and test"
        )
    return {}


def find_labels(
    found: Table, path: int, free: list[int], counts: dict[int, Counter[str]]
) -> tuple[list[int], bool]:
    """The columns of labels by another name than `label`, and whether it is one with their text.

    All cells decide: those of a class have 1, 0 or nothing.

    Raises:
        UserError: if there is none, or no way to tell.
    """
    names = [short(name) for name in found.names]
    called = [n for n in free if names[n] in LABELS.split()]
    classes = []
    doubtful = {}
    for n in free:
        cells = Counter() if n not in counts or FLAG.fullmatch(names[n]) else counts[n]
        known = sum(
            times
            for text, times in cells.items()
            if yes_or_no(text) is not None and text.lower() not in BLANK
        )
        wrong = {text: times for text, times in cells.items() if yes_or_no(text) is None}
        if known and not wrong:
            classes.append(n)
        elif known >= sum(wrong.values()) > 0:
            doubtful[n] = next(iter(wrong))
    if not called and not classes and not doubtful:
        called = [n for n in free if names[n] == ID and repeats(found, path, n)]
    if called and (len(called) > 1 or len({*classes} - {*called}) > 1):
        choices = [words_for(found, [n]) for n in called]
        if others := [n for n in classes if n not in called]:
            choices.append(words_for(found, others))
        raise UserError(
            f"{str(found.file)!a}: which column has the labels? --data.columns "
            f"{', or '.join(choices)}"
        )
    if called:
        return called, True
    for n, text in doubtful.items():
        number = next(number for number, cells in found.rows([n, n]) if text_of(cells[0]) == text)
        raise found.wrong(
            number,
            f"{found.names[n].strip()} {text!a:.80} should be 1, 0, or empty for unknown, as most "
            "of that column is; if it is no class, name those that are: --data.columns "
            f"{words_for(found, classes)}",
        )
    if classes:
        return classes, False
    raise UserError(
        f"{str(found.file)!a} has no column 'label', nor one per class with 0 and 1, but "
        f"{columns_text(found)}: --data.columns {words_for(found, free if len(free) == 1 else [])}"
    )


def repeats(found: Table, path: int, column: int) -> bool:
    """Whether a cell of a column is there again, as that of a class is."""
    cells = [cells[1] for _, cells in found.rows([path, column])]
    return len(set(cells)) < len(cells)
