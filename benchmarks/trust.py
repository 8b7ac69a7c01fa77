# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""Whether a score can be trusted, and what flips, several models and better labels buy.

    python benchmarks/trust.py --trash trash --aerial aerial --flowers flowers

- `bursts` are some frames each of photographs, divided `by file` and `by group`: the score
  on the validation images, beside that on bursts of which no run has seen a frame.
- `test`: the score of a test part with its interval, beside that of the same weights on images
  that the run never had; linear probes of EfficientNet-Lite0 on `--aerial`.
- `turns`: vertical flips and quarter turns on `--aerial`, on and off: from scratch, the same with
  crops and horizontal flips alone (`plain`), and fine-tuned.
- `folds`: five folds of `--trash` as one model beside their mean, on a third that none has seen.
- `labels`: of 5 % planted wrong labels, how many are among the first 8 % of `doubtful-labels`, and
  of cleanlab's list, if it is installed, from the same probabilities; ten linear probes.

A round is a seed, and other images. Prints and writes `results/trust-<kind>.json` for each.
"""

import argparse
import contextlib
import csv
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import measurements
import numpy as np
import pictures
import rounds
import transfer
from PIL import Image

ABOUT = "augment data evaluate models optim precision presets pace parallel train"
ABOUT += " tools/cross_validate tools/doubtful_labels tools/ensemble tools/evaluate"
ABOUT += " tools/holdout tools/linear_probe tools/policies tools/runs tools/timm tools/transforms"
NUM_BURSTS = 192
NUM_FRAMES = 6  # of each
NUM_QUARTERS = 4  # of them, of which each validates once
SIDE = 64  # of a frame, in pixels
NUM_FOLDS = 5  # of an ensemble
NUM_PROBES = 10  # that say which labels are doubtful
NUM_PARTS = 4  # test parts in a round
INTERVAL = re.compile(r"test: top-1 ([0-9.]+)%.* within ([0-9.]+)% \.\. ([0-9.]+)%")
PLANTED = 0.05  # share of the labels that are made wrong
FIRST = 0.08  # share of the list that is looked at
SETS = ("trash", "aerial", "flowers")
LITE0 = "timm/tf_efficientnet_lite0"
SMALL = "folder --data.image-size 64 --model.name resnet9 --model.width 16 --epochs 40"
RECIPES = {
    "probe": f"finetune --model.name {LITE0} --run.init-from pretrained --epochs 0",
    "finetune": f"finetune --model.name {LITE0} --data.image-size 160",
    "scratch": SMALL,
    "plain": f"{SMALL} --augment.policy none --augment.mixup 0 --augment.cutmix 0",
}
BURSTS = "folder --data.image-size 32 --model.name resnet9 --model.width 16 --epochs 20"
BURSTS += " --run.evaluate-every-epochs 20"  # so that no weights are chosen by their score
GROUPS = ("--data.groups", r"([0-9]+)_[0-9]+\.")
TURNS = ("--augment.vertical-flip", "--augment.turns")
KINDS = {
    "bursts": (
        "Bursts divided by file, and by group",
        f"{NUM_BURSTS} bursts of {NUM_FRAMES} generated frames, half of whose labels are drawn by "
        "lot. Each quarter validates once, at the end of a run; means of the four runs. `fresh`: "
        "400 frames of other bursts.",
    ),
    "test": (
        "The score of a test part",
        "Linear probes of EfficientNet-Lite0: 500 images, of which 100 are a test part; 500 others "
        "say what is true. `holds`: the share of the intervals of 95 % that have that in them.",
    ),
    "turns": (
        "Vertical flips and quarter turns",
        "`scratch`: `folder` with ResNet-9 at 64 pixels, 600 images, 40 epochs; `plain`: the same "
        "with crops and horizontal flips alone; `finetune`: EfficientNet-Lite0 at 160 pixels, 100 "
        "images. On 400 others, beside the same run without.",
    ),
    "folds": (
        "Five folds as one model",
        f"335 images in {NUM_FOLDS} folds, 167 others to judge by: the ensemble beside the mean of "
        "its members. EfficientNet-Lite0, but for `scratch`: ResNet-9 at 64 pixels.",
    ),
    "labels": (
        "Planted wrong labels",
        f"{PLANTED:.0%} of the labels are wrong; {NUM_PROBES} linear probes of EfficientNet-Lite0. "
        f"`found`: how many are in the first {FIRST:.0%} of the list of `doubtful-labels`; and of "
        "cleanlab's, by the same probabilities.",
    ),
}
ROUNDS = " A round is a seed, and other images. Medians (lowest to highest)."

Row = dict[str, float]


def main() -> None:
    """Measure all that can be, and write the result."""
    parser = rounds.parser(__doc__, rounds=3)
    for name in SETS:
        parser.add_argument(f"--{name}", type=Path, help="a folder of a folder per class")
    given = parser.parse_args()
    if given.contender:
        rounds.give(contend, given)
        return
    needs = {name: name.partition(":")[2].partition(":")[0] for name in CONTENDERS}
    known = [name for name, need in needs.items() if need not in SETS or vars(given)[need]]
    results, failures = rounds.compare(__file__, known, given)
    for kind, (title, about) in KINDS.items():
        parts = [
            {name: row for name, row in part.items() if name.partition(":")[0] == kind}
            for part in (results, failures)
        ]
        if any(parts):
            found = measurements.measured(*parts, goals(parts[0]))
            measurements.write(given.results / f"trust-{kind}.json", title, about + ROUNDS, found)


def goals(results: measurements.Results) -> list[dict[str, object]]:
    """What is asked of the means over all rounds."""
    asked = [
        ("bursts:by file", "points_above_fresh", ">= 20"),
        ("bursts:by group", "points_above_fresh", "<= 5"),
        ("test:aerial", "intervals_that_hold_fresh", ">= 0.9"),
        *((name, "points_gained", ">= 0.1") for name in CONTENDERS if name.startswith("turns")),
        *((name, "points_gained", ">= 1") for name in CONTENDERS if name.startswith("folds")),
        *((f"labels:{name}", "found_percent", ">= 80") for name in ("trash", "flowers")),
    ]
    found = [
        (f"{name}: {key.replace('_', ' ')}, mean", limit, measurements.numbers(results, name, key))
        for name, key, limit in asked
    ]
    return [
        measurements.goal(what, limit, [statistics.mean(values)])
        for what, limit, values in found
        if values
    ]


def contend(given: argparse.Namespace) -> Row:
    """One contender in one round, in a folder of its own."""
    rest = given.contender.partition(":")[2]
    with tempfile.TemporaryDirectory() as folder:
        begun = rounds.Reading.now()
        row = CONTENDERS[given.contender](Path(folder), rest, given)
        took = rounds.Reading.now().since(begun)
    return row | {"cpu_minutes": took.cpu_seconds / 60}


def call(here: Path, *words: object) -> str:
    """Run a command of the project in a folder: what it prints."""
    program = "import sys; from image_classifier.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))[:120]}: {done.stdout.strip()[-300:]}")
    return done.stdout


def score(said: str) -> float:
    """The last top-1 that a command printed, in %."""
    return float(re.findall(r"top-1 ([0-9.]+)%", said)[-1])


def train(here: Path, *words: object) -> float:
    """A run in the folder `run`: top-1 of its best weights on its validation images, in %."""
    call(here, "train", *words, "--run.dir", "run", "--run.trackers")
    status = json.loads((here / "run" / "status.json").read_text())
    return 100 * status["result"]["val/top1"]


def lay_out(path: Path, here: Path, num_train: int, num_others: int, seed: int) -> None:
    """Copies of images: `images/<class>` to learn from, and `fresh/<class>`."""
    task = transfer.draw_images(path.resolve(), num_train, num_others, seed)
    for folder, part in (("images", "train"), ("fresh", "val")):
        for number, (file, (label,)) in enumerate(task[part]):
            copy = here / folder / label / f"{number:04}{Path(file).suffix}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)


def bursts(here: Path, how: str, given: argparse.Namespace) -> Row:
    """A score on frames of bursts, beside the score of the same weights on other bursts.

    Half of the labels are drawn by lot, burst by burst: of a new burst 9 in 16 can be known.
    """
    write_bursts(here / "images", range(NUM_BURSTS), NUM_FRAMES, given.round)
    write_bursts(here / "fresh", range(1000, 1400), 1, given.round)
    groups = GROUPS if how == "by group" else ()
    words = (*BURSTS.split(), "--data.root", "images", *groups, "--seed", given.round)
    own = []
    fresh = []
    for fold in range(NUM_QUARTERS):
        part = ("--data.val-fraction", 1 / NUM_QUARTERS, "--data.fold", fold)
        own.append(train(here, *words, *part, "--run.fresh"))
        fresh.append(score(call(here, "evaluate", "run", "--root", "fresh")))
    percent = statistics.mean(own)
    fresh_percent = statistics.mean(fresh)
    return {
        "percent": percent,
        "fresh_percent": fresh_percent,
        "points_above_fresh": percent - fresh_percent,
    }


def write_bursts(folder: Path, numbers: range, num_frames: int, seed: int) -> None:
    """Files `<class>/<burst>_<frame>.jpg`: frames are moved by some pixels, and tinted a little."""
    for number in numbers:
        draw = np.random.default_rng((seed, number))
        photograph = pictures.photograph(1_000_000 * seed + number, (2 * SIDE, 3 * SIDE // 2))
        tint = (1_000_000 * seed + number) % pictures.CLASSES
        label = tint if draw.random() < 0.5 else draw.integers(pictures.CLASSES)
        for frame in range(num_frames):
            left, top = draw.integers(0, 8, 2)
            part = photograph.crop((left, top, left + SIDE + 24, top + SIDE + 24))
            pixels = np.asarray(part.resize((SIDE, SIDE))) + draw.normal(size=3) * 4
            path = folder / f"class{label}" / f"{number}_{frame}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def test_part(here: Path, name: str, given: argparse.Namespace) -> Row:
    """Whether the interval of the test part holds the score on images that the run never had."""
    holds = []
    distances = []
    optimism = []
    for number in range(NUM_PARTS):
        folder = here / str(number)
        seed = NUM_PARTS * given.round + number
        lay_out(vars(given)[name], folder, 500, 500, seed)
        words = (*RECIPES["probe"].split(), "--data.root", "images", "--seed", seed)
        said = call(folder, "train", *words, "--data.test-fraction", 0.2, "--run.dir", "run")
        tested, least, most = map(float, INTERVAL.search(said).groups())
        validated = float(re.search(r"^top-1 ([0-9.]+)%", said, re.MULTILINE)[1])
        fresh = score(call(folder, "evaluate", "run", "--root", "fresh"))
        holds.append(least <= fresh <= most)
        distances.append(abs(fresh - tested))
        optimism.append(validated - fresh)
    return {
        "intervals_that_hold_fresh": statistics.mean(holds),
        "points_from_fresh": statistics.mean(distances),
        "validation_points_above_fresh": statistics.mean(optimism),
    }


def turns(here: Path, rest: str, given: argparse.Namespace) -> Row:
    """The same run without and with flips and turns, on images that it never had."""
    name, _, recipe = rest.partition(":")
    num_train = 100 if recipe == "finetune" else 600
    lay_out(vars(given)[name], here, num_train, 400, given.round)
    words = (*RECIPES[recipe].split(), "--data.root", "images", "--seed", given.round)
    found = []
    seconds = []
    for more in ((), TURNS):
        begun = rounds.Reading.now()
        train(here, *words, *more, "--run.fresh")
        seconds.append(rounds.Reading.now().since(begun).cpu_seconds)
        found.append(score(call(here, "evaluate", "run", "--root", "fresh")))
    return {
        "percent": found[1],
        "points_gained": found[1] - found[0],
        "cpu_seconds_of_those_without": seconds[1] / seconds[0],
    }


def folds(here: Path, rest: str, given: argparse.Namespace) -> Row:
    """Five folds as one model beside their mean, on a third of the images that none has seen."""
    name, _, recipe = rest.partition(":")
    lay_out(vars(given)[name], here, 335, 167, given.round)
    words = (*RECIPES[recipe].split(), "--data.root", "images", "--seed", given.round)
    call(here, "cross-validate", NUM_FOLDS, *words, "--run.dir", "runs", "--run.trackers")
    begun = rounds.Reading.now()
    call(here, "ensemble", "runs", "--dir", "all")
    took = rounds.Reading.now().since(begun)
    alone = [
        score(call(here, "evaluate", f"runs/fold-{fold}", "--root", "fresh"))
        for fold in range(NUM_FOLDS)
    ]
    together = score(call(here, "evaluate", "all", "--root", "fresh"))
    return {
        "percent": together,
        "points_gained": together - statistics.mean(alone),
        "points_above_the_best": together - max(alone),
        "ensemble_cpu_seconds": took.cpu_seconds,
    }


def labels(here: Path, name: str, given: argparse.Namespace) -> Row:
    """How many of the planted wrong labels are first in the list of `doubtful-labels`."""
    lay_out(vars(given)[name], here, 10_000, 10_000, given.round)
    for path in here.glob("fresh/*/*"):  # all images are learned from
        path.rename(here / "images" / path.parent.name / f"fresh-{path.name}")
    files = sorted(path.relative_to(here) for path in here.glob("images/*/*"))
    draw = random.Random(given.round)
    classes = sorted({path.parent.name for path in files})
    planted = set()
    for path in draw.sample(files, round(PLANTED * len(files))):
        wrong = draw.choice([label for label in classes if label != path.parent.name])
        moved = Path("images", wrong, f"{path.parent.name}-{path.name}")
        (here / path).rename(here / moved)
        planted.add(str(moved.relative_to("images")))
    words = (*RECIPES["probe"].split(), "--data.root", "images", "--seed", given.round)
    call(here, "cross-validate", NUM_PROBES, *words, "--run.dir", "runs", "--run.trackers")
    begun = rounds.Reading.now()
    call(here, "doubtful-labels", "runs")
    took = rounds.Reading.now().since(begun)
    with (here / "runs" / "doubtful_labels.csv").open(encoding="utf-8") as file:
        listed = [row["path"] for row in csv.DictReader(file)]
    row = {"found_percent": first_of(listed, planted), "list_cpu_seconds": took.cpu_seconds}
    return row | {
        f"cleanlab_{way}_percent": first_of(theirs, planted) for way, theirs in cleanlab(here)
    }


def first_of(listed: list[str], planted: set[str]) -> float:
    """How many of the planted ones are in the first part of a list, in %."""
    first = listed[: round(FIRST * len(listed))]
    return 100 * len(planted.intersection(first)) / len(planted)


def cleanlab(here: Path) -> Iterator[tuple[str, list[str]]]:
    """The orders of cleanlab, by the same probabilities; none if it is not installed."""
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        return
    from image_classifier.tools.doubtful_labels.folds import read_folds

    with contextlib.chdir(here):
        _, found, shares = read_folds(Path("runs"))
    paths = [one.paths.relative(index).decode() for one in found for index in range(len(one))]
    given = np.concatenate([one.labels.numpy() for one in found])
    for way in ("self_confidence", "normalized_margin"):
        scores = get_label_quality_scores(given, shares.numpy(), method=way)
        yield way, [paths[index] for index in np.argsort(scores, kind="stable")]


CONTENDERS: dict[str, Callable[[Path, str, argparse.Namespace], Row]] = {
    "bursts:by file": bursts,
    "bursts:by group": bursts,
    "test:aerial": test_part,
    "turns:aerial:scratch": turns,
    "turns:aerial:plain": turns,
    "turns:aerial:finetune": turns,
    "folds:trash:probe": folds,
    "folds:trash:finetune": folds,
    "folds:trash:scratch": folds,
    "labels:trash": labels,
    "labels:flowers": labels,
}

if __name__ == "__main__":
    main()
