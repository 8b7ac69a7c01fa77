"""Options of the commands that read the images of a preset."""

from dataclasses import dataclass, fields
from typing import Literal

from ..runtime.command_line import take_preset


@dataclass(frozen=True)
class PrepareData:
    """Which images to prepare or check; the names are those of `train`'s options."""

    name: str = "folder"  # a dataset of files
    root: str = "data"  # folder of the images: root/{train,val[,test]}/<class>/ or root/<class>/
    labels: str = ""  # table of the images, .csv, .jsonl or .parquet, in place of folders
    val_fraction: float = 0.2  # of the training images, where the folder has no `val` of its own
    fold: int = 0  # which share of the training images that is
    cache: str = ""  # folder to write to; default: ROOT.cache, beside `root`
    channels: int = 3  # of an image; 1: gray
    bits: Literal[8, 16] = 8  # of each number


def take_images(words: list[str]) -> tuple[str, PrepareData]:
    """The preset whose name `words` begin with, or `folder`: its name, and its images.

    Raises:
        UserError: if there is no preset of that name.
    """
    name, preset = take_preset(words, "folder")
    data = preset.data
    return name, PrepareData(
        **{knob.name: getattr(data, knob.name) for knob in fields(PrepareData)}
    )
