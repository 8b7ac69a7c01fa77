"""`check`: find unreadable files, leakage between splits and conflicting labels."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from ...config import Config, DataConfig, ImagesConfig
from ...errors import EXIT_DONE, EXIT_FAULT
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.config_dict import sections
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = "--json"


@dataclass(frozen=True)
class CheckOptions:
    """What to check, and what to write."""

    data: ImagesConfig = field(default_factory=ImagesConfig)
    splits: tuple[Literal["train", "val", "test"], ...] = ()  # default: all that exist
    json: str = ""  # file for all findings
    quarantine: bool = False  # list unreadable, leaking and conflicting images in the cache folder:
    # training leaves them out; those of validation and test stay, unless unreadable
    quarantine_all: bool = False  # the same, with validation and test images


def main(words: list[str]) -> int:
    """Check the images before training: `check [PRESET] --data.root FOLDER`."""
    name, preset = take_preset(words, "folder", kind=CheckOptions)
    images = ImagesConfig(**sections(preset.data, ImagesConfig))
    prog = f"{command('check')} {name}"
    options = parse(CheckOptions, words, prog, summary(main), CheckOptions(images))
    data = Config(data=DataConfig(**asdict(options.data))).data  # in its ranges
    serious = 0

    def work() -> None:
        nonlocal serious
        from .check import check

        is_all = options.quarantine_all
        serious = check(data, options.splits, options.json, options.quarantine or is_all, is_all)

    return attempt(work) or (EXIT_FAULT if serious else EXIT_DONE)
