"""An output file that a kill at any moment leaves whole, or not there.

Rows are added to `OUT.partial`, in the order of the images and in whole batches; the file becomes
OUT when it has all of them. `OUT.partial.json` says what the rows depend on: the same command goes
on behind the last whole batch, and another one is refused.
"""

import contextlib
import csv
import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ...config import FaultError, UserError
from ...data import PathList
from ...runtime.files import read_object
from ...runtime.run_dir import lock_file, remove_leftovers, sync_folder, write_json, write_whole
from .rows import Csv, Jsonl, Labelled

GROUP_BYTES = 2**24  # of the CSV behind a group of rows of a Parquet file

Rows = Csv | Jsonl
# How rows are written while they are made, by the suffix of the file. Parquet can't be added to.
FORMATS: dict[str, Callable[[Sequence[str], int], Rows]] = {
    ".csv": Csv,
    ".jsonl": Jsonl,
    ".parquet": lambda classes, top_k: Csv(classes, top_k, for_spreadsheets=False),
}


class Journal:
    """The rows of an output file as far as there are some: `num_done` of the files have theirs."""

    def __init__(self, out: Path, rows: Rows, files: PathList, together: int) -> None:
        """Of `files` in batches of `together`; see `open_journal`."""
        self.out, self.rows, self.files, self.together = out, rows, files, together
        self.path, self.head = partial_of(out), Path(f"{partial_of(out)}.json")
        self.num_done, self.num_bad = 0, 0
        self.counts: Counter[str] = Counter()  # images by their label, as `rows.names` has it

    def begin(self, file: FileIO, identity: dict[str, Any], fresh: bool) -> None:
        """Take `file` to write to: from the start, or behind the rows of the same command."""
        self.file, header = file, self.rows.header.encode()
        if fresh or self.path.stat().st_size <= len(header):
            file.truncate(0)
            write_json(self.head, identity)
            file.write(header)
        else:
            self.check_identity(identity)
            self.recover()

    def check_identity(self, identity: dict[str, Any]) -> None:
        """Refuse to add to rows that another command made."""
        was: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            was = read_object(self.head)
        if not was:
            raise self.refusal("nothing says which command began it")
        for name, value in identity.items():
            if was.get(name) != value:
                shown = "" if name == "weights" else f": {was.get(name)}, not {value}"
                raise self.refusal(f"it was begun with other {name}{shown}")

    def recover(self) -> None:
        """Count the rows that are there, in whole batches, and cut off what a kill left behind."""
        end = len(self.rows.header.encode())
        with self.path.open("rb") as file:
            if file.read(end) != self.rows.header.encode():
                raise self.refusal("its columns are others")
            while count := min(self.together, self.num_left):
                lines = list(islice(file, count))
                if len(lines) < count or not lines[-1].endswith(b"\n"):
                    break
                self.count(lines)
                end += sum(map(len, lines))
            if not self.num_left and file.read(1):
                raise self.refusal(f"it has more rows than there are files, {len(self.files):,}")
        self.file.truncate(end)

    def count(self, lines: list[bytes]) -> None:
        """Take the next rows for done, if they are those of the files."""
        first = self.num_done
        paths = self.files.between(first, first + len(lines))
        try:
            found = self.rows.read([line.decode() for line in lines])
        except ValueError as error:
            raise self.refusal(f"damaged behind row {first:,}: {error}") from error
        for number, (path, (name, label)) in enumerate(zip(paths, found, strict=True), first):
            if name != self.rows.name(path):
                now = self.rows.name(path)
                raise self.refusal(f"row {number + 1:,} is of {name!a}, the file is now {now!a}")
            self.note(label)

    def note(self, label: str) -> None:
        """Count an image; `label` is empty if it could not be read."""
        self.num_done += 1
        self.num_bad += not label
        self.counts[label] += bool(label)

    def add(self, labelled: Labelled) -> None:
        """Add the rows of the next batch.

        Raises:
            FaultError: if they can't be written; what is written is kept.
        """
        text = self.rows.write(labelled).encode()
        try:
            while text:
                text = text[self.file.write(text) :]
        except OSError as error:
            raise FaultError(
                f"cannot write {str(self.path)!a}: {error.strerror}; {self.num_done:,} rows are "
                "kept, and the same command goes on from there"
            ) from error
        for _, found, _ in labelled.each():
            self.note(self.rows.names[found[0][0]] if found else "")

    def finish(self) -> None:
        """Give the whole file its name.

        Raises:
            FaultError: if that fails; what is written is kept.
        """
        assert not self.num_left
        try:
            if self.out.suffix == ".parquet":
                write_whole(self.out, lambda file: write_parquet(self.path, file))
                self.path.unlink()
            else:
                os.fsync(self.file.fileno())  # the data before the name
                self.path.replace(self.out)
                sync_folder(self.out.parent)
            self.head.unlink()
        except OSError as error:
            raise FaultError(
                f"cannot write {str(self.out)!a}: {error.strerror}; all rows are kept, and the "
                "same command goes on from there"
            ) from error

    @property
    def num_left(self) -> int:
        """How many files have no row yet."""
        return len(self.files) - self.num_done

    def refusal(self, reason: str) -> UserError:
        """What to raise if what is there is not to be gone on with."""
        return UserError(
            f"cannot go on with {str(self.path)!a}: {reason}; --fresh starts over, "
            "and another --out leaves it alone"
        )


