"""Words of a command line to options, and a mistake in them to a line that says what is right."""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import tyro

from .config import Config, UserError, out_of_range
from .presets import PRESETS


def parse(
    kind: type,
    words: list[str],
    prog: str,
    about: str,
    default: Any = tyro.MISSING_NONPROP,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """`words` as an instance of `kind`.

    Raises:
        UserError: if they can't be; tyro's account of it in one line.
    """
    if {"-h", "--help"} & set(words):
        return tyro.cli(kind, default=default, args=words, prog=prog, description=about)
    account = io.StringIO()
    try:
        with contextlib.redirect_stdout(account), contextlib.redirect_stderr(account):
            return tyro.cli(kind, default=default, args=words, prog=prog)
    except SystemExit:
        pass
    _, message, *rest = re.split(r"\n *[-─]{8,} *\n?", account.getvalue())
    message = " ".join(message.split()).removeprefix(f"Error parsing {kind.__name__}: ")
    near = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", " ".join(rest))
    raise UserError(message + (f"; did you mean {near[1]}?" if near else ""))


def check_ranges(options: object, **ranges: tuple[float, float]) -> None:
    """Refuse options that no verb can follow: least and largest value by name.

    Raises:
        UserError: naming the first.
    """
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if value != "auto" and not low <= value <= high:
            raise out_of_range(name, value, f"{low} .. {high}")


def sections(options: Config) -> dict[str, Any]:
    """What a config has, of options that have more, or to make such options of."""
    return {knob.name: getattr(options, knob.name) for knob in fields(Config)}


def take_preset(words: list[str], otherwise: str) -> tuple[str, Config]:
    """The preset that `words` begin with, which is taken from them, or another: name and config.

    Raises:
        UserError: if there is none of that name.
    """
    name = words.pop(0) if words and not words[0].startswith("-") else otherwise
    return name, choose("preset", name, PRESETS)()


def choose(what: str, name: str, table: dict[str, Callable]) -> Callable:
    """The entry `name` of a table.

    Raises:
        UserError: if there is none; it says which there are.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"no {what} {name!r}; there are: {', '.join(table)}{hint}")


def summary(function: Callable) -> str:
    """The first line of a function's docstring."""
    return (function.__doc__ or "").splitlines()[0]
