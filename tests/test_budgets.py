"""How much there is to read, and that it does not grow unnoticed. `pytest -s` prints the table."""

from conftest import PROJECT
from image_classifier.config import Config
from image_classifier.extensions import of_tools
from image_classifier.runtime.config_dict import flatten

PACKAGE = PROJECT / "src" / "image_classifier"
# Lines: what they are at most now, and what they should be; lower the first with the lines.
BUDGETS = {
    "story: the files at the top": (3_710, 2_000),
    "core: all but tools": (11_170, 7_500),
    "the largest tool": (1_250, 800),
    "options of the core": (77, 56),
}


def count(files):
    """The lines of files, without their tests."""
    files = [file for file in files if "tests" not in file.relative_to(PACKAGE).parts]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_the_package_does_not_grow_unnoticed():
    everything = [*PACKAGE.rglob("*.py")]
    tools = [folder for folder in (PACKAGE / "tools").iterdir() if folder.is_dir()]
    found = {
        "story: the files at the top": count(PACKAGE.glob("*.py")),
        "core: all but tools": count(f for f in everything if PACKAGE / "tools" not in f.parents),
        "the largest tool": max(count(folder.rglob("*.py")) for folder in tools),
        "options of the core": len(flatten(Config()).keys() - of_tools().keys()),
    }
    for name, number in found.items():
        most, wanted = BUDGETS[name]
        print(f"{name:<32}{number:>7,}  at most {most:,}, wanted {wanted:,}")
    assert not {name for name, number in found.items() if number > BUDGETS[name][0]}
