"""Modules of tools, by the names of their files."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from ..errors import UserError

T = TypeVar("T")


@cache
def find_tools(module: str) -> dict[str, ModuleType]:
    """The modules `tools/<name>/<module>.py` that are there, by the tool's name: `find-lr`."""
    return {name: import_file(path) for name, path in paths_of(module).items()}


def paths_of(module: str) -> dict[str, Path]:
    """The files of these modules, which are not imported, by the tool's name."""
    return {p.parent.name.replace("_", "-"): p for p in find_files(f"*/{module}.py")}


def find_commands() -> dict[str, ModuleType]:
    """The modules of the commands that are there, by the names of the commands, in their order."""
    files = {path.parent.name: path for path in find_files("*/command.py")}
    more = {path.stem.removesuffix("_command"): path for path in find_files("*/*_command.py")}
    files = joined("command", files, more)
    return {name.replace("_", "-"): import_file(files[name]) for name in sorted(files)}


def find_files(pattern: str) -> list[Path]:
    """The files in `tools/` whose paths there match a pattern, in the order of the paths."""
    tools = find_spec("..tools", __package__)
    folders = (tools and tools.submodule_search_locations) or ()
    return [path for folder in folders for path in sorted(Path(folder).glob(pattern))]


def import_file(path: Path) -> ModuleType:
    """The module in the file `path` of a tool."""
    return import_module(f"..tools.{path.parent.name}.{path.stem}", __package__)


def functions(module: str, name: str) -> list[Callable]:
    """The functions `name` of all `tools/*/<module>.py` that have one, in the order of tools."""
    return [getattr(t, name) for t in find_tools(module).values() if hasattr(t, name)]


def chained(module: str, name: str, value: T, *others: object) -> T:
    """`value` after each of `functions` has made another of it; UserError if one returns none."""
    for change in functions(module, name):
        changed = change(value, *others)
        if changed is None and value is not None:
            raise UserError(f"{change.__module__}.{name} gave None, not a {type(value).__name__}")
        value = changed
    return value


def joined(kind: str, known: dict[str, T], *others: dict[str, T]) -> dict[str, T]:
    """All of these tables together; UserError for a name that two of them have."""
    found = dict(known)
    for table in others:
        if twice := sorted(found.keys() & table.keys()):
            raise UserError(
                f"a tool adds the {kind} {twice[0]}, which is there: rename it in "
                f"{getattr(table[twice[0]], '__module__', 'that tool')}"
            )
        found |= table
    return found


def function(module: str, name: str) -> Callable | None:
    """The first of `functions`; None if there is none."""
    return next(iter(functions(module, name)), None)


def find_tool(module: str, name: str) -> ModuleType | None:
    """The module `tools/<name>/<module>.py`; None if it was deleted."""
    return find_tools(module).get(name)


def need_tool(module: str, name: str, what: str) -> ModuleType:
    """Find `tools/<name>/<module>.py`, which `what` needs, or raise `UserError`."""
    if (found := find_tool(module, name)) is None:
        raise UserError(f"{what} needs a tool that is not here: pretuned add {name}")
    return found
