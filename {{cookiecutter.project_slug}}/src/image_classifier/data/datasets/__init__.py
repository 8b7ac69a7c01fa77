"""Datasets by name. To add one: a function in a file of its own here, and its name in `DATASETS`.

    def mine(data: DataConfig, split: str) -> Source:
        return Source(labels, classes, pixels=images)

`split` is train, val or test; raise `UserError` for one that there is not. What the function draws
from torch, `random` or NumPy is the same for each split, and whichever command asks.
"""

import traceback
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from torch.utils.data import Dataset

from ...config import DataConfig, FaultError, UserError
from ...runtime.seeding import DATASET, seeded
from .cifar import cifar10, cifar100
from .conversions import SourceError
from .folder import folder
from .prepared import open_prepared
from .quarantine import without_quarantine
from .shapes import shapes
from .source import Source

DATASETS: dict[str, Callable[[DataConfig, str], Source]] = {
    dataset.__name__: dataset for dataset in (shapes, cifar10, cifar100, folder)
}


def open_dataset(data: DataConfig, split: str) -> Source:
    """One split of the dataset that `data` names; its images as `prepare` wrote them, if it did.

    Files that `check --quarantine` listed are left out.

    Raises:
        UserError: for a name that is not in `DATASETS`, images that are not there or damaged, or a
            function that does not return what it should.
    """
    if data.name not in DATASETS:
        near = get_close_matches(data.name, DATASETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"no dataset {data.name!r}; there are: {', '.join(DATASETS)}{hint}")
    source = without_quarantine(ask_dataset(data, split), data, split)
    if data.prepared and source.paths is not None:
        prepared, note = open_prepared(data, split, source.paths)
        notes = (*source.notes, note) if note else source.notes
        source = replace(source, prepared=prepared, notes=notes)
    return source.thinned(data.limit) if 0 < data.limit < len(source) else source


def ask_dataset(data: DataConfig, split: str) -> Source:
    """What the function of the dataset returns.

    Raises:
        UserError: if it is no `Source`, or was to be one of what that can't hold.
    """
    try:
        with seeded(DATASET):
            source = DATASETS[data.name](data, split)
    except SourceError as error:
        raise UserError(f"dataset {data.name!r}, {line_of(error)}: {error}") from error
    except (UserError, FaultError):
        raise
    except Exception as error:
        error.add_note(f"dataset {data.name!r}, {line_of(error)}, asked for the split {split!r}")
        raise
    if isinstance(source, Source):
        return source
    found = "nothing" if source is None else f"a {type(source).__name__}"
    if isinstance(source, Dataset):
        found += ", which is a torch Dataset"
    raise UserError(
        f"dataset {data.name!r} returned {found}: it should end in "
        "`return Source(labels, classes, pixels=images)`, or `paths=PathList(folder, paths)`"
    )


def line_of(error: Exception) -> str:
    """The line of a dataset's function in which something went wrong."""
    *_, frame = traceback.extract_tb(error.__traceback__)[:2]  # the first is that which asked
    return f"line {frame.lineno} of {Path(frame.filename).name}"
