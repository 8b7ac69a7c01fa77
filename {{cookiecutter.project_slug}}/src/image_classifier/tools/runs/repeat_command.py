"""`repeat`: train a recipe with several seeds."""

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
class RepeatOptions(Config):
    """How many seeds, and every knob of training; `run.dir` is the folder of the runs."""

    seeds: Annotated[int, tyro.conf.Positional] = 0  # how many, from --seed on
    at_once: int = within(0, 0, 1000)  # runs at once; 0: one per GPU, or one


def main(words: list[str]) -> int:
    """Train with N seeds, how far results vary: `repeat N [PRESET] [--FLAG VALUE ...]`."""
    options, recipe = take_recipe(RepeatOptions, words, "repeat", summary(main), "shapes")

    def work() -> None:
        from .many_runs import repeat

        repeat(recipe, options.seeds)

    return attempt(work)
