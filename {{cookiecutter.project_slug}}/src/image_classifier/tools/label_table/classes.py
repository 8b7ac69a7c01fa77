"""The classes of a table, from the different cells of its labels."""

import ast
import re
from collections import defaultdict
from contextlib import suppress
from unicodedata import normalize

import numpy as np

from .cells import MISSING, Column, yes_or_no
from .columns import words_for

# Lists as Python, NumPy and JSON write them: of names in quotes, or of numbers.
NUMBERS = re.compile(r"[-\d.,\s]*")
ITEM = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,'"\[\]{}:][^,'"\[\]{}:]*""")
LIST = re.compile(rf"""[\[({{]\s*['"\[{{].*[\])}}]|\[{NUMBERS.pattern}\]""", re.DOTALL)
BRACKETS = ("[]", "()", "{}")
WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0*")  # 1.0 is the class 1; but 1.10 may be a version

Spellings = dict[str, list[str]]  # of each class, by its name, in their order


def labels_of_texts(column: Column) -> tuple[np.ndarray, Spellings]:
    """The labels in the different cells of a column, and how the classes are written.

    One each; several, if there is a list or a `|`: then nothing is none of the classes.
    """
    texts = column.texts()
    # Names without quotes are a list if all are; beside others, `[unknown]` is a name.
    has_lists = any(map(LIST.fullmatch, texts)) or all(map(is_in_brackets, filter(None, texts)))
    has_several = has_lists or any("|" in text for text in texts)
    cells = []
    for kind, text in enumerate(texts):
        labels = labels_in(text) if has_lists and is_in_brackets(text) else text.split("|")
        if labels is None:
            raise column.wrong(kind, f"label {text!a:.80} is neither a name nor a list of names")
        cells.append([label.strip() for label in labels if label.strip()])
        if missing := next(filter(MISSING.__contains__, cells[kind]), None):
            what = f"label {missing!a} is unknown: name the class, or leave out the row"
            raise column.wrong(kind, what)
        if not cells[kind] and not has_several:
            raise column.wrong(kind, "label is empty: name the class, or leave out the row")
    equal: dict[str, list[str]] = defaultdict(list)
    for label in sorted({label for labels in cells for label in labels}):
        equal[same_name(label)].append(label)
    if not equal:
        raise column.wrong(0, "label is empty, and so are all others")
    lengths = {len(labels) for labels in cells if labels}
    is_even = has_lists and len(lengths) == 1 and lengths != {1}
    if is_even and equal.keys() <= {"0", "1"}:
        what = f"label {texts[0]!a:.80} is a row of 0 and 1: give each class a column"
        raise column.wrong(0, what)
    spellings = dict(sorted((min(own, key=len), own) for own in equal.values()))
    places = {label: place for place, own in enumerate(spellings.values()) for label in own}
    if not has_several:
        return np.array([places[label] for (label,) in cells]), spellings
    several = np.zeros((len(cells), len(spellings)), np.int8)
    for kind, labels in enumerate(cells):
        several[kind, [places[label] for label in labels]] = 1
    return several, spellings


def labels_of_columns(columns: list[Column]) -> tuple[np.ndarray, Spellings]:
    """The labels of each row in columns of a class each, and their names."""
    columns = sorted(columns, key=lambda column: column.name.strip())
    names = [column.name.strip() for column in columns]
    labels = np.empty((len(columns[0].kinds), len(columns)), np.int8)
    for place, column in enumerate(columns):
        others = words_for(names[:place] + names[place + 1 :] or names)
        expected = f"1, 0, or empty for unknown; if it is no class, name those that are: {others}"
        labels[:, place] = column.values(yes_or_no, expected)
    return labels, {name: [name] for name in names}


def is_in_brackets(text: str) -> bool:
    """Whether a cell may be a list."""
    return text[:1] + text[-1:] in BRACKETS


def labels_in(text: str) -> list[str] | None:
    """The labels in a list; None if it is damaged."""
    inside = text[1:-1]
    if NUMBERS.fullmatch(inside):
        return inside.replace(",", " ").split()
    if ITEM.sub("", inside).strip(", \n"):
        return None
    with suppress(ValueError, SyntaxError):  # of a wrong escape
        return [unquoted(item) for item in ITEM.findall(inside)]
    return None


def unquoted(item: str) -> str:
    """A label in a list."""
    if item[0] not in "'\"":
        return item
    return ast.literal_eval(item) if "\\" in item else item[1:-1]


def same_name(text: str) -> str:
    """What is the same for names that a reader can't tell apart, and for equal whole numbers."""
    number = WHOLE.fullmatch(text)
    return number[1] if number else normalize("NFC", text)
