# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""What an index of 1,000,000 files costs the workers that walk all of it.

    python benchmarks/memory.py
    python benchmarks/memory.py --files 100000 --rounds 1      # a quick look

The index is of a million names, of few files: links would take hours to make, and the paths are
what counts. The images are tiny, so that two workers walk through all of them in minutes. `ours` is
what `train` reads; `imagefolder` is torchvision's ImageFolder in a DataLoader, whose list of Python
objects is copied into each worker page by page, as counting references writes to them
(https://github.com/pytorch/pytorch/issues/13246).

PSS is what the kernel counts as a process's share of memory (`proc_pid_smaps(5)`); private is what
no other process shares. Both are of a worker, from the first batches to the last; what is shared
differs only by how many share it, so growth is in private. What the index itself costs is the
difference to the same walk through an index of 1,000 files.

Prints and writes `results/memory.json`.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measurements
import pictures
import project
import rounds

ABOUT = "data tools/prepare"

FILES = 64  # that there are in fact
FEW = 1000  # names of an index that costs nothing
BATCH, SIDE, WORKERS = 512, 8, 2
WARM = 16  # batches before the first look: each worker has done all that it does


def names(count: int) -> list[str]:
    """Paths as long as ImageNet's, relative to the folder: many of few files."""
    return [f"n0{number % FILES:07}/n0{number % FILES:07}_00000.JPEG" for number in range(count)]


def make_files(root: Path) -> None:
    """The few files that there are."""
    for number, name in enumerate(names(FILES)):
        path = root / name
        path.parent.mkdir(parents=True)
        pictures.photograph(number, (SIDE, SIDE)).save(path, "JPEG")


def ours(root: Path, count: int) -> Iterator[Any]:
    """A dataset of a million paths, streamed by ours."""
    import torch
    from image_classifier.data.datasets import DATASETS
    from image_classifier.data.datasets.paths import PathList
    from image_classifier.data.datasets.source import Source

    labels = torch.arange(count) % FILES
    classes = tuple(map(str, range(FILES)))

    def million(*_: object) -> Source:
        paths = PathList(root, [name.encode() for name in names(count)])
        return Source(labels, classes, paths=paths)

    DATASETS["million"] = million
    return project.input_batches(build_config(root), ready=False)


def build_config(root: Path) -> Any:  # noqa: ANN401 - a config
    """The files as they are, in order of an epoch."""
    return project.build_config(
        data={
            "name": "million",
            "root": str(root),
            "image_size": SIDE,
            "batch_size": BATCH,
            "where": "stream",
            "workers": WORKERS,
        }
    )


def imagefolder(root: Path, count: int) -> Iterator[Any]:
    """ImageFolder's list of tuples in a DataLoader."""
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    dataset = ImageFolder(str(root), PILToTensor())
    dataset.samples = [(f"{root}/{name}", i % FILES) for i, name in enumerate(names(count))]
    sampler = RandomSampler(dataset, num_samples=2**40)
    yield from DataLoader(dataset, BATCH, sampler=sampler, num_workers=WORKERS)


CONTENDERS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    "ours": ours,
    "imagefolder": imagefolder,
}


def measure(batches: Iterator[Any], steps: int) -> dict[str, float]:
    """Megabytes of the workers, on average, before and after the walk."""
    for _ in range(WARM):
        next(batches)
    before = worker_megabytes()
    began = rounds.Reading.now()
    for _ in range(steps):
        next(batches)
    took = rounds.Reading.now().since(began)
    after = worker_megabytes()
    growth = {f"growth_of_{key}": after[key] - before[key] for key in after}
    return {**after, **growth, "images_per_second": steps * BATCH / took.seconds}


def worker_megabytes() -> dict[str, float]:
    """PSS and private memory of a worker."""
    workers = rounds.tree(os.getpid())[1:]
    assert len(workers) == WORKERS, workers
    sums = dict.fromkeys(("Pss", "Private_Clean", "Private_Dirty"), 0)
    for pid in workers:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in sums:
                sums[key] += int(value.split()[0])
    private = sums["Private_Clean"] + sums["Private_Dirty"]
    return {"MB_of_pss": sums["Pss"] / WORKERS / 1024, "MB_private": private / WORKERS / 1024}


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=3)
    parser.add_argument("--files", type=int, default=1_000_000, help="in the index (1000000)")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        name, _, few = options.contender.partition(":")
        batches = CONTENDERS[name](options.root, FEW if few else options.files)
        rounds.give(measure, batches, options.files // BATCH)
        return
    contenders = [name for key in CONTENDERS for name in (key, f"{key}:few")]
    with tempfile.TemporaryDirectory() as root:
        make_files(Path(root))
        results, failures = rounds.compare(__file__, contenders, options, "--root", root)
    goals = []
    for kind in ("MB_of_pss", "MB_private"):
        many, few = (measurements.numbers(results, name, kind) for name in ("ours", "ours:few"))
        cost = [one - other for one, other in zip(many, few, strict=False)]
        what = f"ours: {kind.replace('_', ' ')} of a worker that the index costs, after the walk"
        goals.append(measurements.goal(what, "<= 40", cost))
    measurements.write(
        options.results / "memory.json",
        f"Memory of a worker, one of two that walk {options.files:,} files",
        f"`few` is the same walk through an index of {FEW:,} files. Growth is from the first "
        "batches to the last. Medians (lowest to highest).",
        measurements.measured(results, failures, goals),
    )


if __name__ == "__main__":
    main()
