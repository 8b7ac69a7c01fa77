# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""Every way in: the same images as files, as rows, or in tar shards.

    python benchmarks/input_formats.py                      # generated photographs, 500 x 375
    python benchmarks/input_formats.py --root FOLDER        # yours: FOLDER/train/<class>/*.jpg
    python benchmarks/input_formats.py --rounds 1 --images 256      # a quick look

For each way, the CPU time to read and decode an image, in random order, in one process and from the
page cache; and a run of an epoch, whose weights should be those of the folder to the last bit.

Prints and writes `results/input_formats.json` (`input_formats-<folder>.json` with `--root`).
"""

import argparse
import contextlib
import csv
import hashlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measurements
import pictures
import project
import rounds

ABOUT = "data/datasets data/decode data/samples tools/tar tools/huggingface tools/label_table"
ABOUT += " tools/dataset_formats tools/prepare"

SIDE, BATCH = 32, 64  # of the run
CLASSES = pictures.CLASSES


def folder(root: Path, scratch: Path) -> dict[str, Any]:
    """`root/{train,val}/<class>/`."""
    del scratch
    return {"name": "folder", "root": str(root)}


def table(root: Path, scratch: Path) -> dict[str, Any]:
    """A table of paths, labels and splits."""
    rows = [
        (path.relative_to(root), path.parent.name, path.parts[-3])
        for path in sorted(root.glob("*/*/*"))
    ]
    with (scratch / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    return {"name": "folder", "root": str(root), "labels": str(scratch / "labels.csv")}


def torch_dataset(root: Path, scratch: Path) -> dict[str, Any]:
    """Torchvision's ImageFolder, as anybody's Dataset."""
    from image_classifier.data.datasets import DATASETS
    from torchvision.datasets import ImageFolder

    del scratch
    DATASETS["torch"] = lambda data, split: ImageFolder(Path(data.root, split))
    return {"name": "torch", "root": str(root)}


def huggingface(root: Path, scratch: Path) -> dict[str, Any]:
    """What `save_to_disk` wrote, with the bytes of the files."""
    import datasets

    place = scratch / "rows"
    if not place.exists():
        datasets.disable_progress_bars()
        names = sorted(path.name for path in (root / "train").iterdir())
        kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        made = {}
        for split in ("train", "val"):
            files = sorted((root / split).glob("*/*"))
            images = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
            rows = {"image": images, "label": [names.index(path.parent.name) for path in files]}
            made[split] = datasets.Dataset.from_dict(rows, datasets.Features(kinds))
        datasets.DatasetDict(made).save_to_disk(str(place))
    return {"name": "huggingface", "root": str(place)}


def tar(root: Path, scratch: Path) -> dict[str, Any]:
    """What `prepare --format tar` wrote."""
    from image_classifier.tools.prepare.prepare import Recipe, prepare_images

    data = project.build_config(data={"root": str(root), "cache": str(scratch)}).data
    prepare_images(data, ("train", "val"), Recipe("tar"))
    return {"name": "tar", "root": str(scratch / "tar")}


def tar_in_memory(root: Path, scratch: Path) -> dict[str, Any]:
    """The same by fsspec, from a place that costs nothing: threads fetch ahead."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(tar(root, scratch)["root"] + "/", "/input_formats", recursive=True)
    return {"name": "tar", "root": "memory://input_formats", "cache": str(scratch / "memory")}


WAYS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "folder": folder,
    "table": table,
    "torch-dataset": torch_dataset,
    "huggingface": huggingface,
    "tar": tar,
    "tar-in-memory": tar_in_memory,
}


def measure(knobs: dict[str, Any], run_dir: str) -> dict[str, float]:
    """CPU milliseconds per image, and a digest of the weights at the end of a run."""
    import numpy as np
    import torch
    from image_classifier.checkpoints.reading import read_checkpoint
    from image_classifier.data import open_dataset
    from image_classifier.train import train

    torch.set_num_threads(1)
    config = project.build_config(
        data={**knobs, "image_size": SIDE, "batch_size": BATCH, "where": "stream", "workers": 2},
        augment={"crop": "resized", "min_scale": 0.35, "flip": "random"},
        model={"name": "resnet9_gn", "width": 8},
        optim={"schedule": "linear"},
        run={"dir": run_dir},
    )
    source = open_dataset(config.data, "train")
    order = np.random.default_rng(0).permutation(len(source))
    for part in (order[: len(order) // 4], order):  # the first to warm up
        began = rounds.Reading.now()
        for numbers in np.array_split(part, max(1, len(part) // BATCH)):
            source.prefetch(numbers)
            for number in numbers.tolist():
                source.read(number)
        took = rounds.Reading.now().since(began)
    train(config)
    weights = read_checkpoint(Path(run_dir, "checkpoints", "last.pt"))["state"]["model"]
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().numpy().tobytes())
    return {
        "cpu_ms": 1000 * took.cpu_seconds / len(order),
        "digest": int(digest.hexdigest()[:12], 16),
    }


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=5)
    parser.add_argument("--root", type=Path, help="folder with train/<class>/; default: generated")
    parser.add_argument("--images", type=int, default=2000, help="to train on (2000)")
    parser.add_argument("--scratch", type=Path, help="folder that is kept; default: temporary")
    options = parser.parse_args()
    if options.contender:
        contend(options)
        return
    with contextlib.ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scratch.mkdir(parents=True, exist_ok=True)
        if not (scratch / "images").exists():
            root = options.root or pictures.generate(scratch / "photographs", 200)
            pictures.lengthen(root.resolve(), scratch / "images", options.images)
        results, failures = rounds.compare(__file__, WAYS, options, "--scratch", str(scratch))
        expected = measurements.numbers(results, "folder", "digest")
        for found in results.values():
            for one, digest in zip(found, expected, strict=False):
                one["same_weights"] = float(one.pop("digest") == digest)
        measurements.relate(results, "cpu_ms", WAYS, "folder")
        same = [one["same_weights"] for found in results.values() for one in found]
        what = options.root.resolve().name if options.root else "generated photographs, 500 x 375"
        size = pictures.average_bytes(scratch / "images")
        name = f"input_formats-{options.root.resolve().name}" if options.root else "input_formats"
        measurements.write(
            options.results / f"{name}.json",
            f"Every way in: {what}",
            f"{options.images:,} images of {size // 1000} kB, read and decoded in random order by "
            "one process; then an epoch of ResNet-9 at 32 pixels. `same weights` is 1 where they "
            "end as those of the folder, to the last bit. Medians (lowest to highest).",
            measurements.measured(
                results,
                failures,
                [measurements.goal("the lowest `same weights`", ">= 1", [min(same)])],
            ),
        )


def contend(options: argparse.Namespace) -> None:
    """Be one of the ways, in a process of its own."""
    root = options.scratch / "images"
    pictures.warm(root)
    with tempfile.TemporaryDirectory() as run_dir, contextlib.redirect_stdout(io.StringIO()):
        knobs = WAYS[options.contender](root, options.scratch)
        found = measure(knobs, run_dir)
    rounds.give(lambda: found)


if __name__ == "__main__":
    main()
