"""`prepare`: write images once, at the size that training needs."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from ...config import Config, DataConfig, ImagesConfig
from ...extensions import within
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.config_dict import sections
from ...runtime.launch import attempt
from .recipe import Recipe

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, and how."""

    data: ImagesConfig = field(default_factory=ImagesConfig)
    splits: tuple[Literal["train", "val", "test"], ...] = ("train", "val")  # which images
    side: int = within(Recipe.side, 8, 4096)  # shorter side, in pixels; smaller images stay
    format: Literal["raw", "jpeg", "tar"] = "raw"  # raw: fastest; jpeg: an eighth of the space;
    # tar: images as they are, in tar files that `--data.name tar` reads from anywhere
    quality: int = within(Recipe.quality, 1, 100)  # JPEG quality, up to 100


def main(words: list[str]) -> int:
    """Write images once at the size that training needs: `prepare [PRESET] --data.root FOLDER`."""
    name, preset = take_preset(words, "folder", kind=PrepareOptions)
    images = ImagesConfig(**sections(preset.data, ImagesConfig))
    prog = f"{command('prepare')} {name}"
    options = parse(PrepareOptions, words, prog, summary(main), PrepareOptions(images))
    data = Config(data=DataConfig(**asdict(options.data))).data  # in its ranges

    def work() -> None:
        from .prepare import prepare_images

        recipe = Recipe(options.format, options.side, options.quality, data.channels, data.bits)
        prepare_images(data, options.splits, recipe)

    return attempt(work)
