"""`check`: an audit of the images."""

import sys
from dataclasses import asdict, dataclass, field
from typing import Literal

from ...config import (
    EXIT_DONE,
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    ComputeConfig,
    Config,
    DataConfig,
    RunConfig,
)
from ...runtime.command_line import PrepareData, command, parse, summary, take_images
from ...runtime.launch import run_in_processes


@dataclass(frozen=True)
class CheckOptions:
    """What to audit, and what to write."""

    data: PrepareData = field(default_factory=PrepareData)
    splits: tuple[Literal["train", "val", "test"], ...] = ()  # which images; default: all there are
    json: str = ""  # file to write everything to that was found
    quarantine: bool = False  # have training leave out what it should: a list in the cache folder


def main(words: list[str]) -> int:
    """Audit the images before training: `check [PRESET] --data.root FOLDER`."""
    name, images = take_images(words)
    default, about = CheckOptions(images), summary(main)
    prog = f"{command('check')} {name}"
    options = parse(CheckOptions, words, prog=prog, about=about, default=default)
    config = Config(data=DataConfig(**asdict(options.data)))
    serious = 0

    def work() -> None:
        nonlocal serious
        from .check import check

        serious = check(config.data, options.splits, options.json, options.quarantine)

    try:
        code = run_in_processes(work, RunConfig(processes=1), ComputeConfig(device="cpu"))
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code or (EXIT_FAULT if serious else EXIT_DONE)
