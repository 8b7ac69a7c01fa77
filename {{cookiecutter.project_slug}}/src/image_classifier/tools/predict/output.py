"""The output file of `predict`, which a killed command resumes.

Rows are first appended to `OUT.partial`, whose first line says which command they belong to; at the
end OUT is written from them.
"""

import csv
import glob
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import UserError
from ...runtime.console import printable, say
from ...runtime.files import lock_file, parse_object, remove_leftovers, write_whole
from .rows import EXTRA, NO_ROW, Row

# How a formula begins in a spreadsheet, perhaps in letters of full width; a number is none.
SIGN = r"(?:[=@\uff1d\uff20\ufe66\ufe6b]|[+\-\uff0b\uff0d\ufe62\ufe63](?![\d.]+$))"
BEFORE = r"[\s\"'\u200c\u200d]*"  # what a spreadsheet may leave out
FORMULA = re.compile(BEFORE + SIGN)
INNER = re.compile(f";(?={BEFORE}{SIGN})")  # quotes don't protect it where `;` separates cells

SEPARATOR = "|"  # between the labels of an image in a table


class Output:
    """An output file, and the rows of it that are written already."""

    def __init__(self, path: Path, command: dict[str, Any], batch_size: int, fresh: bool) -> None:
        """Begin `path`, or resume it after the last whole batch of the same `command`.

        Args:
            path: what to write.
            command: what the rows depend on, options and digests, by name.
            batch_size: the images of a batch.
            fresh: delete the rows that are there.

        Raises:
            UserError: if the rows belong to another command, or one that runs, or the folder
                cannot be written.
        """
        self.path = path
        self.partial = partial_of(path)
        self.num_done = 0  # rows so far
        self.num_bad = 0  # of them, of unreadable files
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                self.file = stack.enter_context(self.partial.open("a+b"))
                self._begin(command, batch_size, fresh)
                self.close = stack.pop_all().close
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write {str(self.partial)!a}: {reason}") from error

    def _begin(self, command: dict[str, Any], batch_size: int, fresh: bool) -> None:
        """Lock the rows that are there, and drop what is not a whole batch of this command."""
        is_taken = f"another command is writing {str(self.path)!a}: take another --out"
        if lock_file(self.file, is_taken):
            remove_leftovers(self.path.parent, glob.escape(self.path.name))
        else:
            say(f"warning: {self.partial} can't be locked: start no second command that writes it")
        self.file.seek(0)
        head = self.file.readline()
        if not head and self.path.exists() and not fresh:  # another command has just finished it
            self.partial.unlink()
            check_free("--out", self.path, FORMATS, fresh)
        if fresh or not head.endswith(b"\n"):  # there is none, or it was cut by a kill
            self.file.truncate(0)
            self._append([command])
            return
        begun = parse_object(head)
        if other := [name for name, value in command.items() if begun.get(name) != value]:
            raise UserError(
                f"cannot resume {str(self.partial)!a}: it was begun with other {other[0]}; "
                "--fresh starts over, and another --out leaves it alone"
            )
        size = end = self.file.tell()
        bad = 0
        for count, line in enumerate(self.file, 1):
            row = parse_object(line)
            if row.keys() - EXTRA != NO_ROW.keys():  # cut by a kill, or damaged
                break
            size += len(line)
            bad += row["label"] is None
            if count % batch_size == 0:
                self.num_done = count
                self.num_bad = bad
                end = size
        self.file.truncate(end)

    def add(self, rows: list[Row]) -> None:
        """Add the rows of the next batch."""
        self._append(rows)
        self.num_done += len(rows)
        self.num_bad += sum(row["label"] is None for row in rows)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        # Not by the file's buffer, which would fail again when it is closed on a full disk.
        content = b"".join(map(line_of, rows))
        while content:
            content = content[os.write(self.file.fileno(), content) :]

    def rows(self) -> Iterator[Row]:
        """The rows that are written."""
        self.file.seek(0)
        self.file.readline()
        yield from map(json.loads, self.file)

    def finish(self, top_k: int) -> None:
        """Write the output file from the rows, and remove these."""
        write_whole(self.path, lambda file: FORMATS[self.path.suffix](self.rows(), file, top_k))
        self.close()
        self.partial.unlink(missing_ok=True)


def begun(path: Path) -> dict[str, Any]:
    """What the rows of `path` that are there depend on, by name; empty if there are none."""
    with suppress(OSError), partial_of(path).open("rb") as file:
        return parse_object(file.readline())
    return {}


def partial_of(path: Path) -> Path:
    """The file of the rows of a file that is not complete."""
    return path.with_name(path.name + ".partial")


def check_free(option: str, path: Path, suffixes: Iterable[str], fresh: bool) -> None:
    """Raise `UserError` if `path` has no suffix of ours, is a folder, or not to be replaced."""
    if path.suffix not in suffixes:
        raise UserError(f"{option} {str(path)!a} ends in none of {', '.join(suffixes)}")
    if path.is_dir():
        raise UserError(f"{option} {str(path)!a} is a folder: name a file")
    # Where a new one was begun, `--fresh` was given then.
    if path.exists() and not fresh and not partial_of(path).exists():
        raise UserError(f"{str(path)!a} exists already: --fresh replaces it when all is done")


def flat(row: Row, top_k: int) -> dict[str, Any]:
    """A row by the columns of a table: text in one line, which moves no cursor."""
    found = {"path": row["path"]}
    if "labels" in row:
        found["labels"] = SEPARATOR.join(row["labels"] or ())
    if "decision" in row:
        found["decision"] = row["decision"]
    found |= {"label": row["label"], "probability": row["probability"]}
    for number, pair in enumerate(row["top"] or [NO_ROW] * top_k, 1):
        found |= {f"class_{number}": pair["label"], f"probability_{number}": pair["probability"]}
    found["error"] = row["error"]
    return {k: printable(v) if isinstance(v, str) else v for k, v in found.items()}


def write_csv(rows: Iterable[Row], file: BinaryIO, top_k: int) -> None:
    r"""Write CSV that no spreadsheet runs, with all text in quotes.

    A path like a formula gets a `./` before it, other text a `'`. A `;` before one is written as
    `\x3b`, as half of Europe's spreadsheets begin a cell there.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    for number, row in enumerate(rows):
        cells = flat(row, top_k)
        if number == 0:
            writer.writerow(cells)
        path, *others = cells.values()
        writer.writerow([safe(path, "./"), *(safe(cell, "'") for cell in others)])
    text.detach()


def safe(cell: Any, before: str) -> Any:  # noqa: ANN401 - text, number or nothing
    """A cell that begins no formula; `before` goes before one."""
    if not isinstance(cell, str):
        return cell
    cell = INNER.sub(r"\\x3b", cell)
    return before + cell if FORMULA.match(cell) else cell


def write_jsonl(rows: Iterable[Row], file: BinaryIO, _: int) -> None:
    """Write a line of JSON for each image."""
    file.writelines(map(line_of, rows))


def line_of(row: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return json.dumps(row).encode() + b"\n"


FORMATS = {".csv": write_csv, ".jsonl": write_jsonl}
