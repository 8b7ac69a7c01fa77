"""`prepare`: images written once, as training needs them."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from ..attempt import run_in_processes
from ..config import (
    PREPARED_QUALITY,
    PREPARED_SIDE,
    ComputeConfig,
    Config,
    DataConfig,
    RunConfig,
)
from ..parse import check_ranges, command, parse, summary, take_preset


@dataclass(frozen=True)
class PrepareData:
    """Which images, and where to; as for `train`."""

    name: str = "folder"  # a dataset of files
    root: str = "data"  # folder of the images: root/{train,val[,test]}/<class>/ or root/<class>/
    val_fraction: float = 0.2  # of the training images, where the folder has no `val` of its own
    cache: str = ""  # folder to write to; default: ROOT.cache, beside `root`


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, and how."""

    data: PrepareData = field(default_factory=PrepareData)
    splits: tuple[Literal["train", "val", "test"], ...] = ("train", "val")  # which images
    side: int = PREPARED_SIDE  # pixels of the shorter side; smaller images stay as they are
    format: Literal["raw", "jpeg"] = "raw"  # raw: fastest; jpeg: an eighth of the space
    quality: int = PREPARED_QUALITY  # of jpeg, up to 100


def prepare_verb(words: list[str]) -> int:
    """Write images once as training needs them: `prepare [PRESET] --data.root FOLDER`."""
    name, images = take_images(words)
    default, about = PrepareOptions(images), summary(prepare_verb)
    prog = f"{command('prepare')} {name}"
    options = parse(PrepareOptions, words, prog=prog, about=about, default=default)
    check_ranges(options, side=(8, 4096), quality=(1, 100))
    config = Config(data=DataConfig(**asdict(options.data)))

    def work() -> None:
        from ..datasets.prepared import Recipe
        from ..prepare import prepare

        recipe = Recipe(options.format, options.side, options.quality)
        prepare(config.data, options.splits, recipe)

    return run_in_processes(work, RunConfig(processes=1), ComputeConfig(device="cpu"))


def take_images(words: list[str]) -> tuple[str, PrepareData]:
    """The preset that `words` begin with, or `folder`: its name, and which images it is about.

    Raises:
        UserError: if there is none of that name.
    """
    name, preset = take_preset(words, "folder")
    data = preset.data
    return name, PrepareData(data.name, data.root, data.val_fraction, data.cache)
