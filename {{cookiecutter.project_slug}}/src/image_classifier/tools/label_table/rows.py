"""The rows of a table in CSV, JSON lines or Parquet, with their numbers."""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import UserError
from ...runtime.console import printable
from ...runtime.platform import install_command

LINE_END = re.compile("\r\n|\r|\n")
ZIP_MARK = b"PK\x03\x04"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
SEPARATOR_LINE = re.compile(r"\"?sep=(.)\"?[,;\t]*", re.IGNORECASE)  # Excel's, above the header


class Table(NamedTuple):
    """A table whose rows can be read, any number of times."""

    file: Path
    names: list[str]  # of the columns
    # The number of each row, and its cells in these columns, two or more; lists are tuples.
    rows: Callable[[list[int]], Iterator[tuple[int, Sequence[Any]]]]
    row: str = "line"  # what has the number

    def wrong(self, number: int, what: str) -> UserError:
        """What to raise for a row."""
        return UserError(f"{str(self.file)!a}, {self.row} {number}: {printable(what)}")


def open_table(file: Path) -> Table:
    """A table; the suffix tells of what kind.

    Raises:
        UserError: if it can't be read.
    """
    openers = {".csv": open_csv, ".tsv": open_csv, ".jsonl": open_jsonl, ".parquet": open_parquet}
    if file.suffix.lower() not in openers:
        raise UserError(f"--data.labels {str(file)!a} should end in {', '.join(openers)}")
    try:
        return openers[file.suffix.lower()](file)
    except UserError:
        raise
    except (OSError, ValueError, csv.Error) as error:  # those of pyarrow, too
        raise UserError(f"cannot read {str(file)!a}: {first_line(error)}") from error


def open_csv(file: Path) -> Table:
    """Cells with a comma, a semicolon or a tab between them: what makes most of the header."""
    lines = lines_of(file)
    header = next(lines, "")
    said = SEPARATOR_LINE.fullmatch(header.strip("\r\n"))
    before = 1 if said else 0  # lines above the header
    header = next(lines, "") if said else header
    heads = {mark: next(csv.reader([header], delimiter=mark), []) for mark in ",;\t"}
    mark = said[1] if said else max(heads, key=lambda mark: len(heads[mark]))

    def rows(columns: list[int]) -> Iterator[tuple[int, Sequence[Any]]]:
        pick = itemgetter(*columns)
        last = 0  # the line in which the row before ended
        lines = islice(lines_of(file), before, None)
        reader = csv.reader(lines, delimiter=mark, skipinitialspace=True, strict=True)
        try:
            for cells in reader:
                if last and len(cells) == len(found.names):
                    yield last + 1, pick(cells)
                elif last and cells:
                    count = f"{len(cells)} cells, and the header has {len(found.names)}"
                    raise found.wrong(last + 1, count)
                last = before + reader.line_num
        except csv.Error as error:
            raise found.wrong(last + 1, f"no CSV: {error}") from error

    found = Table(file, heads.get(mark) or next(csv.reader([header], delimiter=mark), []), rows)
    return found


def open_jsonl(file: Path) -> Table:
    """An object in each line; the columns are those of the first."""

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(lines_of(file), 1):
            try:
                row = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:
                raise found.wrong(number, f"no JSON: {error}") from error
            if isinstance(row, dict):
                yield number, row
            elif row is not None:
                raise found.wrong(number, 'it should be an object, {"path": ..., "label": ...}')

    def rows(columns: list[int]) -> Iterator[tuple[int, Sequence[Any]]]:
        picked = [found.names[column] for column in columns]
        known = set(found.names)
        for number, row in objects():
            if more := row.keys() - known:
                raise found.wrong(number, f"{min(more)!a} is not in the first row")
            yield number, [hashable(row.get(name)) for name in picked]

    found = Table(file, [], rows)
    found.names.extend(next(objects(), (0, {}))[1])
    return found


def open_parquet(file: Path) -> Table:
    """A Parquet file, of which only the columns that are asked for are read."""
    try:
        from pyarrow import parquet
    except ImportError:
        install = install_command("pyarrow")
        raise UserError(f"{str(file)!a} can be read by pyarrow: {install}") from None
    content = parquet.ParquetFile(file)

    def rows(columns: list[int]) -> Iterator[tuple[int, Sequence[Any]]]:
        picked = [found.names[column] for column in columns]
        number = 1
        try:
            for batch in content.iter_batches(columns=picked):
                cells = (map(hashable, batch.column(name).to_pylist()) for name in picked)
                yield from enumerate(zip(*cells, strict=True), number)
                number += len(batch)
        except (OSError, ValueError) as error:
            raise found.wrong(number, f"damaged: {first_line(error)}") from error

    found = Table(file, content.schema_arrow.names, rows, "row")
    return found


def lines_of(file: Path) -> Iterator[str]:
    r"""The lines of a file in UTF-8, with or without a byte order mark, or in UTF-16.

    They end in \n, \r\n or, as Excel writes them, \r.

    Raises:
        UserError: naming the first line that is in another encoding.
    """
    encoding = encoding_of(file)
    try:
        with file.open(encoding=encoding, newline="") as lines:
            yield from lines
    except UnicodeDecodeError:
        try:  # as a whole, since lines are decoded in blocks
            file.read_bytes().decode(encoding)
        except UnicodeDecodeError as error:
            number = len(LINE_END.findall(error.object[: error.start].decode(encoding))) + 1
            what = f"line {number}: it is not {encoding[:6].upper().rstrip('-')}"
            raise UserError(f"{str(file)!a}, {what}; save the table as UTF-8") from None
        raise


def encoding_of(file: Path) -> str:
    """How the text in a file is encoded: `utf-8-sig`, or one of UTF-16.

    Raises:
        UserError: if it is no text.
    """
    with file.open("rb") as content:
        start = content.read(4)
    if start == ZIP_MARK:
        raise UserError(f"{str(file)!a} is no text, but of Excel or zipped: save the table as CSV")
    if start.startswith(UTF16_MARKS) and start[2:] != b"\0\0":
        return "utf-16"
    if b"\0" in start[:2]:
        return "utf-16-be" if start[:1] == b"\0" else "utf-16-le"
    return "utf-8-sig"


def first_line(error: Exception) -> str:
    """Why a file can't be read."""
    reason = getattr(error, "strerror", None) or str(error)
    return printable(reason.partition("\n")[0])


def hashable(cell: object) -> Any:  # noqa: ANN401 - any type of JSON and Parquet
    """A cell that can be a key: a list as a tuple, and nothing for NaN, which equals no other."""
    if isinstance(cell, list):
        return tuple(map(text_of, cell))
    if isinstance(cell, float) and math.isnan(cell):
        return None
    return str(cell) if isinstance(cell, dict) else cell


def text_of(cell: object) -> str:
    """What a cell says: nothing for null and NaN."""
    is_nan = isinstance(cell, float) and math.isnan(cell)
    return "" if cell is None or is_nan else str(cell).strip()
