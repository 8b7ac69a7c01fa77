"""What presets reach: top-1 on the validation images over several seeds, and the time it takes.

    python benchmarks/recipes.py --only shapes                        # what `make demo` trains
    python benchmarks/recipes.py --only cifar10_speed --cifar cifar
    python benchmarks/recipes.py --only folder --flowers flowers

Each is trained as a user would train it, by the command that the result shows; a seed is a round.
Images that can't be made on the spot are given by their folders: `--flowers` (train/ and val/ with
5 classes) and `--cifar` (CIFAR-10 as files: train/, and test/ under the name of val/). What
`finetune` reaches, `transfer.py` says.
`shapes:AVX2` is `shapes` on a CPU that has no more than that, as `ONEDNN_MAX_CPU_ISA` has it.

Prints and writes `results/recipes-<preset>.json` for each. The deviation is that of single runs,
not of their mean.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import measurements
import rounds

# A preset is its config, and what learns by it.
ABOUT = "augment data evaluate models optim precision presets pace parallel train"
ABOUT += " tools/cpu_precision tools/policies tools/progressive_resizing"
RECIPES = {
    "shapes": "shapes",
    "shapes:AVX512_CORE_BF16": "shapes",
    "shapes:AVX2": "shapes",
    "cifar10_speed": "cifar10_speed --data.name folder --data.root CIFAR",
    "folder": "folder --data.root FLOWERS",
}


def main() -> None:
    """Train all that can be, seed by seed, and write a result for each."""
    parser = rounds.parser(__doc__, rounds=3)
    for what in ("cifar", "flowers"):
        parser.add_argument(f"--{what}", type=Path, help=f"in place of {what.upper()}")
    parser.add_argument("--more", default="", help="words that every command ends with")
    given = parser.parse_args()
    if given.contender:
        rounds.give(contend, given)
        return
    known = [name for name, words in RECIPES.items() if not unknown(words, given)]
    results, failures = rounds.compare(__file__, known, given)
    for preset in dict.fromkeys(name.partition(":")[0] for name in [*results, *failures]):
        parts = [
            {name: row for name, row in part.items() if name.partition(":")[0] == preset}
            for part in (results, failures)
        ]
        measurements.write(
            given.results / f"recipes-{preset}.json",
            f"What `{preset}` reaches",
            f"`python train.py {' '.join([RECIPES[preset], given.more]).strip()}`, as often as "
            "there are rounds, with a seed each. Medians (lowest to highest).",
            measurements.measured(*parts),
        )


def unknown(words: str, given: argparse.Namespace) -> list[str]:
    """What stands for a path in `words`, and was not given."""
    return [word for word in words.split() if word.isupper() and not vars(given)[word.lower()]]


def contend(given: argparse.Namespace) -> dict[str, float]:
    """Train one preset with one seed, in a folder of its own."""
    words = RECIPES[given.contender].split()
    words += ["--seed", str(given.round)]
    with tempfile.TemporaryDirectory() as folder:
        begun = rounds.Reading.now()
        rows = train(words, given, Path(folder), given.contender.partition(":")[2])
        took = rounds.Reading.now().since(begun)
    return {
        "top1_percent": [100 * row["val/top1"] for row in rows if "val/top1" in row][-1],
        "minutes": took.seconds / 60,
        "cpu_minutes": took.cpu_seconds / 60,
    }


def train(
    words: list[str], given: argparse.Namespace, folder: Path, instructions: str = ""
) -> list[dict[str, float]]:
    """Run a command of `train.py`, with paths for what stands for them; its metrics.jsonl."""
    words = [str(vars(given)[word.lower()].resolve()) if word.isupper() else word for word in words]
    words += [*shlex.split(given.more), "--run.dir", "run"]
    environment = os.environ | {"PYTHONPATH": str(measurements.PROJECT / "src")}
    if instructions:
        environment["ONEDNN_MAX_CPU_ISA"] = instructions
    subprocess.run(
        [sys.executable, str(measurements.PROJECT / "train.py"), *words],
        cwd=folder,
        env=environment,
        stdout=sys.stderr,
        check=True,
    )
    return [json.loads(row) for row in Path(folder, "run", "metrics.jsonl").open()]


if __name__ == "__main__":
    main()
