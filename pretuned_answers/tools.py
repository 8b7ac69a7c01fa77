"""Which tools a project has: the sizes to choose from, what a tool needs, and what names it.

A tool is a folder in `tools/` of the package. The import contract in pyproject.toml says which
others it needs: they come with it. Where a tool is missing, so are the lines of Markdown and TOML
that name it.
"""

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from pretuned_answers import RefusedError

TEMPLATE = next(Path(__file__).resolve().parents[1].glob("{{*}}"))  # which has all of them
FOLDER = Path("src", "image_classifier", "tools")
FEW = ("evaluate", "layer_decay", "linear_probe", "predict", "profile", "report", "tensorboard")
USUAL = (*FEW, "calibration", "check", "cifar", "cpu_precision", "cutout", "export", "mixup")
USUAL += ("monitor", "muon", "near_duplicates", "policies", "prepare", "timm", "wandb")
PAGES = {"bench": ("docs/tips.md",)}  # what belongs to a tool and is not in its folder

NEED = re.compile(r'"\w+\.tools\.(\w+)\S* -> \w+\.tools\.(\w+)')  # in the import contract
COMMAND = re.compile(r"image-classifier ([a-z-]+)")
BLOCK = re.compile(r"```.*?^```$\n*|.+?(?:\n\n+|\Z)", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^(?:- .*\n(?:  .*\n)*|\|.*\n)", re.MULTILINE)  # of a list; row of a table


def there(project: Path) -> dict[str, Path]:
    """The tools of a project with the default names, and what they share: module -> its path."""
    paths = sorted((project / FOLDER).glob("[a-z]*"))
    return {path.stem: path for path in paths if path.is_dir() or path.suffix == ".py"}


def offered(project: Path) -> list[str]:
    """The tools that can be asked for by name: folders with a page for their users."""
    return [name for name, path in there(project).items() if (path / "README.md").exists()]


def chosen(project: Path, size: str, names: str = "") -> list[str]:
    """The tools of a size or, if there are any, of names and sizes between commas.

    Raises:
        RefusedError: if there is no tool of a name.
    """
    sizes = {"none": (), "few": FEW, "usual": USUAL, "all": offered(project)}
    found: list[str] = []
    for word in (names or size).split(","):
        own = sizes.get(module_of(word))
        found += [named(project, word, *sizes)] if own is None else own
    return [*dict.fromkeys(found)]


def are_names(project: Path, text: str) -> bool:
    """Whether a text has the name of a tool, or has several words between commas."""
    return "," in text or module_of(text) in offered(project)


def module_of(name: str) -> str:
    """The folder that a tool `name` has, however it is written."""
    return name.strip().lower().replace("-", "_")


def named(project: Path, name: str, *sizes: str) -> str:
    """The folder of the tool `name`, however it is written.

    Raises:
        RefusedError: if there is none; it lists what there is, and `sizes`, which may be asked for.
    """
    found = module_of(name)
    if found not in offered(project):
        known = [*sizes, *offered(project)]
        near = difflib.get_close_matches(found, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        words = f"{hint} (there are: {', '.join(known)})".replace("_", "-")
        raise RefusedError(f"unknown tool {name.strip()!a}{words}")
    return found


def summary(folder: Path) -> str:
    """What the tool in a folder does, in one line."""
    text = (folder / "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def size_of(project: Path, names: Iterable[str]) -> str:
    """The size that is exactly these tools; empty if there is none."""
    sizes = ("none", "few", "usual", "all")
    return next((size for size in sizes if {*chosen(project, size)} == {*names}), "")


def with_needs(project: Path, names: Iterable[str]) -> set[str]:
    """These tools, and all that they need."""
    pairs = NEED.findall((project / "pyproject.toml").read_text(encoding="utf-8"))
    found = set(names)
    while more := {needed for name, needed in pairs if name in found} - found:
        found |= more
    return found


def verbs(folder: Path) -> set[str]:
    """The commands of the tool in a folder."""
    others = {path.stem.removesuffix("_command") for path in folder.glob("*_command.py")}
    own = {folder.name} if (folder / "command.py").exists() else set()
    return {verb.replace("_", "-") for verb in own | others}


def without(text: str, suffix: str, missing: set[str], commands: set[str]) -> str:
    """A text of the project, as it reads where these tools, with these commands, are missing."""
    if not missing:
        return text
    itself = ["`tools/`"] if there(TEMPLATE).keys() <= missing else []
    named = re.compile("|".join([rf"tools[./]({'|'.join(sorted(missing))})\b", *itself]))
    if suffix != ".md":
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if not named.search(line))

    def kept(match: re.Match[str]) -> str:
        return "" if named.search(match[0]) else match[0]

    blocks = []
    for block in BLOCK.findall(text):
        if block.startswith("```"):
            lines = block.splitlines(keepends=True)
            left = [line for line in lines if not is_of(line, commands)]
            is_empty = len(left) < len(lines) and not "".join(left[1:]).strip("`\n")
            blocks += [] if is_empty else left
        elif ITEM.match(block):
            left = ITEM.sub(kept, block)
            has_rows = not left.startswith("|") or left.count("\n|") > 1  # below its head
            blocks += [left] if left == block or has_rows else []
        else:
            blocks += [] if named.search(block) else [block]
    return "".join(blocks)


def is_of(line: str, commands: set[str]) -> bool:
    """Whether a line of a shell is one of these commands."""
    command = COMMAND.match(line)
    return command is not None and command[1] in commands
