# ruff: noqa: PLC0415 - the process that measures imports torch, the one that starts it does not
"""What the loop of `train` costs beside the model: against a bare loop, written by hand.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 1 --blocks 8      # a quick look

Both train the same small network, whose step takes about 5 ms on two cores, on the same resident
images, in one process and in turns: 50 steps of `train`, 50 of the bare loop, and so on. `train` is
called as it is, with the settings that it comes with: progress lines, `metrics.jsonl`, TensorBoard.
It is stopped on the way whenever it asks for a batch, which is where the bare loop takes its turn.
Evaluation and saving come at the end, and are not timed.

The bare loop does nothing but gather, normalise, forward, loss, backward, step, zero_grad.

Prints and writes `results/overhead.md`.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import rounds

COUNT, SIDE, CLASSES = 50_000, 32, 10  # images as CIFAR-10 has them
BLOCK = 50  # steps in a turn: as many as from one progress line to the next


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Milliseconds per step of both loops, and what the one takes more than the other."""
    from image_classifier.loader import TrainData
    from image_classifier.train import train

    config = resident_config(options, folder)
    house, bare = [], []
    batches = TrainData.batches

    def in_turns(data: TrainData, start: int, stop: int) -> Iterator[Any]:
        """The batches, and between blocks of them a block of the bare loop."""
        bare_block = bare_loop(config, data)
        ours, began = batches(data, start, stop), 0.0
        for step in range(start, stop):
            if step % BLOCK == 0:
                asked = time.perf_counter()
                if step:
                    house.append(asked - began)
                bare_block()
                began = time.perf_counter()
                bare.append(began - asked)
            yield next(ours)

    TrainData.batches = in_turns
    train(config)
    house, bare = house[1:], bare[1 : len(house)]  # the first block of each is for warming up
    in_pairs = [100 * (one / other - 1) for one, other in zip(house, bare, strict=True)]
    return {
        "train_ms": 1e3 * sum(house) / len(house) / BLOCK,
        "bare_ms": 1e3 * sum(bare) / len(bare) / BLOCK,
        "more_percent": 100 * (sum(house) / sum(bare) - 1),
        "more_percent_median": statistics.median(in_pairs),
    }


def resident_config(options: argparse.Namespace, folder: Path) -> Any:  # noqa: ANN401
    """Generated images in memory; a small network in float32; no augmentation but to normalise."""
    import torch
    from image_classifier.config import AugmentConfig, Config, DataConfig, ModelConfig, RunConfig
    from image_classifier.datasets import DATASETS
    from image_classifier.datasets.source import Source

    def generated(_: DataConfig, split: str) -> Source:
        count = COUNT if split == "train" else 512
        pixels = torch.randint(0, 256, (count, SIDE, SIDE, 3), dtype=torch.uint8)
        labels = torch.arange(count) % CLASSES
        return Source(labels, classes=tuple(map(str, range(CLASSES))), pixels=pixels)

    DATASETS["generated"] = generated
    steps = (options.blocks + 2) * BLOCK
    return Config(
        epochs=steps / (COUNT // options.batch),
        precision="fp32",
        data=DataConfig(name="generated", batch_size=options.batch, where="device"),
        augment=AugmentConfig(crop="none", flip="none"),
        model=ModelConfig(width=options.width),
        optim=replace(Config().optim, lr=0.01, warmup_epochs=0),
        run=RunConfig(dir=str(folder), log_every_steps=BLOCK, evaluate_every_epochs=1e6),
    )


def bare_loop(config: Any, data: Any) -> Callable[[], None]:  # noqa: ANN401 - of the house
    """A function that trains a network of its own for a block of steps, by hand."""
    import torch
    from image_classifier.augment import Normalize
    from image_classifier.models import build_model
    from image_classifier.precision import Precision

    model = build_model(config.model, CLASSES, SIDE).to(memory_format=torch.channels_last)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )
    precision = Precision(config.precision, config.compute, config.optim, torch.device("cpu"))
    normalize = Normalize(data.source, SIDE, precision)
    pixels, labels = data.source.pixels, data.source.labels

    def block() -> None:
        order = torch.randperm(len(labels))[: BLOCK * config.data.batch_size]
        for indices in order.split(config.data.batch_size):
            images = normalize(pixels.index_select(0, indices).permute(0, 3, 1, 2))
            loss = criterion(model(images), labels[indices])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return block


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=5)
    parser.add_argument("--blocks", type=int, default=80, help="of 50 steps, per round (80)")
    parser.add_argument("--batch", type=int, default=8, help="images per step (8)")
    parser.add_argument("--width", type=int, default=8, help="of the network (8)")
    options = parser.parse_args()
    if options.contender:
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as folder:
            rounds.give(measure, options, Path(folder, "run"))
        return
    results, failures = rounds.compare(__file__, ["in turns"], options)
    parts = [rounds.missing(failures)]
    if results:

        def values(key: str) -> list[float]:
            return rounds.values(results, "in turns", key)

        rows = [
            ["`train`", rounds.spread(values("train_ms"), 3)],
            ["bare loop", rounds.spread(values("bare_ms"), 3)],
        ]
        what = "percent that a step of `train` takes more"
        parts = [
            rounds.table(["", "ms per step"], rows),
            rounds.goal(what, values("more_percent"), 3, at_most=True),
            f"- the same as the median of pairs of blocks: "
            f"{rounds.spread(values('more_percent_median'))}",
        ]
    rounds.write(
        options.results,
        "overhead",
        "The loop of `train` against a bare loop",
        f"{options.rounds} processes, each with {options.blocks} blocks of {BLOCK} steps of both "
        f"loops in turns; resnet9 of width {options.width}, batches of {options.batch} images of "
        f"{SIDE} x {SIDE}, float32. Medians of the processes (lowest..highest).",
        *parts,
    )


if __name__ == "__main__":
    main()
