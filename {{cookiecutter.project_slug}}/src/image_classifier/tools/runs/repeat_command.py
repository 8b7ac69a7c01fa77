"""`repeat`: train a recipe with several seeds."""

from ...runtime.command_line import summary
from ...runtime.launch import attempt
from .recipe import take_recipe

RESULT_IS_IN_FILES = True


def main(words: list[str]) -> int:
    """Train with N seeds, how far results vary: `repeat N [PRESET] [--FLAG VALUE ...]`."""
    count, recipe = take_recipe(words, "repeat", summary(main), "shapes")

    def work() -> None:
        from .many_runs import repeat

        repeat(recipe, count)

    return attempt(work)
