"""Datasets by name. To add one: a function in a file of its own here, and its name in `DATASETS`.

    def mine(data: DataConfig, split: str) -> Source:
        return Source(labels, classes, pixels=images)

Pixels in memory and readers that have not 3 x 8 bits say so: `Source(..., channels=5, bits=16)`.
`split` is train, val or test; raise `UserError` for one that there is not. What the function draws
from torch, `random` or NumPy is the same for each split, and whichever command asks.

What few need is a tool: `tools/<name>/dataset.py` with `DATASETS` of its own.
"""

from collections.abc import Callable
from dataclasses import replace

from ...config import DataConfig
from ...errors import OF_TOOLS, UserError, choose
from ...extensions import chained, find_tools, functions, joined
from ...runtime.seeding import DATASET, seeded
from .folder import folder
from .parts import check_fold
from .shapes import shapes
from .source import Source

DATASETS: dict[str, Callable[[DataConfig, str], Source]] = {  # or what a tool makes a `Source` of
    dataset.__name__: dataset for dataset in (shapes, folder)
}


def open_dataset(data: DataConfig, split: str) -> Source:
    """One split of the dataset that `data` names; prepared images in place of files, if there are.

    Raises:
        UserError: for a name that neither `DATASETS` nor a tool has, images that are not there or
            damaged, or a function that does not return what it should.
    """
    source = open_files(data, split)
    source = chained("source", "with_prepared", source, data, split)
    source = source.thinned(data.limit) if 0 < data.limit < len(source) else source
    for check_files in functions("labels", "check_files"):
        check_files(source, data)
    return source


def find_dataset(data: DataConfig) -> Callable[[DataConfig, str], Source]:
    """The function of the dataset that `data` names; `UserError` if there is none, or no fold."""
    for find in functions("labels", "find_dataset"):
        if found := find(data):
            return found
    check_fold(data)
    theirs = (tool.DATASETS for tool in find_tools("dataset").values())
    return choose("dataset", data.name, joined("dataset", DATASETS, *theirs), OF_TOOLS)


def open_files(data: DataConfig, split: str) -> Source:
    """`open_dataset` without a limit and without prepared images; files may be missing."""
    with seeded(DATASET):
        source = chained("conversion", "to_source", find_dataset(data)(data, split), data)
    if not isinstance(source, Source):
        raise UserError(
            f"dataset {data.name!r} returned a {type(source).__name__}: it should return "
            "`Source(labels, classes, pixels=images)`, or with `paths=PathList(folder, paths)`; a "
            "torch Dataset needs a tool: pretuned add torch-dataset"
        )
    if (source.channels, source.bits) != (data.channels, data.bits):
        if source.paths is None:
            raise UserError(
                f"the images of {data.name} have {source.channels} channels of {source.bits} bits: "
                f"--data.channels {source.channels} --data.bits {source.bits}"
            )
        kind = {"channels": data.channels, "bits": data.bits}  # as which files are read
        source = replace(source, **kind, mean=None, std=None)
    return chained("source", "without_quarantine", source, data, split)
