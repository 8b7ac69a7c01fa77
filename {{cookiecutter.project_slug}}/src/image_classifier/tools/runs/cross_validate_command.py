"""`cross-validate`: validate on each image once."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from ...config import Config
from ...extensions import within
from ...runtime.command_line import summary
from ...runtime.launch import attempt
from .recipe import take_recipe

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class CrossValidateOptions(Config):
    """How many folds, and every knob of training; `run.dir` is the folder of the runs."""

    folds: Annotated[int, tyro.conf.Positional] = 0  # how many; they decide data.val-fraction
    at_once: int = within(0, 0, 1000)  # runs at once; 0: one per GPU, or one


def main(words: list[str]) -> int:
    """Validate on each image once, in K runs: `cross-validate K [PRESET] --data.root FOLDER`."""
    kind = CrossValidateOptions
    about = summary(main)
    options, recipe = take_recipe(kind, words, "cross-validate", about, "folder")

    def work() -> None:
        from .cross_validate import cross_validate

        cross_validate(recipe, options.folds)

    return attempt(work)
