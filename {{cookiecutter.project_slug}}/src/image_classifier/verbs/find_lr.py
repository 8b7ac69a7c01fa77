"""`find-lr`: a learning rate to begin with."""

from dataclasses import dataclass
from pathlib import Path

from ..attempt import run_in_processes
from ..config import Config
from ..parse import parse, sections, summary, take_preset


@dataclass(frozen=True)
class FindLrOptions(Config):
    """Which learning rates to try, and every knob of training."""

    low: float = 1e-5  # the first learning rate
    high: float = 10.0  # the last, if training does not diverge before
    steps: int = 200  # of training, each with a larger learning rate
    dir: str = "runs/find-lr"  # folder to write lr.svg and lr.json to


def find_lr_verb(words: list[str]) -> int:
    """Find a learning rate by trying small to large ones: `find-lr [PRESET] [--FLAG VALUE ...]`."""
    name, preset = take_preset(words, "shapes")
    default, about = FindLrOptions(**sections(preset)), summary(find_lr_verb)
    options = parse(FindLrOptions, words, prog=f"find-lr {name}", about=about, default=default)
    config = Config(**sections(options))

    def work() -> None:
        from ..find_lr import find_lr, growing

        rates = growing(options.low, options.high, options.steps)
        find_lr(config, f"python train.py {name}", Path(options.dir), rates)

    return run_in_processes(work, config.run, config.compute)
