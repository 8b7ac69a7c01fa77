"""What ends a run with one line on the screen: users' mistakes, faults, and their exit codes."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")

# Exit codes. A run that a signal ended and that saved everything exits with 128 + the signal.
EXIT_DONE, EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
# Memory ran out, or another rank is gone, so start again at once; the time limit: "start me again".
EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST, EXIT_RESTART = 73, 74, 75

OF_TOOLS = "; more come with tools: see pretuned add"  # of commands, presets, datasets, ...


class UserError(ValueError):
    """A mistake that the user can correct: shown as one line, exit code 2."""


class FaultError(RuntimeError):
    """A fault around the run, such as a full disk or a killed process: shown as one line."""

    code = EXIT_FAULT  # exit code of the process


def is_peer_failure(error: Exception) -> bool:
    """Whether `error` only says that another rank is gone, which reports the reason itself."""
    # By the name of torch's class, as torch takes seconds to import.
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return "DistError" in kinds or "gloo/transport" in str(error)


def choose(what: str, name: str, table: Mapping[str, T], more: str = "") -> T:
    """The entry `name` of a table of `what`: models, datasets, commands; `more` ends the message.

    Raises:
        UserError: if there is none; it lists the names and suggests the closest one.
    """
    if name not in table:
        names = ", ".join(table)
        raise UserError(f"no {what} {name!r}; there are: {names}{did_you_mean(name, table)}{more}")
    return table[name]


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """`; did you mean a or b?` for the names in `known` that are most like `name`, or nothing."""
    near = get_close_matches(name, list(known), most)
    return f"; did you mean {' or '.join(near)}?" if near else ""
