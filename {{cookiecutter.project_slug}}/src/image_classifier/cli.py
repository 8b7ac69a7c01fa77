"""The command line: a verb, what it did, and one line for a mistake.

Words are understood before torch is imported, so that `--help` and a typo answer at once.
"""

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .attempt import DONE, FAULT, INTERRUPTED, MISTAKE
from .config import UserError
from .console import lasting_output
from .parse import HELP, choose, command, summary
from .printable import printable
from .verbs import VERBS

# Verbs whose result is in files: they have done their work also where what they print is lost.
WRITING = (["train"], ["prepare"], ["export"], ["find-lr"])
ASKING = HELP | {"--version"}  # words with which no verb does anything


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    trains = words[:1] == ["train"] and not ASKING & set(words)
    promise = "; the run goes on, metrics.jsonl has all" if trains else ""
    with lasting_output(promise) as output:
        code = obey(words)
    is_lost = output.error is not None and words[:1] not in WRITING
    return FAULT if is_lost and code == DONE else code


def obey(words: list[str]) -> int:
    """What the verb that `words` begin with returns, or the exit code of what ended it."""
    try:
        if not words or words[0] in HELP:
            print(overview())
            return DONE
        if "--version" in words[:2]:  # behind `train` too, which is train.py's word
            print(versions())
            return DONE
        return choose("verb", words[0], VERBS)(words[1:])
    except UserError as mistake:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(1)  # rank 0 says the same first, if it is of the same opinion
        print(f"error: {printable(str(mistake))}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted: the same command goes on from the last save", file=sys.stderr)
        return INTERRUPTED


def overview() -> str:
    """What to type first, and the verbs with what they do."""
    train, width = command("train"), max(map(len, VERBS))
    root = f"{train} --data.root photos"
    return "\n".join(
        [
            "To begin:",
            "",
            f"  {train:<{len(root)}}  train on shapes that are drawn on the spot",
            f"  {root}  train on your own images: photos/<class>/1.jpg",
            "",
            "Verbs, each with a --help of its own:",
            "",
            *(f"  {name:<{width}}  {summary(verb)}" for name, verb in VERBS.items()),
        ]
    )


def versions() -> str:
    """The versions of this project, of torch, which is not imported for that, and of Python."""
    from importlib.metadata import entry_points, version

    package = __name__.partition(".")[0]
    scripts = entry_points(group="console_scripts")
    mine = [script.dist for script in scripts if script.module.partition(".")[0] == package]
    known = [f"{found.name} {found.version}" for found in mine if found is not None]
    name = known[0] if known else f"{Path(sys.argv[0]).name}, not installed"
    return f"{name}; torch {version('torch')}; Python {platform.python_version()}"
