"""`find-batch`: find the batch size that fits into memory, and the one that is fast enough."""

import shlex
from dataclasses import dataclass, replace

from ...config import Config
from ...extensions import within
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.config_dict import flatten, sections, words_of
from ...runtime.launch import num_processes, run_in_processes

RESULT_IS_IN_FILES = True


@dataclass(frozen=True)
class FindBatchOptions(Config):
    """Which sizes to try, and every knob of training."""

    at_most: int = within(0, 0)  # largest micro-batch to try; 0: a process's share of all images


def main(words: list[str]) -> int:
    """Find the largest micro-batch and the fastest: `find-batch [PRESET] [--FLAG VALUE ...]`."""
    name, preset = take_preset(words, "shapes", "runs/find-batch")
    default = FindBatchOptions(**sections(preset))
    about = summary(main)
    prog = f"{command('find-batch')} {name}"
    options = parse(FindBatchOptions, words, prog=prog, about=about, default=default)
    config = Config(**sections(options))

    def training(**knobs: object) -> str:
        """The command line that trains with other values of some knobs."""
        own = {"run.dir": config.run.dir, "run.fresh": config.run.fresh}  # of the measurement
        as_made = flatten(preset) | own
        values = flatten(config) | {key.replace("__", "."): value for key, value in knobs.items()}
        changed = {knob: value for knob, value in values.items() if value != as_made[knob]}
        return shlex.join(["python", "train.py", name, *words_of(changed)])

    def work() -> None:
        from .find_batch import find_batch

        find_batch(config, training, options.at_most, num_processes(config.run, config.compute))

    return run_in_processes(work, replace(config.run, processes=1), config.compute)
