"""What the cells of a table say: a label or a list of them, yes or no, a split or a number."""

import ast
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any
from zlib import crc32

from ...data import ROLES
from .rows import text_of

TRAIN, VAL, TEST = range(3)
SPLITS = {"train": TRAIN, "val": VAL, "test": TEST}
SPLITS |= {name: SPLITS[role] for name, role in ROLES.items() if role in SPLITS}
NO_FOLD = -1  # of test images
# Beyond these, a weight of float32 or the sum of a million would be 0 or infinite.
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30
MOST_KNOWN = 10_000  # different cells that are parsed only once

# How programs write that a value is missing; `none` and `na` in small letters may be classes.
MISSING = ("nan", "-nan", "null", "n/a", "<na>", "#n/a", "#na")
MISSING_EXACTLY = ("None", "NA")
BLANK = ("", *MISSING, "none", "na")  # in the column of a class
# In the column of a class: the image has the label, has it not, or that is unknown.
YES_OR_NO = dict.fromkeys(("true", "yes", "y"), 1) | dict.fromkeys(("false", "no", "n"), 0)
YES_OR_NO |= dict.fromkeys(BLANK, -1)

# Lists as Python, NumPy and JSON write them: names in quotes, or numbers in brackets.
QUOTED, BETWEEN = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", r"(?:\s*,\s*|\s+)"
QUOTED_LIST = re.compile(rf"(?:(?:{QUOTED})(?:{BETWEEN}(?:{QUOTED}))*)?\s*,?\s*")
NUMBER_LIST = re.compile(rf"-?[\d.]+(?:{BETWEEN}-?[\d.]+)*")
CLOSING = {"[": "]", "(": ")", "{": "}"}


@lru_cache(MOST_KNOWN)
def yes_or_no(text: str) -> int | None:
    """1, 0 or, for unknown, -1; None: the text is none of these."""
    text = text.lower()
    if text in YES_OR_NO:
        return YES_OR_NO[text]
    with suppress(ValueError):
        return {1.0: 1, 0.0: 0, -1.0: -1}.get(float(text))
    return None


def is_missing(text: str) -> bool:
    """Whether the text of a label says that there is none."""
    return text in MISSING_EXACTLY or text.lower() in MISSING


def list_of(cell: Any) -> list[str] | None:  # noqa: ANN401 - any type of JSON and Parquet
    """The labels in a list, or in text that is certainly one; None: it is another text."""
    if isinstance(cell, tuple):
        return [*cell]
    text = text_of(cell)
    if len(text) < 2 or CLOSING.get(text[0]) != text[-1]:
        return None
    inside = text[1:-1].strip()
    if text[0] == "[" and NUMBER_LIST.fullmatch(inside):
        return re.split(BETWEEN, inside)
    # `{}` is no set, and `()` no name of a class.
    if (inside or text[0] == "[") and QUOTED_LIST.fullmatch(inside):
        with suppress(ValueError, SyntaxError):  # of a wrong escape
            return [ast.literal_eval(item) for item in re.findall(QUOTED, inside)]
    return None


@lru_cache(MOST_KNOWN)
def number_of(role: str, cell: object) -> float:
    """The value of a cell of the column split, fold, weight or group, or of one like `is_valid`.

    Raises:
        ValueError: saying what it should be, if it has none.
    """
    text = text_of(cell).lower()
    if role == "split":
        if text not in SPLITS:
            raise ValueError("train, val or test")
        return SPLITS[text]
    if role in ("is_val", "is_test"):
        if (value := yes_or_no(text)) not in (0, 1):
            raise ValueError("True or False")
        return value
    if role == "fold" and not text:
        return NO_FOLD
    if role == "group":
        return crc32(text.encode())
    with suppress(ValueError):
        value = float(text)
        if role == "weight" and (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT):
            return value
        if role == "fold" and value >= 0 and value % 1 == 0:
            return value
    if role == "weight":
        raise ValueError(f"0 or more, from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    raise ValueError("0, 1, 2, ...")
