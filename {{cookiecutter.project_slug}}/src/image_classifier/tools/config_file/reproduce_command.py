"""`reproduce`: the command that trains a run again, and what differs today."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ...runtime.command_line import command, parse, summary
from ...runtime.launch import attempt


@dataclass(frozen=True)
class ReproduceOptions:
    """What to train again."""

    run: Annotated[str, tyro.conf.Positional]  # run folder


def main(words: list[str]) -> int:
    """Print the command that trains a run again, and what differs today: `reproduce RUN`."""
    options = parse(ReproduceOptions, words, prog=command("reproduce"), about=summary(main))

    def work() -> None:
        from .reproduce import reproduce

        reproduce(Path(options.run))

    return attempt(work)
