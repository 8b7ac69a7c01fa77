"""How much there is to read, and that it does not grow unnoticed. `pytest -s` prints the table."""

from conftest import PROJECT
from image_classifier.config import Config
from image_classifier.extensions import of_tools
from image_classifier.runtime.config_dict import flatten

from pretuned_answers import tools

PACKAGE = PROJECT / "src" / "image_classifier"
# Lines: what they are at most now, and what they should be; lower the first with the lines.
BUDGETS = {
    "story: the files at the top": (1_757, 2_000),
    "core: all but tools": (9_284, 7_500),
    "the largest tool": (800, 800),
    "a project with few tools": (11_468, 8_500),
    "a project with the usual ones": (15_897, 10_500),
    "options of the core": (54, 56),
}


def count(files):
    """The lines of files, without their tests."""
    files = [file for file in files if "tests" not in file.relative_to(PACKAGE).parts]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def files_of(size):
    """The files of the tools of a size, and of what these need."""
    for name in tools.with_needs(PROJECT, tools.chosen(PROJECT, size)):
        path = tools.there(PROJECT)[name]
        yield from [path] if path.is_file() else path.rglob("*.py")


def test_the_package_does_not_grow_unnoticed():
    everything = [*PACKAGE.rglob("*.py")]
    folders = [folder for folder in (PACKAGE / "tools").iterdir() if folder.is_dir()]
    core = count(file for file in everything if PACKAGE / "tools" not in file.parents)
    found = {
        "story: the files at the top": count(PACKAGE.glob("*.py")),
        "core: all but tools": core,
        "the largest tool": max(count(folder.rglob("*.py")) for folder in folders),
        "a project with few tools": core + count(files_of("few")),
        "a project with the usual ones": core + count(files_of("usual")),
        "options of the core": len(flatten(Config()).keys() - of_tools().keys()),
    }
    for name, number in found.items():
        most, wanted = BUDGETS[name]
        print(f"{name:<32}{number:>7,}  at most {most:,}, wanted {wanted:,}")
    assert not {name for name, number in found.items() if number > BUDGETS[name][0]}
