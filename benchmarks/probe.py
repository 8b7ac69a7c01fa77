"""Trained weights against none: a last layer on frozen features, and training from scratch.

    python benchmarks/probe.py --flowers flowers --cifar cifar
    python benchmarks/probe.py --flowers flowers --weights weights.pt --only probe

`folder` is `train.py folder`, and `probe` the command of that name with the same network, a seed a
round. The weights of `probe` are stand-ins for downloaded ones: they have seen CIFAR-10 (`--cifar`:
train/, and test/ under the name of val/) at its 32 pixels, for 8 epochs with the round's seed.
Their training is not part of the time; `--weights` gives others.

Prints and writes `results/probe.json`. The deviation is that of single runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import recipes
import record
import rounds

ABOUT = "augment data evaluate models optim precision presets tools/features tools/probe train"
# Without label smoothing, as it costs features what other classes need of them:
# https://arxiv.org/abs/2010.16402
WEIGHTS = "cifar10_speed --data.name folder --data.root CIFAR --epochs 8"
WEIGHTS += " --optim.label-smoothing 0 --run.evaluate-every-epochs 8"
COMMANDS = {
    "folder": "folder --data.root FLOWERS",
    "probe": "cifar10_speed --data.name folder --data.root FLOWERS --data.image-size 64 "
    "--augment.min-size 0 --data.batch-size 50 --run.init-from WEIGHTS",
}


def main() -> None:
    """Run both as often as there are rounds, and write the result."""
    parser = rounds.parser(__doc__, rounds=3)
    for what in ("cifar", "flowers", "weights"):
        parser.add_argument(f"--{what}", type=Path, help=f"in place of {what.upper()}")
    given = parser.parse_args()
    given.more = ""
    if given.contender:
        rounds.give(contend, given)
        return
    results, failures = rounds.compare(__file__, COMMANDS, given)
    for row, scratch in zip(results.get("probe", []), results.get("folder", []), strict=False):
        row["points above folder"] = row["top1_percent"] - scratch["top1_percent"]
    record.relate(results, "minutes", ["probe"], "folder")
    record.write(
        given.results / "probe.json",
        "A probe of trained weights, and training from scratch",
        f"`train.py {COMMANDS['folder']}` and `image-classifier probe {COMMANDS['probe']}`, as "
        "often as there are rounds, with a seed each. Medians (lowest to highest).",
        record.measured(results, failures, goals(results)),
    )


def goals(results: record.Results) -> list[dict[str, object]]:
    """What is asked of each seed."""
    return [
        record.goal(what, asked, [row[key] for row in results.get("probe", []) if key in row])
        for what, asked, key in (
            (
                "points of top-1 of a probe above training from scratch",
                ">= 0.01",
                "points above folder",
            ),
            ("time of a probe, of that of training from scratch", "<= 0.2", "minutes x folder"),
        )
    ]


def contend(given: argparse.Namespace) -> dict[str, float]:
    """Train or probe once, in a folder of its own."""
    seed = ["--seed", str(given.round)]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        if given.contender == "probe" and not given.weights:
            (here / "weights").mkdir()
            recipes.train([*WEIGHTS.split(), *seed], given, here / "weights")
            given.weights = here / "weights/run/checkpoints/best.pt"
        words = [*COMMANDS[given.contender].split(), *seed]
        begun = rounds.Reading.now()
        train = probe if given.contender == "probe" else recipes.train
        rows = train(words, given, here)
        took = rounds.Reading.now().since(begun)
    return {
        "top1_percent": [100 * row["val/top1"] for row in rows if "val/top1" in row][-1],
        "minutes": took.seconds / 60,
        "cpu_minutes": took.cpu_seconds / 60,
    }


def probe(words: list[str], given: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Run the command `probe`, with paths for what stands for them; its metrics.jsonl."""
    words = [str(vars(given)[word.lower()].resolve()) if word.isupper() else word for word in words]
    # The features are kept beside the images, and a probe that finds them measures nothing.
    words += ["--data.cache", str(folder / "cache"), "--run.dir", "run"]
    program = "import sys; from image_classifier.cli import main; sys.exit(main())"
    subprocess.run(
        [sys.executable, "-c", program, "probe", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(record.PROJECT / "src")},
        stdout=sys.stderr,
        check=True,
    )
    return [json.loads(row) for row in Path(folder, "run", "metrics.jsonl").open()]


if __name__ == "__main__":
    main()
