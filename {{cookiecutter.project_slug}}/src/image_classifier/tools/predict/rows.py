r"""Answers as text: rows of CSV or JSON, and lines of a table for the screen.

A row is one line, whatever a file or a class is called. In CSV and on the screen what would control
a terminal is escaped, as `\x1b`; JSON has it escaped anyway. A byte that is not UTF-8 is shown as
`\xff` everywhere, since no reader of these formats would take it.
"""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan

from ...data import show
from ...runtime.printable import printable

NEEDS_QUOTES = re.compile(r'[",]|^\s|\s$')
FORMULA = re.compile(r"[=+@-](?![\d.]+$)")  # where a spreadsheet sees one; a number is none
NUMBER = ".9g"  # digits that tell every float32 from the next
WIDEST_LABEL, LEAST_PATH = 24, 16  # columns of the screen


@dataclass(frozen=True)
class Labelled:
    """What a model says of the images of a batch."""

    paths: list[bytes]
    classes: list[list[int]]  # the most probable of each image, the best first
    probabilities: list[list[float]]  # of these
    errors: dict[int, str]  # what is wrong with those that can't be read, by their place here

    def each(self) -> Iterator[tuple[bytes, list[tuple[int, float]], str]]:
        """Path, classes with their probabilities, and what is wrong, if anything, of each image."""
        found = zip(self.paths, self.classes, self.probabilities, strict=True)
        for row, (path, classes, shares) in enumerate(found):
            error = self.errors.get(row, "")
            yield path, [] if error else list(zip(classes, shares, strict=True)), error


class Csv:
    """Rows of CSV (RFC 4180, with a newline), beginning with `path,label,probability`."""

    def __init__(self, classes: Sequence[str], top_k: int, for_spreadsheets: bool = True) -> None:
        """With the `top_k` most probable of `classes`.

        `for_spreadsheets`: a ' before a class that would be a formula in one, as OWASP advises.
        Paths never are one: `listing.harmless`.
        """
        self.top_k, self.for_spreadsheets = top_k, for_spreadsheets
        self.names = [self.harmless(name) for name in classes]  # as `read` gives them
        self.labels = [quoted(name) for name in self.names]
        columns = [f"class_{n},probability_{n}" for n in range(1, top_k + 1)]
        self.header = ",".join(("path,label,probability", *columns, "error")) + "\n"

    def harmless(self, text: str) -> str:
        """Text from outside for a cell."""
        text = printable(text)
        return "'" + text if self.for_spreadsheets and FORMULA.match(text) else text

    def write(self, labelled: Labelled) -> str:
        """A row for each image."""
        labels, rows, nothing = self.labels, [], [","] * self.top_k
        for path, found, error in labelled.each():
            pairs = [f"{labels[c]},{p:{NUMBER}}" for c, p in found] or nothing
            cells = quoted(show(path)), pairs[0], *pairs, quoted(self.harmless(error))
            rows.append(",".join(cells) + "\n")
        return "".join(rows)

    def read(self, lines: list[str]) -> list[tuple[str, str]]:
        """Path and label of rows; the label is empty for a bad image.

        Raises:
            ValueError: if one is no row.
        """
        try:
            cells = list(csv.reader(lines, strict=True))
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if any(len(row) != 4 + 2 * self.top_k for row in cells):
            raise ValueError("cells are missing")
        return [(row[0], row[1]) for row in cells]

    def name(self, path: bytes) -> str:
        """A path as `read` gives it."""
        return show(path)


class Jsonl:
    """Lines of JSON: `path`, `label`, `probability`, `top` (a list of these two) and `error`."""

    header = ""

    def __init__(self, classes: Sequence[str], top_k: int) -> None:  # noqa: ARG002 - as all have
        """With names of `classes`."""
        self.names = list(classes)  # as `read` gives them
        self.labels = [json.dumps(name) for name in classes]

    def write(self, labelled: Labelled) -> str:
        """A line for each image."""
        labels, rows = self.labels, []
        for path, found, error in labelled.each():
            name, reason = json.dumps(self.name(path)), json.dumps(error or None)
            pairs = [f'"label": {labels[c]}, "probability": {json_number(p)}' for c, p in found]
            best = pairs[0] if pairs else '"label": null, "probability": null'
            top = ", ".join("{" + pair + "}" for pair in pairs)
            row = f'"path": {name}, {best}, "top": [{top}], "error": {reason}'
            rows.append("{" + row + "}\n")
        return "".join(rows)

    def read(self, lines: list[str]) -> list[tuple[str, str]]:
        """Path and label of lines; the label is empty for a bad image.

        Raises:
            ValueError: if one is no such line.
        """
        try:
            rows = [json.loads(line) for line in lines]
            return [(row["path"], row["label"] or "") for row in rows]
        except (KeyError, TypeError) as error:
            raise ValueError(str(error)) from error

    def name(self, path: bytes) -> str:
        """A path as `read` gives it."""
        return path.decode("utf-8", "backslashreplace")


class Table:
    """Lines for the screen: path, class and probability, and the next classes."""

    def __init__(self, classes: Sequence[str], longest_path: int, width: int) -> None:
        """For a screen of `width` columns; 0: as wide as it needs, for a pipe."""
        self.labels, self.width = [printable(name) for name in classes], width
        self.label_width = min(WIDEST_LABEL, max(map(len, self.labels)))
        others = self.label_width + len(" 100.0%") + 4
        self.path_width = longest_path
        if width:
            self.path_width = max(LEAST_PATH, min(longest_path, width - others, width // 2))

    def write(self, labelled: Labelled) -> str:
        """A line for each image."""
        lines = []
        for path, found, error in labelled.each():
            name = show(path)
            if len(name) > self.path_width:  # its end tells more than its beginning
                name = "…" + name[1 - self.path_width :]
            line = f"{name:<{self.path_width}}  "
            if error:
                line += f"can't be read: {printable(error)}"
            else:
                (best, share), *others = ((self.labels[c], f"{p:.1%}") for c, p in found)
                line += f"{best[: self.label_width]:<{self.label_width}} {share:>6}  "
                line += ", ".join(f"{label} {share}" for label, share in others)
            lines.append(line.rstrip()[: self.width or None] + "\n")
        return "".join(lines)


def quoted(text: str) -> str:
    """A cell of CSV, in quotation marks if it needs them."""
    return '"' + text.replace('"', '""') + '"' if NEEDS_QUOTES.search(text) else text


def json_number(value: float) -> str:
    """A number of JSON, which has none that is not one."""
    return f"{value:{NUMBER}}" if not isnan(value) else "null"
