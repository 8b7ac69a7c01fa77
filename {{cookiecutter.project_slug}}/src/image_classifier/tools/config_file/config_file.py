"""Files of options: the config.json of a run, and one's own, as JSON, TOML or YAML."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...config import Config
from ...errors import UserError
from ...extensions import flag, of_tools
from ...runtime.command_line import check_flags, flags_of, parse
from ...runtime.config_dict import flatten, is_used, words_of
from ...runtime.files import read_plain
from ...runtime.platform import install_command

# Where a run lives, and that it starts over, is said by the command: a file serves several runs.
OF_ONE_RUN = ("run.dir", "run.fresh", "config")


class Knobs(Config):
    """Options each by itself: what contradicts another one may be mended by a flag."""

    def __post_init__(self) -> None:
        """Check nothing: `parse` checks the ranges."""


def read_knobs(path: Path) -> dict[str, Any]:
    """The options in a file by their dotted names; all, if it is the config.json of a run.

    Those of a run have no `run.dir`. What they lack is as by default: a run writes down no option
    of a tool that it doesn't use. Options of tools that are not here are left out if unused.

    Raises:
        UserError: if the file can't be read, or holds anything but options.
    """
    path = path / "config.json" if path.is_dir() else path
    known = flatten(Config())
    knobs = {k: v for k, v in in_file(path).items() if k in known or is_used(k, v)}
    try:
        if is_of_run(knobs):
            knobs = known | knobs
            knobs = {knob: value for knob, value in knobs.items() if knob not in OF_ONE_RUN}
        check_flags([f"--{flag(knob)}" for knob in knobs], flags_of(Config))
        for knob, value in knobs.items():
            check_kind(knob, value, known.get(knob, ""))
        parse(Knobs, words_of(knobs), prog="", about="")
    except UserError as error:
        raise UserError(f"{str(path)!a}: {error}") from error
    return knobs


def is_of_run(knobs: dict[str, Any]) -> bool:
    """Whether these are the options of a run, which writes down all: of old ones, the most."""
    of_core = flatten(Config()).keys() - of_tools().keys()
    return 2 * len(of_core & knobs.keys()) > len(of_core)


def check_kind(knob: str, value: object, usual: object) -> None:
    """Check that the value of a knob is of the kind that its `usual` one is of.

    Raises:
        UserError: if it is not.
    """
    if knob in OF_ONE_RUN:
        raise UserError(f"{knob} belongs on the command line: a file may serve several runs")
    if isinstance(usual, bool):
        is_right = isinstance(value, bool)
        wanted = "true or false"
    elif isinstance(usual, tuple):
        values = value if isinstance(value, list | tuple) else [None]
        is_right = all(isinstance(v, str) and not v.startswith("-") for v in values)
        wanted = "a list of words that are no flags"
    else:
        is_right = isinstance(value, str | int | float) and not isinstance(value, bool)
        wanted = "a number or a word"
    if not is_right:
        raise UserError(f"{knob} should be {wanted}, not of type {type(value).__name__}")


def in_file(path: Path) -> dict[str, Any]:
    """What a file holds, by dotted names: `optim.lr`, or `lr` in a section `optim`.

    Raises:
        UserError: if it can't be read, or holds no sections or names with values.
    """
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise UserError(f"{str(path)!a} should be called {', '.join(f'*{s}' for s in READERS)}")
    try:
        content = READERS[suffix](read_plain(path).decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read the config file {str(path)!a}: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{str(path)!a} is not {suffix[1:].upper()}: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!a} holds no options by name, such as {{'optim.lr': 0.3}}")
    flat = {}
    for name, value in content.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{knob}": inner for knob, inner in value.items()}
        else:
            flat[str(name)] = value
    return {name.replace("-", "_"): value for name, value in flat.items()}


def read_yaml(text: str) -> object:
    """The content of a YAML file.

    Raises:
        ValueError: if it is none.
        UserError: if there is no PyYAML.
    """
    try:
        import yaml
    except ImportError as error:
        raise UserError(f"YAML needs a library: {install_command('pyyaml')}") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": read_yaml,
    ".yml": read_yaml,
}