@contextlib.contextmanager
def open_journal(
    out: Path, rows: Rows, files: PathList, identity: dict[str, Any], fresh: bool
) -> Iterator[Journal]:
    """A block in which rows of `files` are added to what is to be `out`, by this process alone.

    `identity` is what the rows depend on, by the names of flags where there are such.

    Raises:
        UserError: if what is there is of another command or other files, or not to be written.
    """
    journal = Journal(out, rows, files, identity["--batch-size"])
    with mistakes_in(journal.path):
        out.parent.mkdir(parents=True, exist_ok=True)
        file = journal.path.open("ab+", buffering=0)
    with file:
        with mistakes_in(journal.path):
            if lock_file(file, f"{str(out)!a} is being written by another process"):
                remove_leftovers(out.parent, glob.escape(out.name))
            journal.begin(file, identity, fresh)
        yield journal


def partial_of(out: Path) -> Path:
    """Where the rows of `out` are until it is whole."""
    return out.with_name(out.name + ".partial")


def check_out(out: Path, fresh: bool) -> None:
    """Refuse, before any work, a file that can't be made, or is there and should stay.

    Raises:
        UserError: if it is so.
    """
    if out.suffix not in FORMATS:
        raise UserError(f"--out {str(out)!a} ends in none of {', '.join(FORMATS)}")
    if out.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401 - to know that it is there
        except ImportError as error:
            raise UserError(f"--out {str(out)!a} needs pyarrow: pip install pyarrow") from error
    # Where there is a part of a new one, `--fresh` was said when that was begun.
    if out.exists() and not fresh and not partial_of(out).exists():
        raise UserError(f"{str(out)!a} is there already: --fresh replaces it when all is done")


def write_parquet(journal: Path, file: BinaryIO) -> None:
    """The rows of CSV at `journal` as Parquet, a part at a time; empty cells are null."""
    import pyarrow as pa
    from pyarrow import csv as reader
    from pyarrow import parquet

    with journal.open(encoding="utf-8", newline="") as text:
        columns = next(csv.reader(text))
    kinds = {name: pa.float32() if "probability" in name else pa.string() for name in columns}
    rows = reader.open_csv(
        journal,
        read_options=reader.ReadOptions(block_size=GROUP_BYTES),
        convert_options=reader.ConvertOptions(
            column_types=kinds, null_values=[""], strings_can_be_null=True
        ),
    )
    with parquet.ParquetWriter(file, pa.schema(kinds.items())) as writer:
        for part in rows:
            writer.write_batch(part)


@contextlib.contextmanager
def mistakes_in(path: Path) -> Iterator[None]:
    """A block in which a system error is the user's mistake: a place that can't be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {str(path)!a}: {error.strerror}") from error
