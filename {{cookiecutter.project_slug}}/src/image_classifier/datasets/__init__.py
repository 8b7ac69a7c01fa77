"""Datasets by name. To add one: a function in a file of its own here, and its name in `DATASETS`.

    def mine(data: DataConfig, split: str) -> Source:
        return Source(labels, classes, pixels=images)

`split` is train, val or test; raise `UserError` for one that there is not.
"""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches

from ..config import DataConfig, UserError
from .cifar import cifar10, cifar100
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
        UserError: for a name that is not in `DATASETS`, or images that are not there or damaged.
    """
    if data.name not in DATASETS:
        near = get_close_matches(data.name, DATASETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"no dataset {data.name!r}; there are: {', '.join(DATASETS)}{hint}")
    source = without_quarantine(DATASETS[data.name](data, split), data, split)
    if data.prepared and source.paths is not None:
        prepared, note = open_prepared(data, split, source.paths)
        notes = (*source.notes, note) if note else source.notes
        source = replace(source, prepared=prepared, notes=notes)
    return source.thinned(data.limit) if 0 < data.limit < len(source) else source
