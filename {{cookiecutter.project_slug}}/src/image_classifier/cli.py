"""The command line: words to a config, the processes that it needs, and one line for a mistake.

The words are understood before torch is imported, so that `--help` and a typo answer at once.
"""

import contextlib
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import tyro

from .config import ComputeConfig, Config, RunConfig, UserError
from .presets import PRESETS

DONE, FAULT, MISTAKE, INTERRUPTED = 0, 1, 2, 130  # exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(overview())
            return DONE
        return choose("verb", words[0], VERBS)(words[1:])
    except UserError as mistake:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(1)  # rank 0 says the same first, if it is of the same opinion
        print(f"error: {mistake}", file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted: the same command goes on from the last save", file=sys.stderr)
        return INTERRUPTED


def train_verb(words: list[str]) -> int:
    """Train: `train [PRESET] [--FLAG VALUE ...]`; the same command continues a run."""
    name = words.pop(0) if words and not words[0].startswith("-") else "shapes"
    preset = choose("preset", name, PRESETS)()
    preset = replace(preset, run=replace(preset.run, dir=f"runs/{name}"))
    presets = "\n".join(f"  {key:<9}{summary(make)}" for key, make in PRESETS.items())
    about = f"Train. Presets, of which this is `{name}`:\n\n{presets}"
    config = parse(Config, words, prog=f"train.py {name}", about=about, default=preset)

    def work() -> None:
        from .train import train

        train(config)

    return run_in_processes(work, config.run, config.compute)


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate."""

    run: Annotated[str, tyro.conf.Positional]  # run folder, or a checkpoint in one
    split: Literal["val", "test", "train"] = "val"  # images to evaluate on
    root: str = ""  # folder of the images, where it is not the one of the training
    processes: int | Literal["auto"] = "auto"  # one per GPU by default
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: an accelerator if there is one


def evaluate_verb(words: list[str]) -> int:
    """Evaluate the best weights of a run: `evaluate RUN [--split test]`."""
    options = parse(EvaluateOptions, words, prog="evaluate", about="Evaluate a run.")
    compute = ComputeConfig(device=options.device)

    def work() -> None:
        from .evaluate import evaluate_run

        evaluate_run(options.run, options.split, options.root, compute)

    return run_in_processes(work, RunConfig(processes=options.processes), compute)


VERBS: dict[str, Callable[[list[str]], int]] = {"train": train_verb, "evaluate": evaluate_verb}


def run_in_processes(work: Callable[[], None], run: RunConfig, compute: ComputeConfig) -> int:
    """Do `work` here, or in as many processes as the config asks for; return the exit code."""
    from .distributed import is_echo, is_launched, launch, num_processes

    if not is_launched():
        processes = num_processes(run, compute)
        if processes > 1:
            return launch(processes)
    try:
        work()
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        rank = os.environ.get("RANK")
        where = f" on rank {rank}" if rank else ""
        account = traceback.format_exc()
        if is_echo(error):
            time.sleep(10)  # until the rank that has gone has said why, and all are stopped
            account = "the connection to another rank is lost"
        # In one piece, so that the accounts of several ranks do not mix.
        print(f"{account}\nfailed{where}", file=sys.stderr)
        return FAULT
    return DONE


def parse(
    kind: type,
    words: list[str],
    prog: str,
    about: str,
    default: Any = tyro.MISSING_NONPROP,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """`words` as an instance of `kind`.

    Raises:
        UserError: if they can't be; tyro's account of it in one line.
    """
    if {"-h", "--help"} & set(words):
        return tyro.cli(kind, default=default, args=words, prog=prog, description=about)
    account = io.StringIO()
    try:
        with contextlib.redirect_stdout(account), contextlib.redirect_stderr(account):
            return tyro.cli(kind, default=default, args=words, prog=prog)
    except SystemExit:
        pass
    _, message, *rest = re.split(r"\n *[-─]{8,} *\n?", account.getvalue())
    message = " ".join(message.split()).removeprefix(f"Error parsing {kind.__name__}: ")
    near = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", " ".join(rest))
    raise UserError(message + (f"; did you mean {near[1]}?" if near else ""))


def choose(what: str, name: str, table: dict[str, Callable]) -> Callable:
    """The entry `name` of a table.

    Raises:
        UserError: if there is none; it says which there are.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"no {what} {name!r}; there are: {', '.join(table)}{hint}")


def overview() -> str:
    """The verbs and what they do."""
    lines = [f"  {name:<10}{summary(verb)}" for name, verb in VERBS.items()]
    return "\n".join(["verbs, each with a --help of its own:", "", *lines])


def summary(function: Callable) -> str:
    """The first line of a function's docstring."""
    return (function.__doc__ or "").splitlines()[0]
