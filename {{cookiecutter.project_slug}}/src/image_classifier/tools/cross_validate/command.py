"""`cross-validate`: validate on each image once."""

from ...runtime.command_line import summary
from ...runtime.launch import attempt
from ..runs.recipe import take_recipe

RESULT_IS_IN_FILES = True


def main(words: list[str]) -> int:
    """Validate on each image once, in K runs: `cross-validate K [PRESET] --data.root FOLDER`."""
    count, recipe = take_recipe(words, "cross-validate", summary(main), "folder")

    def work() -> None:
        from .cross_validate import cross_validate

        cross_validate(recipe, count)

    return attempt(work)
