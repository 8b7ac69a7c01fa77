"""The rows of a table in CSV or JSON lines, with their numbers."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import UserError
from ...extensions import functions
from ...runtime.console import printable

LINE_END = re.compile("\r\n|\r|\n")
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
SEPARATOR_LINE = re.compile(r"\"?sep=(.)\"?[,;\t]*", re.IGNORECASE)  # Excel's, above the header

Row = tuple[int, Sequence[str]]  # its number, and its cells; lists are as Python writes them


class Table(NamedTuple):
    """A table whose rows can be read, any number of times."""

    file: Path
    names: list[str]  # of the columns
    rows: Callable[[list[str]], Iterator[Row]]  # the cells in these columns
    row: str = "line"  # what has the number

    def wrong(self, number: int, what: str) -> UserError:
        """What to raise for a row."""
        return UserError(f"{str(self.file)!a}, {self.row} {number}: {printable(what)}")


def open_table(file: Path) -> Table:
    """A table; the suffix tells of what kind.

    Raises:
        UserError: if it can't be read.
    """
    openers = {".csv": open_csv, ".tsv": open_csv, ".jsonl": open_jsonl}
    for parquet in functions("parquet", "open_parquet"):
        openers[".parquet"] = parquet
    if file.suffix.lower() not in openers:
        more = "" if ".parquet" in openers else "; Parquet needs a tool: pretuned add kaggle-tables"
        raise UserError(f"--data.labels {str(file)!a} should end in {', '.join(openers)}{more}")
    try:
        return openers[file.suffix.lower()](file)
    except (OSError, csv.Error) as error:
        raise UserError(f"cannot read {str(file)!a}: {error}") from error


def open_csv(file: Path) -> Table:
    """Cells with a comma, a semicolon or a tab between them: what makes most of the header."""
    lines = lines_of(file)
    header = next(lines, "")
    said = SEPARATOR_LINE.fullmatch(header.strip("\r\n"))
    before = 1 if said else 0  # lines above the header
    header = next(lines, "") if said else header
    marks = said[1] if said else ",;\t"
    heads = {m: next(csv.reader([header], delimiter=m, skipinitialspace=True), []) for m in marks}
    mark = max(heads, key=lambda mark: len(heads[mark]))

    def rows(columns: list[str]) -> Iterator[Row]:
        places = [found.names.index(name) for name in columns]
        last = 0  # the line in which the row before ended
        lines = islice(lines_of(file), before, None)
        reader = csv.reader(lines, delimiter=mark, skipinitialspace=True, strict=True)
        try:
            for cells in reader:
                if last and len(cells) == len(found.names):
                    yield last + 1, [cells[place] for place in places]
                elif last and cells:
                    count = f"{len(cells)} cells, and the header has {len(found.names)}"
                    raise found.wrong(last + 1, count)
                last = before + reader.line_num
        except csv.Error as error:
            raise found.wrong(last + 1, f"no CSV: {error}") from error

    found = Table(file, heads[mark], rows)
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

    def rows(columns: list[str]) -> Iterator[Row]:
        known = {*found.names}
        for number, row in objects():
            if more := row.keys() - known:
                raise found.wrong(number, f"{min(more)!a} is not in the first row")
            yield number, [text_of(row.get(name)) for name in columns]

    found = Table(file, [], rows)
    found.names.extend(next(objects(), (0, {}))[1])
    return found


def lines_of(file: Path) -> Iterator[str]:
    r"""The lines of a file in UTF-8, with or without a byte order mark, or in UTF-16.

    They end in \n, \r\n or, as Excel writes them, \r.

    Raises:
        UserError: naming the first line that is in another encoding.
    """
    with file.open("rb") as content:
        start = content.read(2)
    encoding = "utf-16" if start in UTF16_MARKS else "utf-8-sig"
    if b"\0" in start:  # beside a letter of the header, in two bytes
        encoding = "utf-16-be" if start[:1] == b"\0" else "utf-16-le"
    try:
        with file.open(encoding=encoding, newline="") as lines:
            yield from lines
    except UnicodeDecodeError:
        try:  # as a whole, since lines are decoded in blocks
            file.read_bytes().decode(encoding)
        except UnicodeDecodeError as error:
            number = len(LINE_END.findall(error.object[: error.start].decode(encoding))) + 1
            raise UserError(
                f"{str(file)!a}, line {number}: it is not {encoding[:6].upper().rstrip('-')}; save "
                "the table as UTF-8"
            ) from None
        raise


def text_of(cell: object) -> str:
    """What a cell says: nothing for null and NaN, which alone is not equal to itself."""
    return "" if cell is None or cell != cell else str(cell)  # noqa: PLR0124
