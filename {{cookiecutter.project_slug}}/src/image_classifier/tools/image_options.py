"""Options of the commands that read the images of a preset."""

from dataclasses import dataclass, fields
from typing import Literal

from ..config import DataConfig
from ..runtime.command_line import take_preset


@dataclass(frozen=True)
class PrepareData:
    """Which images to prepare or check; names and defaults are those of `train`'s options."""

    name: str = "folder"  # a dataset of files
    root: str = DataConfig.root  # folder of the images: root/{train,val[,test]}/<class>/ or
    # root/<class>/
    labels: str = DataConfig.labels  # table of the images, .csv, .jsonl or .parquet, in place of
    # folders
    columns: tuple[str, ...] = DataConfig.columns  # columns of that table by other names:
    # path=Image label=Id
    val_fraction: float = DataConfig.val_fraction  # of the training images, where the folder has no
    # `val` of its own
    fold: int = DataConfig.fold  # which share of the training images that is
    cache: str = DataConfig.cache  # folder to write to; default: ROOT.cache, beside `root`
    channels: int = DataConfig.channels  # of an image; 1: gray
    bits: Literal[8, 16] = DataConfig.bits  # of each number


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
