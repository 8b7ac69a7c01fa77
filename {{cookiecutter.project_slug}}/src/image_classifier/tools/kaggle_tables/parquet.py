"""Tables in Parquet."""

from collections.abc import Iterator
from pathlib import Path

from ...errors import UserError
from ...runtime.console import printable
from ...runtime.platform import install_command
from ..label_table.rows import Row, Table, text_of


def open_parquet(file: Path) -> Table:
    """A Parquet file, of which only the columns that are asked for are read."""
    try:
        from pyarrow import parquet
    except ImportError:
        install = install_command("pyarrow")
        raise UserError(f"{str(file)!a} can be read by pyarrow: {install}") from None
    try:
        content = parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {str(file)!a}: {first_line(error)}") from error

    def rows(columns: list[str]) -> Iterator[Row]:
        number = 1
        try:
            for batch in content.iter_batches(columns=columns):
                cells = (map(text_of, batch.column(name).to_pylist()) for name in columns)
                yield from enumerate(zip(*cells, strict=True), number)
                number += len(batch)
        except (OSError, ValueError) as error:
            raise found.wrong(number, f"damaged: {first_line(error)}") from error

    found = Table(file, content.schema_arrow.names, rows, "row")
    return found


def first_line(error: Exception) -> str:
    """Why a file can't be read."""
    return printable(str(error).partition("\n")[0])
