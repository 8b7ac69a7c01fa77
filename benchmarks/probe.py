"""Trained weights against none: a last layer on frozen features, all layers, and from scratch.

    python benchmarks/probe.py --flowers flowers --cifar cifar
    python benchmarks/probe.py --flowers flowers --weights weights.pt --only probe finetune

`folder` is `train.py folder`; `probe` is the command of that name, with a smaller network, and
`finetune` trains all layers of it, by the recipe of `folder`. A seed is a round. The weights of
both are stand-ins for downloaded ones: they have seen CIFAR-10 (`--cifar`: train/, and test/ under
the name of val/) at its 32 pixels, for 8 epochs with the round's seed. Their training is not part
of the time; `--weights` gives others, one file for all rounds.

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
SMALL = "--data.image-size 64 --augment.min-size 0 --run.init-from WEIGHTS"
# Without label smoothing, as it costs features what other classes need of them:
# https://arxiv.org/abs/2010.16402
WEIGHTS = "cifar10_speed --data.name folder --data.root CIFAR --epochs 8"
WEIGHTS += " --optim.label-smoothing 0 --run.evaluate-every-epochs 8"
COMMANDS = {
    "folder": "folder --data.root FLOWERS",
    "probe": "cifar10_speed --data.name folder --data.root FLOWERS --data.batch-size 50 "
    f"--model.head layers {SMALL}",
    "finetune": f"folder --data.root FLOWERS --epochs 30 --model.name airbench96 {SMALL}",
}
RIVAL = "folder"


def main() -> None:
    """Run all as often as there are rounds, and write the result."""
    parser = rounds.parser(__doc__, rounds=3)
    for what in ("cifar", "flowers", "weights"):
        parser.add_argument(f"--{what}", type=Path, help=f"in place of {what.upper()}")
    given = parser.parse_args()
    given.more = ""
    if given.contender:
        rounds.give(contend, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        weights = []
        if not given.weights and {"probe", "finetune"} & set(given.only or COMMANDS):
            for number in range(given.rounds):
                here = Path(folder, str(number))
                here.mkdir()
                recipes.train([*WEIGHTS.split(), "--seed", str(number)], given, here)
            weights = ["--weights", folder]
        results, failures = rounds.compare(__file__, COMMANDS, given, *weights)
    for name in COMMANDS.keys() - {RIVAL}:
        for row, scratch in zip(results.get(name, []), results.get(RIVAL, []), strict=False):
            row["points above folder"] = row["top1_percent"] - scratch["top1_percent"]
    record.relate(results, "minutes", COMMANDS.keys() - {RIVAL}, RIVAL)
    commands = ", ".join(
        f"`{'image-classifier probe' if name == 'probe' else 'train.py'} {words}`"
        for name, words in COMMANDS.items()
    )
    record.write(
        given.results / "probe.json",
        "Trained weights on 300 photographs, and training from scratch",
        f"{commands}, as often as there are rounds, with a seed each. Medians (lowest to highest).",
        record.measured(results, failures, goals(results)),
    )


def goals(results: record.Results) -> list[dict[str, object]]:
    """What is asked of each seed."""
    return [
        record.goal(f"{name}: {what}", asked, [row[key] for row in results[name] if key in row])
        for name in ("probe", "finetune")
        if name in results
        for what, asked, key in (
            ("points of top-1 above training from scratch", ">= 0.01", "points above folder"),
            ("time, of that of training from scratch", "<= 0.2", "minutes x folder"),
        )
    ]


def contend(given: argparse.Namespace) -> dict[str, float]:
    """Train or probe once, in a folder of its own."""
    seed = ["--seed", str(given.round)]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        if given.weights and given.weights.is_dir():
            given.weights = given.weights / str(given.round) / "run/checkpoints/best.pt"
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
