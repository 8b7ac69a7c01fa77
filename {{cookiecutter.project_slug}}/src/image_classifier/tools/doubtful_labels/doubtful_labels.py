"""Ranks the images of a cross-validation, and writes which are probably mislabeled."""

import csv
import io
import os
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ...config import DataConfig
from ...data import BadImageError, Source, are_in_folders, find_folders
from ...errors import UserError
from ...extensions import need_tool
from ...runtime.console import printable, printable_path
from ...runtime.files import read_plain, write_text, write_whole
from .folds import read_folds
from .picture import LETTERS, Tile, draw_tiles
from .ranking import rank_labels

MOST_SHOWN, MOST_PAIRS = 24, 3
HEAD = ("path", "label", "predicted", "label_probability", "predicted_probability", "candidate")
MOST_OF_CLASS = 11  # letters of its name below an image
BLANK = " \t\"'\u200c\u200d"  # what a spreadsheet may leave out before a formula


class Doubt(NamedTuple):
    """An image, its label, and what is predicted."""

    fold: int
    index: int  # in the fold
    label: str
    predicted: str
    label_share: float
    predicted_share: float
    is_candidate: bool

    @property
    def pair(self) -> str:
        """The label and what is predicted, in words."""
        return f"{self.label} -> {self.predicted}"


def find_doubtful_labels(runs: str, share: float, quarantine: bool, verb: str) -> list[Doubt]:
    """Write and print which images of the cross-validation `runs` are probably mislabeled.

    Args:
        runs: the folder of a `cross-validate`.
        share: at most this share of the images are candidates: the most doubtful ones.
        quarantine: add the candidates to the list of images that training leaves out.
        verb: this command, as the user called it.

    Returns:
        All images that could be read, the most doubtful first.

    Raises:
        UserError: if the runs are not there or of other images, or a file can't be written.
    """
    checker = need_tool("source", "check", "--quarantine") if quarantine else None
    folder = Path(runs)
    config, folds, shares = read_folds(folder)
    doubts = ranked(folds, shares)
    most = round(share * len(doubts))
    num_others = sum(doubt.is_candidate for doubt in doubts[most:])
    doubts[most:] = [doubt._replace(is_candidate=False) for doubt in doubts[most:]]
    found = [doubt for doubt in doubts if doubt.is_candidate]
    table = folder / "doubtful_labels.csv"
    picture = folder / "doubtful_labels.png"
    data = config.data
    page = draw_tiles([tile_of(doubt, folds, data) for doubt in doubts[:MOST_SHOWN]])
    save(table, partial(write_text, text=table_text(doubts, folds, data)))
    save(picture, partial(write_whole, write=partial(page.save, format="png")))
    print(f"{len(found):,} of {len(doubts):,} images look mislabeled{pairs_text(found)}")
    if num_others:
        print(f"{num_others:,} more are doubted, and beyond --share {share:g}")
    if unread := sum(map(len, folds)) - len(doubts):
        print(f"{unread:,} others could not be read, or have no known label")
    print(f"all, the most doubtful first: {shown(table)}; the first of them: {shown(picture)}")
    if checker is not None and found:
        for own in data_of(data):
            path, count = add_to_list(checker, own, found, folds)
            added = f"{count:,} image{'s' * (count != 1)} added to {shown(path)}"
            print(f"{added}: training leaves them out")
        print("next: train again, with --run.fresh, as a run resumes only with the same images")
    elif found:
        print("the label may be right, and the image hard: look at them, and mend what is wrong")
        print(f"to leave them out of training: {verb} {shlex.quote(printable(runs))} --quarantine")
    return doubts


def ranked(folds: list[Source], shares: torch.Tensor) -> list[Doubt]:
    """The images of all folds, the most doubtful first.

    `shares` are their probabilities, (count, classes) float32.

    Raises:
        UserError: if none has a label and was read.
    """
    ranking = rank_labels(torch.cat([fold.labels for fold in folds]), shares)
    if not len(ranking.image):
        raise UserError("no image of the cross-validation could be read and has a known label")
    classes = folds[0].classes
    is_multi_label = folds[0].is_multi_label
    places = [(fold, index) for fold, own in enumerate(folds) for index in range(len(own))]
    rows = zip(*(values.tolist() for values in ranking), strict=True)
    doubts = []
    for image, column, label, predicted, *others in rows:
        names = (f"not {classes[column]}", classes[column]) if is_multi_label else classes
        doubts.append(Doubt(*places[image], names[label], names[predicted], *others))
    return doubts


