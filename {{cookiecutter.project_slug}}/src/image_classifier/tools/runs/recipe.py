"""What several runs have in common, and the command line that says so."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import Config
from ...errors import UserError
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


def take_recipe(
    kind: type[Config], words: list[str], verb: str, about: str, otherwise: str
) -> tuple[Any, Recipe]:
    """The options of `verb COUNT [PRESET] [--FLAG VALUE ...]`, and the recipe in them.

    Args:
        kind: `Config` with more fields: `at_once`, and one that is positional.
        words: of the command line, after the verb.
        verb: the command.
        about: the description in its help.
        otherwise: the preset if none is named.

    Raises:
        UserError: if `words` are no such options.
    """
    count = [words.pop(0)] if words and not words[0].startswith("-") else []
    if count and not (count[0].isdecimal() and int(count[0]) > 1):
        raise UserError(
            f"{verb} {count[0]}: a number from 2 on comes first: `{verb} 5 {otherwise}`"
        )
    name, preset = take_preset(words, otherwise, f"runs/{verb}/{{}}")
    prog = f"{command(verb)} N {name}"
    default = kind(**sections(preset))
    options = parse(kind, [*count, *words], prog=prog, about=about, default=default)
    config = Config(**sections(options))
    return options, Recipe(name, config, changed_knobs(config, preset), options.at_once)
