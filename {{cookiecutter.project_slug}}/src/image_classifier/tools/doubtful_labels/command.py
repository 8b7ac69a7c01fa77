"""`doubtful-labels`: which images probably have a wrong label."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from ...extensions import need_tool, within
from ...runtime.command_line import command, parse, summary
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class DoubtfulLabelsOptions:
    """What to look at, and how many images to call mislabeled."""

    runs: Annotated[str, tyro.conf.Positional]  # the folder of a `cross-validate`
    share: float = within(0.08, 0, 1)  # largest share of the images to call mislabeled
    quarantine: bool = False  # exclude them from training: look at them first


def main(words: list[str]) -> int:
    """Find images that probably have a wrong label: `doubtful-labels RUNS [--quarantine]`."""
    verb = command("doubtful-labels")
    options = parse(DoubtfulLabelsOptions, words, prog=verb, about=summary(main))

    def work() -> None:
        need_tool("saved_runs", "runs", "doubtful-labels")
        need_tool("cross_validate", "cross-validate", "doubtful-labels")
        from .doubtful_labels import find_doubtful_labels

        find_doubtful_labels(options.runs, options.share, options.quarantine, verb)

    return attempt(work)
