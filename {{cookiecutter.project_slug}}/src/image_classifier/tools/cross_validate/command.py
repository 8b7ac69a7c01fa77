"""`cross-validate`: validate on each image once."""

from ...extensions import need_tool
from ...runtime.command_line import summary
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = True


def main(words: list[str]) -> int:
    """Validate on each image once, in K runs: `cross-validate K [PRESET] --data.root FOLDER`."""
    recipes = need_tool("recipe", "runs", "cross-validate")
    count, recipe = recipes.take_recipe(words, "cross-validate", summary(main), "folder")

    def work() -> None:
        from .cross_validate import cross_validate

        cross_validate(recipe, count)

    return attempt(work)
