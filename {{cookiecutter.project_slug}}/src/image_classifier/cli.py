"""The command line: a verb, what it did, and one line for a mistake.

Words are understood before torch is imported, so that `--help` and a typo answer at once.
"""

import os
import sys
import time
from collections.abc import Sequence

from .attempt import DONE, FAULT, INTERRUPTED, MISTAKE
from .config import UserError
from .console import lasting_output
from .parse import choose, summary
from .printable import printable
from .verbs import VERBS

# Verbs whose result is in files: they have done their work also where what they print is lost.
WRITING = (["train"], ["prepare"], ["export"], ["find-lr"])


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    promise = "; the run goes on, metrics.jsonl has all" if words[:1] == ["train"] else ""
    with lasting_output(promise) as output:
        code = obey(words)
    is_lost = output.error is not None and words[:1] not in WRITING
    return FAULT if is_lost and code == DONE else code


def obey(words: list[str]) -> int:
    """What the verb that `words` begin with returns, or the exit code of what ended it."""
    try:
        if not words or words[0] in ("-h", "--help"):
            print(overview())
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
    """The verbs and what they do."""
    lines = [f"  {name:<10}{summary(verb)}" for name, verb in VERBS.items()]
    return "\n".join(["verbs, each with a --help of its own:", "", *lines])
