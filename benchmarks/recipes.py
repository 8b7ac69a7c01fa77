"""What presets reach: top-1 on the validation images over several seeds, and the time it takes.

Each is trained as a user would train it, by the command that the table shows; a seed is a round.
Images that can't be made on the spot are given by their folders: `--flowers` (train/ and val/ with
5 classes) and `--cifar` (CIFAR-10 as files: train/, and test/ under the name of val/). What starts
from weights takes them from `--weights`. The deviation is that of single runs, not of their mean.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from rounds import PROJECT, Reading, compare, give, missing, parser, table, write

RECIPES = {
    "shapes": "shapes",
    "cifar10_speed": "cifar10_speed --data.name folder --data.root CIFAR",
    "folder": "folder --data.root FLOWERS",
    "finetune": "finetune --data.root FLOWERS --run.init-from WEIGHTS",
}


def main() -> None:
    """Train all, seed by seed, and write the table."""
    options = parser(__doc__, rounds=3)
    for what in ("cifar", "flowers", "weights"):
        options.add_argument(f"--{what}", type=Path, help=f"in place of {what.upper()}")
    options.add_argument("--more", default="", help="words that every command ends with")
    given = options.parse_args()
    if given.contender:
        give(train, given)
        return
    known = [name for name, words in RECIPES.items() if not unknown(words, given)]
    results, failures = compare(sys.argv[0], known, given)
    rows = []
    for name, runs in results.items():
        top1 = [100 * run["top1"] for run in runs]
        deviation = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
        rows.append(
            (
                f"`python train.py {RECIPES[name]}`",
                f"{statistics.mean(top1):.2f}{deviation}",
                str(len(top1)),
                f"{statistics.median(run['minutes'] for run in runs):.1f}",
                f"{statistics.median(run['cpu_minutes'] for run in runs):.1f}",
            )
        )
    heads = ("command", "top-1, % (mean ± sd)", "seeds", "minutes", "CPU minutes")
    name = "-".join(["recipes", *(given.only or [])])
    write(given.results, name, "What presets reach", table(heads, rows), missing(failures))


def unknown(words: str, given: Namespace) -> list[str]:
    """What stands for a path in `words`, and was not given."""
    return [word for word in words.split() if word.isupper() and not vars(given)[word.lower()]]


def train(given: Namespace) -> dict[str, float]:
    """Train one preset with one seed."""
    words = [
        str(vars(given)[word.lower()].resolve()) if word.isupper() else word
        for word in RECIPES[given.contender].split()
    ]
    with tempfile.TemporaryDirectory() as folder:
        more = ["--seed", str(given.round), "--run.dir", folder, *shlex.split(given.more)]
        begun = Reading.now()
        subprocess.run(
            [sys.executable, "train.py", *words, *more],
            cwd=PROJECT,
            env=os.environ | {"PYTHONPATH": str(PROJECT / "src")},
            stdout=sys.stderr,
            check=True,
        )
        took = Reading.now().since(begun)
        rows = [json.loads(row) for row in (Path(folder) / "metrics.jsonl").open()]
    return {
        "top1": [row["val/top1"] for row in rows if "val/top1" in row][-1],
        "minutes": took.seconds / 60,
        "cpu_minutes": took.cpu_seconds / 60,
    }


if __name__ == "__main__":
    main()
