"""`bench`: measure what each performance tip gains."""

import sys
from dataclasses import dataclass

from ...config import Config
from ...errors import FaultError
from ...runtime.command_line import command, parse, summary, take_preset
from ...runtime.config_dict import sections
from ...runtime.launch import attempt

RESULT_IS_IN_FILES = True  # except the page of --tips


@dataclass(frozen=True)
class BenchOptions(Config):
    """What to measure, and every knob of training."""

    quick: bool = False  # less than 2 minutes in all, and less exact
    rows: tuple[str, ...] = ()  # only these tips, by the names that --tips prints
    leave_out: bool = False  # then leave each tip out of the best setting, which takes as long
    tips: bool = False  # print the page of tips and measure nothing


def main(words: list[str]) -> int:
    """Measure what each performance tip gains here: `bench [PRESET] [--quick]`."""
    name, preset = take_preset(words, "shapes", "runs/bench")
    prog = f"{command('bench')} {name}"
    options = parse(BenchOptions, words, prog, summary(main), BenchOptions(**sections(preset)))
    config = Config(**sections(options))

    def work() -> None:
        from .bench import bench
        from .measure import FULL, QUICK
        from .tips import page

        if options.tips:
            print(page(), end="", flush=True)
            if getattr(sys.stdout, "error", None):
                raise FaultError  # standard output has said why
            return
        budget = QUICK if options.quick else FULL
        bench(config, preset, f"python train.py {name}", options.rows, budget, options.leave_out)

    return attempt(work)
