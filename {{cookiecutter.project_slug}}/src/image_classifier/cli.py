"""The command line: `train` and the tools, each with one line for a user's mistake.

Arguments are parsed before torch is imported, so that `--help` and a typo answer at once.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from .config import Config
from .errors import EXIT_DONE, EXIT_FAULT, EXIT_INTERRUPTED, EXIT_USAGE, OF_TOOLS, UserError, choose
from .extensions import find_commands, joined
from .runtime.command_line import HELP, all_presets, command, parse, summary, take_preset
from .runtime.console import lasting_output, printable
from .runtime.launch import end_in_group, of_this_start, run_in_processes


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    promise = "; the run goes on, metrics.jsonl has all" if words[:1] == ["train"] else ""
    with lasting_output(promise) as output:
        code = dispatch(words)
    end_in_group(code)
    if output.error is None or code != EXIT_DONE or words[:1] == ["train"]:
        return code
    tool = find_commands().get("".join(words[:1]))
    given = (True, *(word.partition("=")[0] for word in words))
    return EXIT_DONE if getattr(tool, "RESULT_IS_IN_FILES", False) in given else EXIT_FAULT


def dispatch(words: list[str]) -> int:
    """Run the command that `words` begin with: its exit code, or that of what ended it."""
    try:
        if not words or words[0] in HELP:
            print(overview())
            return EXIT_DONE
        if "--version" in words[:2]:  # behind `train` too, which is train.py's word
            print(versions())
            return EXIT_DONE
        return choose("command", words[0], commands(), OF_TOOLS)(words[1:])
    except UserError as mistake:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(1)  # rank 0 says the same first, if it is of the same opinion
        print(f"error: {printable(str(mistake))}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted: what was saved is kept; run the command again", file=sys.stderr)
        return EXIT_INTERRUPTED


def commands() -> dict[str, Callable[[list[str]], int]]:
    """Every command by name: `train`, and those of the tools that are there."""
    return joined("command", {"train": train}, {n: m.main for n, m in find_commands().items()})


def train(words: list[str]) -> int:
    """Train: `train [PRESET] [--FLAG VALUE ...]`; the same command continues a run."""
    if words and words[0] in find_commands():
        name = own.name if (own := script()) else "the command line that pyproject.toml names"
        raise UserError(f"{words[0]} is a command of its own: {name} {words[0]}")
    name, preset = take_preset(words, "shapes", "runs/{}")
    about = f"Train. Presets, of which this is `{name}`:\n\n{summaries(all_presets())}"
    config = parse(Config, words, prog=f"{command('train')} {name}", about=about, default=preset)

    def work() -> None:
        from .train import train

        train(replace(config, run=of_this_start(config.run)))

    return run_in_processes(work, config.run, config.compute)


def overview() -> str:
    """What to type first, and the verbs with what they do."""
    train = command("train")
    root = f"{train} --data.root photos"
    return (
        f"To begin:\n\n  {train:<{len(root)}}  train on shapes that are drawn on the spot\n"
        f"  {root}  fine-tune on your own images: photos/<class>/1.jpg\n\n"
        f"Commands, each with a --help of its own:\n\n{summaries(commands())}"
    )


def summaries(functions: dict[str, Callable]) -> str:
    """A line for each of `functions`: its name, and the first line of its docstring."""
    width = max(map(len, functions))
    return "\n".join(f"  {name:<{width}}  {summary(one)}" for name, one in functions.items())


def versions() -> str:
    """The versions of this project, of torch, which is not imported for that, and of Python."""
    own = script()
    program = Path(sys.argv[0]).name
    name = f"{own.dist.name} {own.dist.version}" if own else f"{program}, not installed"
    return f"{name}; torch {metadata.version('torch')}; Python {platform.python_version()}"


def script() -> metadata.EntryPoint | None:
    """The program that came with the installation of this project; None if there was none."""
    found = metadata.entry_points(group="console_scripts")
    return next((one for one in found if one.module.partition(".")[0] == __package__), None)
