"""`probe`: the last layer of a trained network, fitted to new images; a run without epochs."""

from dataclasses import replace

from ...config import Config
from ...errors import UserError
from ...runtime.command_line import command, parse, summary, take_preset, value_of
from ...runtime.launch import of_this_start, run_in_processes

RESULT_IS_IN_FILES = True
OTHERWISE = "finetune"  # the preset if none is named: it has trained weights


def main(words: list[str]) -> int:
    """Fit only a new last layer, in seconds: `probe [PRESET] --data.root FOLDER [--FLAG VALUE]`."""
    if value_of(words, "--epochs").strip("0."):
        raise UserError("probe fits only the last layer: leave out --epochs")
    flags = int(bool(words) and not words[0].startswith("-"))  # where they begin
    words[flags:flags] = ["--epochs", "0"]
    name, preset = take_preset(words, OTHERWISE, "runs/probe/{}")
    prog = f"{command('probe')} {name}"
    config = parse(Config, words, prog=prog, about=summary(main), default=preset)

    def work() -> None:
        from ...train import train

        train(replace(config, run=of_this_start(config.run)))

    return run_in_processes(work, config.run, config.compute)
