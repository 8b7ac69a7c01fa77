"""The output file of `predict`, which a killed command resumes.

Rows are first written to `OUT.partial/`, in parts of JSON lines, each of which appears whole; at
the end OUT is written from them. `OUT.partial/command.json` says which command they belong to.
"""

import csv
import glob
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import FaultError, UserError
from ...runtime.console import printable
from ...runtime.files import read_object, remove_leftovers, write_json, write_whole

PART_ROWS = 1024  # at least one batch
FORMULA = re.compile(r"[=+@-](?![\d.]+$)")  # how one begins in a spreadsheet; a number is none

Row = dict[str, Any]  # path, label, probability, top: a list of these two, error; None: unknown
NO_ROW: Row = {"path": "", "label": None, "probability": None, "top": [], "error": None}


class Output:
    """An output file and its parts, which hold whole batches."""

    def __init__(self, path: Path, command: dict[str, Any], batch_size: int, fresh: bool) -> None:
        """Begin `path`, or resume it after the parts of the same `command`.

        Args:
            path: what to write.
            command: what the rows depend on, options and digests, by name.
            batch_size: the images of a batch.
            fresh: delete the parts that are there.

        Raises:
            UserError: if the parts belong to another command, or the folder cannot be written.
        """
        self.path, self.folder = path, partial_of(path)
        self.part_rows = batch_size * max(1, PART_ROWS // batch_size)
        self.rows: list[Row] = []  # of the part that is not written yet
        head = self.folder / "command.json"
        try:
            if fresh:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent, glob.escape(path.name))
            if not self.part(0).exists():
                write_json(head, command)
            begun = read_object(head)
        except OSError as error:
            raise UserError(f"cannot write {str(self.folder)!a}: {error.strerror}") from error
        for name, value in command.items():
            if begun.get(name) != value:
                values = f": {begun.get(name)}, not {value}" if name.startswith("--") else ""
                raise self.refusal(f"it was begun with other {name}{values}")
        number = 0
        while self.part(number).exists():
            number += 1
        self.num_done = number * self.part_rows  # images; more than there are if all are done

    def part(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"part-{number:06}.jsonl"

    def add(self, rows: list[Row], is_last: bool) -> None:
        """Add the rows of the next batch.

        Raises:
            FaultError: if they cannot be written; the parts before are kept.
        """
        self.rows += rows
        if len(self.rows) >= self.part_rows or is_last:
            self.write(self.part(self.num_done // self.part_rows), [self.rows], write_jsonl, 0)
            self.num_done += len(self.rows)
            self.rows = []

    def finish(self, count: int, top_k: int) -> Counter[str | None]:
        """Write the output file from the parts of `count` images, and remove them.

        Returns:
            How many images have which label; None: cannot be read.

        Raises:
            FaultError: if it cannot be written; the parts are kept.
            UserError: if a part is damaged.
        """
        counts: Counter[str | None] = Counter()

        def parts() -> Iterator[list[Row]]:
            for number in range(-(-count // self.part_rows)):
                try:
                    lines = self.part(number).read_bytes().splitlines()
                    rows = [json.loads(line) for line in lines]
                    counts.update(row["label"] for row in rows)
                except (OSError, ValueError, LookupError, TypeError) as error:
                    raise self.refusal(f"part {number} is damaged: {error!r}") from error
                yield rows
            if counts.total() != count:
                raise self.refusal("rows are missing")

        self.write(self.path, parts(), FORMATS[self.path.suffix], top_k)
        for part in sorted(self.folder.iterdir(), reverse=True):
            part.unlink()  # the last one first: after a kill, the others can be resumed
        self.folder.rmdir()
        return counts

    def write(self, path: Path, parts: "Parts", form: "Format", top_k: int) -> None:
        """Write rows to a file that appears whole.

        Raises:
            FaultError: if the disk is full.
        """
        try:
            write_whole(path, lambda file: form(parts, file, top_k))
        except OSError as error:
            raise FaultError(
                f"cannot write {str(path)!a}: {error.strerror}; {self.num_done:,} rows are kept; "
                "run the same command to resume"
            ) from error

    def refusal(self, reason: str) -> UserError:
        """What to raise if the parts cannot be used."""
        return UserError(
            f"cannot resume {str(self.folder)!a}: {reason}; --fresh starts over, "
            "and another --out leaves it alone"
        )


def partial_of(path: Path) -> Path:
    """The folder of the parts of a file."""
    return path.with_name(path.name + ".partial")


def check_out(path: Path, fresh: bool) -> None:
    """Check, before any work, that a file can be written and does not replace one by mistake.

    Raises:
        UserError: if not.
    """
    if path.suffix not in FORMATS:
        raise UserError(f"--out {str(path)!a} ends in none of {', '.join(FORMATS)}")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401 - to know that it is installed
        except ImportError as error:
            raise UserError(f"--out {str(path)!a} needs pyarrow: pip install pyarrow") from error
    # Where there are parts of a new one, `--fresh` was given when they were begun.
    if path.exists() and not fresh and not partial_of(path).exists():
        raise UserError(f"{str(path)!a} exists already: --fresh replaces it when all is done")


def flat(row: Row, top_k: int) -> dict[str, Any]:
    """A row by the columns of a table: text in one line, which moves no cursor."""
    nothing = {"label": None, "probability": None}
    found = {"path": row["path"], "label": row["label"], "probability": row["probability"]}
    for number, pair in enumerate(row["top"] or [nothing] * top_k, 1):
        found |= {f"class_{number}": pair["label"], f"probability_{number}": pair["probability"]}
    found["error"] = row["error"]
    return {k: printable(v) if isinstance(v, str) else v for k, v in found.items()}


def write_csv(parts: "Parts", file: BinaryIO, top_k: int) -> None:
    """Write CSV; classes that a spreadsheet would run get a ' before them, as OWASP advises."""
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(flat(NO_ROW, top_k))
    for row in (row for rows in parts for row in rows):
        path, *others = flat(row, top_k).values()
        safe = (f"'{c}" if isinstance(c, str) and FORMULA.match(c) else c for c in others)
        writer.writerow([path, *safe])
    text.detach()


def write_jsonl(parts: "Parts", file: BinaryIO, _: int) -> None:
    """Write a line of JSON for each image."""
    for rows in parts:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def write_parquet(parts: "Parts", file: BinaryIO, top_k: int) -> None:
    """Write the columns of CSV as Parquet."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    names = flat(NO_ROW, top_k)
    kinds = {name: pa.float32() if "probability" in name else pa.string() for name in names}
    schema = pa.schema(kinds.items())
    with ParquetWriter(file, schema) as writer:
        for rows in parts:
            flat_rows = [flat(row, top_k) for row in rows]
            writer.write_table(pa.Table.from_pylist(flat_rows, schema))


Parts = Iterator[list[Row]] | list[list[Row]]
Format = Callable[[Parts, BinaryIO, int], None]
FORMATS: dict[str, Format] = {".csv": write_csv, ".jsonl": write_jsonl, ".parquet": write_parquet}