def name_of(doubt: Doubt, folds: list[Source], root: str) -> bytes:
    """The path of an image from `root`."""
    paths = folds[doubt.fold].paths
    assert paths is not None  # `open_folds` refuses images that are no files
    return paths.from_folder(root, doubt.index)


def pairs_text(found: list[Doubt]) -> str:
    """The commonest mistakes, in words."""
    pairs = Counter(doubt.pair for doubt in found).most_common(MOST_PAIRS)
    text = ", ".join(f"{pair} ({count:,})" for pair, count in pairs)
    return f", most often {text}" if text else ""


def table_text(doubts: list[Doubt], folds: list[Source], data: DataConfig) -> str:
    """CSV of all images; paths are from `data.root`, as the list of those left out has them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(HEAD)
    for doubt in doubts:
        path = safe(printable_path(name_of(doubt, folds, data.root)), "./")
        names = (safe(doubt.label), safe(doubt.predicted))
        numbers = (round(doubt.label_share, 4), round(doubt.predicted_share, 4))
        writer.writerow([path, *names, *numbers, "yes" if doubt.is_candidate else "no"])
    return text.getvalue()


def safe(cell: str, before: str = "'") -> str:
    """A cell that no spreadsheet runs; `before` goes before a formula.

    Some begin a cell at each `;`. https://owasp.org/www-community/attacks/CSV_Injection
    """
    parts = []
    for part in cell.split(";"):
        first = unicodedata.normalize("NFKC", part).lstrip(BLANK)[:1]  # also of full width
        is_formula = first and first in "=+-@"
        parts.append(before + part if is_formula else part)
    return ";".join(parts)


def tile_of(doubt: Doubt, folds: list[Source], data: DataConfig) -> Tile:
    """The image with its label, what is predicted, and the end of its name."""
    pixels = None
    with suppress(BadImageError, OSError):
        pixels = folds[doubt.fold].read(doubt.index)
    label, predicted = (
        ascii(name)[1:-1][:MOST_OF_CLASS] for name in (doubt.label, doubt.predicted)
    )
    name = ascii(os.fsdecode(name_of(doubt, folds, data.root)).rpartition("/")[2])[1:-1]
    lines = (f"{label} -> {predicted}", name[-LETTERS:])
    return Tile(pixels, lines, doubt.is_candidate)


def data_of(data: DataConfig) -> Iterator[DataConfig]:
    """The data of the runs; and of the folder whose `train` these are, which has another list."""
    yield data
    root = Path(data.root)
    if are_in_folders(data) and find_folders(root.parent).get("train") == root:
        yield replace(data, root=str(root.parent))


def add_to_list(
    checker: object, data: DataConfig, found: list[Doubt], folds: list[Source]
) -> tuple[Path, int]:
    """Add images to the end of the list of those that training leaves out: its path, how many.

    Raises:
        UserError: if it can't be read or written.
    """
    path = checker.quarantine_path(data)
    listed = checker.read_quarantine(data)
    rows = []
    for doubt in found:
        name = name_of(doubt, folds, data.root)
        if name not in listed:
            share = f"{doubt.predicted_share:.0%}"
            rows.append(f"{printable_path(name)}\tdoubtful label: {doubt.pair}, {share}\n")
    if rows:
        text = read_plain(path).decode() if path.exists() else ""
        text += "\n" * (text != "" and not text.endswith("\n"))
        save(path, partial(write_text, text=text + "".join(rows)))
    return path, len(rows)


def save(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole; `UserError` if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!a}: {error.strerror}") from error


def shown(path: Path) -> str:
    """A path in a line for the user."""
    return printable(str(path))
