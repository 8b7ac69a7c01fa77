"""A folder that `save_to_disk` of Hugging Face's `datasets` wrote; nothing is downloaded.

The images are the column of type `Image`, or called `image`: what was encoded is decoded as a file
is. Labels are the column of type `ClassLabel`, or called `label` or `labels`: class numbers, names,
or lists of them. Rows stay on the disk, where all processes map the same memory.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...config import DataConfig
from ...data import PathList, Source, divide, find_parts
from ...errors import FaultError, UserError
from ...runtime.console import printable
from ...runtime.files import read_object, read_plain
from ...runtime.platform import install_command
from ..dataset_formats.labels import numbered
from ..dataset_formats.parts import choose_part

TAIL = 1024  # bytes at the end of an image, which tell it from others


class Rows(PathList):
    """The images of a dataset, called `train/<row>`."""

    def __init__(self, root: str, part: str, table: Any, rows: np.ndarray) -> None:  # noqa: ANN401
        """`rows` (count,) int64 of `table`, whose only column has bytes and path of each image."""
        super().__init__(root, (f"{part}/{row}".encode() for row in rows.tolist()))
        self.part = part
        self.table = table
        self.rows = rows
        (self.column,) = table.column_names

    def read(self, index: int) -> bytes:
        """The encoded image."""
        image = self.table[int(self.rows[index])][self.column]
        if image is None or (image["bytes"] is None and not image["path"]):
            raise OSError("the row has no image")
        content = image["bytes"]
        path = image["path"]
        if content is not None:
            return content
        if not is_below(self.root, path):  # whoever made the dataset may ask for any file
            raise OSError(f"its file {path!a} is not in the dataset's folder")
        return read_plain(self.root / path)

    def picked(self, indices: Tensor) -> "Rows":
        """Only the images at `indices`, (count,) int64."""
        return Rows(self.root, self.part, self.table, self.rows[indices.numpy()])

    def tails(self) -> Iterator[bytes]:
        """What tells each image from the others: its length and end, or its file's name."""
        from pyarrow import compute

        for chunk in self.table.data.column(self.column).chunks:
            content = compute.struct_field(chunk, "bytes")
            paths = compute.struct_field(chunk, "path")
            sizes = compute.binary_length(content).to_pylist()
            ends = compute.binary_slice(content, -TAIL).to_pylist()
            for size, end, path in zip(sizes, ends, paths.to_pylist(), strict=True):
                yield (path or "").encode() if size is None else b"%d %b" % (size, end)

    def files(self) -> Iterator[bytes]:
        """The path of each image, as the dataset has it.

        Raises:
            UserError: if an image has none.
        """
        from pyarrow import compute

        paths = compute.struct_field(self.table.data.column(self.column), "path")
        for row, path in enumerate(paths.to_pylist()):
            if not path:
                raise UserError(
                    f"--data.groups finds groups in the paths of images, and image {row} of part "
                    f"{self.part!a} in {str(self.root)!a} has no path: save all with their paths, "
                    "or leave out --data.groups"
                )
            yield path.encode()

    def stats(self) -> Tensor:
        """Size in bytes of each image, and the time of change in ns of the dataset."""
        from pyarrow import compute

        content = compute.struct_field(self.table.data.column(self.column), "bytes")
        sizes = compute.fill_null(compute.binary_length(content), -1).to_numpy()[self.rows]
        times = [Path(file["filename"]).stat().st_mtime_ns for file in self.table.cache_files]
        sizes = torch.from_numpy(sizes.astype(np.int64))
        return torch.stack((sizes, torch.full_like(sizes, max(times, default=-1))), dim=1)


def huggingface(data: DataConfig, split: str) -> Source:
    """The rows of `split` in a `DatasetDict`; a single `Dataset` is for training and validation.

    Without rows for validation, a hash of each image divides those for training; or the groups in
    their paths do.

    Raises:
        UserError: if the library is missing, there is no such dataset or it is damaged, or it has
            no column of images or labels, or several.
    """
    if "://" in data.root or "::" in data.root:
        raise UserError(
            f"--data.root {data.root!a} is no folder of this machine, and nothing is downloaded: "
            "`load_dataset(...).save_to_disk(folder)` makes one"
        )
    library = open_library()
    try:
        return source_of(library, open_parts(library, Path(data.root)), data, split)
    except (UserError, FaultError):
        raise
    except Exception as error:  # the library raises any kind
        reason = " ".join(str(error).split()) or type(error).__name__
        reason += " is missing" * isinstance(error, KeyError)
        raise UserError(
            f"--data.root {data.root!a} is no dataset of `save_to_disk`: {reason:.300}"
        ) from error


