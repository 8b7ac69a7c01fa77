"""`train`: the run that a preset and the words after it describe."""

import os
from dataclasses import replace

from ..attempt import RESTARTS, run_in_processes
from ..config import Config
from ..parse import command, parse, summary, take_preset
from ..presets import PRESETS


def train_verb(words: list[str]) -> int:
    """Train: `train [PRESET] [--FLAG VALUE ...]`; the same command continues a run."""
    name, preset = take_preset(words, "shapes")
    preset = replace(preset, run=replace(preset.run, dir=f"runs/{name}"))
    width = max(map(len, PRESETS))
    presets = "\n".join(f"  {key:<{width}}  {summary(make)}" for key, make in PRESETS.items())
    about = f"Train. Presets, of which this is `{name}`:\n\n{presets}"
    config = parse(Config, words, prog=f"{command('train')} {name}", about=about, default=preset)

    def work() -> None:
        from ..train import train

        is_restart = any(os.environ.get(name, "0") != "0" for name in RESTARTS)
        fresh = config.run.fresh and not is_restart
        train(replace(config, run=replace(config.run, fresh=fresh)))

    return run_in_processes(work, config.run, config.compute)
