"""What several runs have in common, and the command line that says so."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ...config import Config
from ...errors import UserError
from ...extensions import within
from ...runtime.command_line import command, parse, take_preset
from ...runtime.config_dict import changed_knobs, sections, words_of


@dataclass(frozen=True)
class Recipe:
    """What all runs have in common."""

    preset: str
    config: Config  # `run.dir` is the folder of their folders
    changed: dict[str, Any]  # the options that are not the preset's
    at_once: int  # 0: one per GPU, or one

    @property
    def folder(self) -> Path:
        """The folder of all runs."""
        return Path(self.config.run.dir)

    def words(self, name: str, own: dict[str, Any]) -> list[str]:
        """The words of `train` for the run `name`, which has the options `own`."""
        knobs = self.changed | own | {"run.dir": str(self.folder / name)}
        return [self.preset, *words_of(knobs)]


@dataclass(frozen=True)
class ManyOptions(Config):
    """How many runs, and every knob of training; `run.dir` is the folder of the runs."""

    count: Annotated[int, tyro.conf.Positional] = 0  # how many: seeds, from --seed on, or folds
    at_once: int = within(0, 0, 1000)  # runs at once; 0: one per GPU, or one


def take_recipe(words: list[str], verb: str, about: str, otherwise: str) -> tuple[int, Recipe]:
    """The number of runs, and their recipe, in `verb COUNT [PRESET] [--FLAG VALUE ...]`.

    `words` follow the verb; `about` is its help; `otherwise` is the preset if none is named.

    Raises:
        UserError: if `words` are no such options.
    """
    count = [words.pop(0)] if words and not words[0].startswith("-") else []
    if count and not (count[0].isdecimal() and int(count[0]) > 1):
        raise UserError(
            f"{verb} {count[0]}: a number from 2 on comes first: `{verb} 5 {otherwise}`"
        )
    name, preset = take_preset(words, otherwise, f"runs/{verb}/{{}}")
    default = ManyOptions(**sections(preset))
    options = parse(ManyOptions, [*count, *words], f"{command(verb)} N {name}", about, default)
    config = Config(**sections(options))
    return options.count, Recipe(name, config, changed_knobs(config, preset), options.at_once)