def open_parts(library: ModuleType, root: Path) -> dict[str, Any]:
    """The parts of a dataset, train, test and so on, all of whose files are in its folder.

    Raises:
        UserError: if it names others, as a name of a part may even be a URL; or one has no rows.
    """
    names = ["."]
    with suppress(OSError):  # without this file it is a single `Dataset`
        names = read_object(root / "dataset_dict.json").get("splits", ())
        if odd := [name for name in names if not re.fullmatch(r"(?!\.\.?$)[^/\\:]+", name)]:
            raise UserError(f"{str(root)!a} has a part called {odd[0]!a:.60}: rename it")
    for name in names:
        with suppress(OSError):  # which the library reports
            if read_object(root / name / "state.json").get("_data_files") == []:
                raise UserError(f"{str(root / name)!a} has no rows: add some, or leave it out")
    found = library.load_from_disk(str(root))
    found = found if isinstance(found, dict) else {"train": found}
    parts = {name: table.with_format(None) for name, table in found.items()}
    for table in parts.values():
        for file in table.cache_files:
            if not is_below(root, file["filename"]):
                raise UserError(f"{str(root)!a}: {file['filename']!a} is not in its folder")
    return parts


def is_below(root: Path, path: str | Path) -> bool:
    """Whether a file, from `root` or absolute, is in that folder."""
    try:
        return (root / path).resolve().is_relative_to(root.resolve())
    except (ValueError, RuntimeError):  # a zero byte, or links in a circle
        return False


def source_of(library: ModuleType, parts: dict[str, Any], data: DataConfig, split: str) -> Source:
    """The rows of `split`."""
    part, is_divided = choose_part(parts, data, split)
    table = parts[part]
    column = find_column(table.features, lambda kind: isinstance(kind, library.Image), "image")
    try:
        images = table.select_columns([column]).cast_column(column, library.Image(decode=False))
    except (TypeError, ValueError, NotImplementedError) as error:  # pyarrow's and the library's
        raise UserError(f"column {column!a} of {data.root!a} has no images: {error}") from error
    labels, classes = labels_of(library, parts, part)
    paths = Rows(data.root, part, images, np.arange(len(table)))
    source = Source(labels, classes, paths=paths)
    if not is_divided:
        return source
    names = paths.files() if getattr(data, "groups", "") else paths.tails()  # an option of a tool
    return source.picked(divide(names, labels, data, split))


def labels_of(
    library: ModuleType, parts: dict[str, Any], part: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels of a part, and the names of the classes."""

    def class_label(kind: object) -> object:
        kind = getattr(kind, "feature", kind)  # of a list
        return kind if isinstance(kind, library.ClassLabel) else None

    table = parts[part]
    column = find_column(table.features, class_label, "label", "labels")
    if (kind := class_label(table.features[column])) is not None:
        classes = tuple(map(printable, kind.names))
    else:
        train = parts[find_parts(parts).get("train", part)]
        _, classes = numbered(train.data.column(column).to_pylist())
    return numbered(table.data.column(column).to_pylist(), classes)


def find_column(features: Any, is_right: Callable[[object], object], *names: str) -> str:  # noqa: ANN401
    """The one column that `is_right` by its type, or else by its name; a right name wins."""
    by_kind = [name for name, kind in features.items() if is_right(kind)]
    found = [name for name in names if name in (by_kind or features)] or by_kind
    if len(found) != 1:
        which = ", ".join(map(ascii, found or features))
        raise UserError(
            f"the dataset should have one column {names[0]!r}, of type Image or ClassLabel; it has "
            f"{which}: `dataset.rename_column`, or `dataset.remove_columns`, and save it again"
        )
    return found[0]


def open_library() -> ModuleType:
    """The library.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        install = install_command("datasets")
        raise UserError(f"--data.name huggingface needs a library: {install}") from error
    return datasets


DATASETS = {"huggingface": huggingface}
