"""The classes of a table, from the different cells of its labels."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from unicodedata import normalize

import numpy as np

from ...data import look
from ...errors import UserError
from .cells import is_missing, list_of, yes_or_no
from .rows import text_of

Wrong = Callable[[int, str], UserError]  # what to raise for a cell, by its number
WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0*")  # 1.0 is the class 1; but 1.10 may be a version
NESTED = re.compile(r"(?<=.)['\"\[{:]")  # what no name in brackets has after the first
BRACKETS = {"[]", "()", "{}", ""}
BINARY = {"0", "1", "0.", "1.", "0.0", "1.0"}
MAYBE_MISSING = ("none", "na", "-", "--", "?")  # or the name of a class
SEPARATORS = ",;/+&\n "  # with which others write several labels
MOST_GROUPS = 3  # of names, in a note


def labels_of_texts(kinds: list[Any], wrong: Wrong) -> tuple[np.ndarray, list[str], list[str]]:
    """The labels in the different cells of a column, the names of the classes, and notes.

    One each; several, if there is a list or a `|`: then nothing is none of the classes.
    """
    lists = lists_of(kinds, wrong)
    pairs = zip(kinds, lists, strict=True)
    parts = [text_of(kind).split("|") if found is None else found for kind, found in pairs]
    has_several = any(len(several) > 1 for several in parts)
    has_several = has_several or any(found is not None for found in lists)
    texts = [[part.strip() for part in several] for several in parts]
    for row, several in enumerate(texts):
        for text in filter(is_missing, several):
            raise wrong(row, f"label {text!a} is unknown: name the class, or leave out the row")
        if not has_several and not several[0]:
            raise wrong(row, "label is empty: name the class, or leave out the row")
    groups: dict[str, list[str]] = defaultdict(list)  # equal names
    for text in sorted({text for several in texts for text in several if text}):
        groups[same_name(text)].append(text)
    if not groups:
        raise wrong(0, "label is empty, and so are all others")
    # A name that is the only one of its kind remains as it is.
    spellings = {key if len(own) > 1 else own[0]: own for key, own in groups.items()}
    names = sorted(spellings)
    places = {text: place for place, name in enumerate(names) for text in spellings[name]}
    united = groups_text(spellings.values())
    notes = [f"equal names are one class: {united}"] * bool(united)
    notes += [*alike(names), *joined(names)]
    notes += [
        f"{name!a} is a class; if it means that there is none, leave out these rows"
        for name in names
        if name.lower() in MAYBE_MISSING
    ]
    if not has_several:
        return np.array([places[text] for (text,) in texts]), names, notes
    labels = np.zeros((len(kinds), len(names)), np.int8)
    for row, several in enumerate(texts):
        labels[row, [places[text] for text in several if text]] = 1
    return labels, names, notes


def lists_of(kinds: list[Any], wrong: Wrong) -> list[list[str] | None]:
    """The labels of those cells that are lists; None for text."""
    lists = [list_of(kind) for kind in kinds]
    texts = ["" if isinstance(kind, tuple) else text_of(kind) for kind in kinds]
    ends = [text[:1] + text[-1:] for text in texts]
    has_lists = any(lists)
    used = {*ends} - {""}
    if not has_lists and len(used) == 1 and used < BRACKETS and not any(map(NESTED.search, texts)):
        # Names without quotes; beside other names, `[unknown]` is one with brackets.
        lists = [text[1:-1].split(",") if text else None for text in texts]
    items = [{*found} for found in lists if found]
    is_binary = all(own <= BINARY for own in items) and len({len(x) for x in lists if x}) == 1
    for row, (found, text) in enumerate(zip(lists, texts, strict=True)):
        if found is None:
            is_damaged = ends[row] == "[]" and (has_lists or NESTED.search(text))
            if is_damaged or ends[row] == "{}":
                raise wrong(row, f"label {text!a:.80} is neither a name nor a list of names")
        elif any(item.startswith(("[", "{")) for item in found):
            raise wrong(row, f"label {found!a:.80} is no list of names")
        elif {*found} <= BINARY and (len({*found}) < len(found) or (is_binary and found[1:])):
            what = f"label [{', '.join(found):.80}] is a row of 0 and 1: give each class a column"
            raise wrong(row, what)
    return lists


def same_name(text: str) -> str:
    """What is the same for names that a reader can't tell apart, and for equal whole numbers."""
    number = WHOLE.fullmatch(text)
    return number[1] if number else normalize("NFC", text)


def alike(names: list[str]) -> Iterator[str]:
    """A note of the names that differ in case, spaces, or the form of letters and numbers."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[loose_name(name)].append(name)
    if shown := groups_text(groups.values()):
        yield f"classes with names that look alike: {shown}; if they are one, write it in one way"


def groups_text(groups: Iterable[list[str]]) -> str:
    """The first groups of several names; nothing if there are none."""
    found = [" and ".join(map(ascii, own)) for own in groups if len(own) > 1]
    return ", ".join(found[:MOST_GROUPS]) + ", ..." * (len(found) > MOST_GROUPS)


def loose_name(name: str) -> str:
    """What is equal for names that look alike."""
    with suppress(ValueError):
        return str(float(name))
    return re.sub(r"[\s_-]+", " ", look(name))


def joined(names: list[str]) -> Iterator[str]:
    """A note of names that look like several labels, whose parts are names or in several ones."""
    there = {*names}
    for mark in SEPARATORS:
        parts = {name: [part.strip() for part in name.split(mark)] for name in names}
        several = [name for name in names if len(parts[name]) > 1 and all(parts[name])]
        different = {part for own in parts.values() for part in own}
        whole = [name for name in several if there.issuperset(parts[name])]
        if whole or (len(several) > 1 and len(different) <= len(names)):
            name = (whole or several)[0]
            example = "|".join(parts[name])
            yield (
                f"class {name!a} looks like several labels, but {mark!a} does not separate labels: "
                f"write {example!a}"
            )
            return


def labels_of_columns(
    kinds: list[Any], names: list[str], wrong: Wrong
) -> tuple[np.ndarray, list[str], list[str]]:
    """The labels in different cells of a column per class, the names of the classes, and notes."""
    order = sorted(range(len(names)), key=names.__getitem__)
    labels = np.zeros((len(kinds), len(names)), np.int8)
    for row, cells in enumerate(kinds):
        for place, column in enumerate(order):
            text = text_of(cells[column])
            if (label := yes_or_no(text)) is None:
                what = f"{names[column]} {text!a:.80} should be 1, 0, or empty for unknown"
                raise wrong(row, what)
            labels[row, place] = label
    return labels, sorted(names), [*alike(sorted(names))]
