"""`find-lr`: find a learning rate to start with."""

import shlex
from dataclasses import dataclass, replace

from ...config import Config
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.config_dict import changed_knobs, sections, words_of
from ...runtime.launch import of_this_start, run_in_processes

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class FindLrOptions(Config):
    """Which learning rates to try, and every knob of training."""

    low: float = 1e-5  # first learning rate
    high: float = 10.0  # last learning rate; the test ends earlier if training diverges
    steps: int = 200  # training steps, each with a larger learning rate


def main(words: list[str]) -> int:
    """Find a learning rate with a range test: `find-lr [PRESET] [--FLAG VALUE ...]`."""
    name, preset = take_preset(words, "shapes", "runs/find-lr")
    default = FindLrOptions(**sections(preset))
    about = summary(main)
    prog = f"{command('find-lr')} {name}"
    options = parse(FindLrOptions, words, prog=prog, about=about, default=default)
    config = Config(**sections(options))
    own = {"optim.lr", "run.dir", "run.fresh"}  # of the test
    changed = changed_knobs(config, preset, own)
    training = shlex.join(["python", "train.py", name, *words_of(changed)])

    def work() -> None:
        from .find_lr import find_lr, geometric_lrs

        lrs = geometric_lrs(options.low, options.high, options.steps)
        find_lr(replace(config, run=of_this_start(config.run)), training, lrs)

    return run_in_processes(work, config.run, config.compute)
