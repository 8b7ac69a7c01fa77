"""`--config FILE`, which becomes flags, and the preset that needs the fewest of them."""

import re
from argparse import ArgumentError, ArgumentParser
from pathlib import Path
from typing import Any

from ...config import Config
from ...errors import UserError
from ...extensions import flag
from ...runtime.command_line import all_presets, take_preset
from ...runtime.config_dict import changed_knobs, unflatten, word, words_of
from .config_file import OF_ONE_RUN, is_of_run, read_knobs


def take_file(words: list[str], flags: list[str]) -> str:
    """The name for the run of a `--config FILE`, which `words` lose; empty without one.

    They get those of `flags` that the file sets, in front of the others, which win so; and if it is
    of a run and no preset is named, the closest one.

    Raises:
        UserError: if there is no such file, or it holds anything but options.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    try:
        found, words[:] = parser.parse_known_args(words)
    except ArgumentError as error:
        raise UserError("--config needs a file: runs/a/config.json, or one of your own") from error
    if not found.config:
        return ""
    if len(found.config) > 1:
        raise UserError(f"--config is one file, not {len(found.config)}: put them into one")
    path = Path(*found.config)
    knobs = read_knobs(path)
    start = int(bool(words) and not words[0].startswith("-"))  # behind the preset
    words[start:start] = words_of({k: v for k, v in knobs.items() if flag(k) in flags})
    if not is_of_run(knobs):
        return path.stem
    if not start:
        words.insert(0, closest_preset(unflatten(knobs))[0])
    return again(path)


def again(path: Path) -> str:
    """The name for another run of the config.json `path`, or of the run folder.

    After `a` comes `a-again`, then `a-again-2`.
    """
    whole = path.resolve()
    name = whole.parent.name if whole.name == "config.json" else whole.stem
    if found := re.fullmatch(r"(.+-again)(?:-(\d+))?", name):
        return f"{found[1]}-{int(found[2] or 1) + 1}"
    return f"{name}-again"


def closest_preset(config: Config) -> tuple[str, dict[str, Any]]:
    """The preset that needs the fewest flags to become `config`, and the knobs that they set."""
    found = {}
    for name in all_presets():
        _, preset = take_preset([name, "--epochs", word(config.epochs)], "")
        found[name] = changed_knobs(config, preset, without=OF_ONE_RUN)
    name = min(found, key=lambda name: len(words_of(found[name])))
    return name, found[name]
