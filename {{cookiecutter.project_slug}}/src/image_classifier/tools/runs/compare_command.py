"""`compare`: compare runs."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from ...runtime.command_line import command, parse, summary
from ...runtime.launch import attempt


@dataclass(frozen=True)
class CompareOptions:
    """What to compare."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]  # run folders, or folders of runs


def main(words: list[str]) -> int:
    """Compare runs, and tell differences from chance: `compare RUN RUN [...]`."""
    options = parse(CompareOptions, words, prog=command("compare"), about=summary(main))

    def work() -> None:
        from .compare import compare

        compare(options.runs)

    return attempt(work)
