# ruff: noqa: PLC0415 - the process that measures imports torch, the one that starts it does not
"""What the loop of `train` costs beside the model: against a bare loop, written by hand.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 1 --blocks 8      # a quick look

Both train the same small network, whose step takes 3 to 20 ms on two cores, on the same resident
images, in one process and in turns: 5 steps of `train`, 5 of the bare loop, and so on, which are
added up to blocks of 50. (Turns of 50 steps take a second each, and the speed of a machine that
others share changes within one.) `train` is called as it is, with the settings that it comes with:
progress lines, `metrics.jsonl`, TensorBoard. It is stopped on the way whenever it asks for a batch,
which is where the bare loop takes its turn. Evaluation and saving come at the end, and are not
timed.

The bare loop does nothing but gather, normalize, forward, loss, backward, step, zero_grad.

Prints and writes `results/overhead.json`.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measurements
import project
import rounds

# All that a step of `train` passes through.
ABOUT = (
    "augment data/batch data/loader data/gather data/samples data/splits models/resnet9 optim "
    "pace parallel precision runtime/consensus tasks tracking train"
)
COUNT, SIDE, CLASSES = 50_000, 32, 10  # images as CIFAR-10 has them
TURN = 5  # steps
BLOCK = 50  # steps that are compared: as many as from one progress line to the next
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Milliseconds per step of both loops, and what the one takes more: medians over blocks."""
    config = build_config(options, folder)
    pixels = project.noise(COUNT, SIDE, CLASSES, distinct=COUNT)
    project.offer_pixels("generated", *pixels)
    ours, bare = [], []

    def in_turns(data: Any, start: int, stop: int, batches: Callable) -> Iterator[Any]:  # noqa: ANN401
        """The batches, and between turns of them a turn of the bare loop."""
        bare_turn = bare_loop(config, data)
        own, began = batches(data, start, stop), 0.0
        for step in range(start, stop):
            if step % TURN == 0:
                asked = time.perf_counter()
                if step:
                    ours.append(asked - began)
                bare_turn()
                began = time.perf_counter()
                bare.append(began - asked)
            yield next(own)

    project.train(config, in_turns)
    ours, bare = in_blocks(ours), in_blocks(bare[: len(ours)])
    in_pairs = [100 * (one / other - 1) for one, other in zip(ours, bare, strict=True)]
    return {
        "train_ms_per_step": 1e3 * statistics.median(ours) / BLOCK,
        "bare_ms_per_step": 1e3 * statistics.median(bare) / BLOCK,
        "percent_more": statistics.median(in_pairs),
    }


def in_blocks(turns: list[float]) -> list[float]:
    """The seconds of each whole block, without the first, which warms up."""
    in_block = BLOCK // TURN
    starts = range(in_block, len(turns) - in_block + 1, in_block)
    return [sum(turns[start : start + in_block]) for start in starts]


def build_config(options: argparse.Namespace, folder: Path) -> Any:  # noqa: ANN401 - a config
    """A small network in float32, nothing but normalized images, and all that a run writes."""
    steps = (options.blocks + 2) * BLOCK
    return project.build_config(
        epochs=steps / (COUNT // options.batch),
        data={
            "name": "generated",
            "image_size": SIDE,
            "batch_size": options.batch,
            "where": "device",
        },
        model={"name": "resnet9", "width": options.width},
        optim={"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
        run={"dir": str(folder), "log_every_steps": BLOCK, "trackers": ("tensorboard",)},
    )


def bare_loop(config: Any, data: Any) -> Callable[[], None]:  # noqa: ANN401 - of the project
    """A function that trains a network of its own for a turn of steps, by hand."""
    import torch
    from image_classifier.models import build_model
    from image_classifier.precision import Precision
    from image_classifier.preprocess import Normalize

    model = build_model(config.model, CLASSES, SIDE).to(memory_format=torch.channels_last)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True, fused=True
    )
    precision = Precision(config.precision, config.compute, config.optim, torch.device("cpu"))
    normalize = Normalize(data.source, SIDE, precision)
    pixels, labels = data.source.pixels, data.source.labels

    def turn() -> None:
        order = torch.randint(len(labels), (TURN * config.data.batch_size,))
        for indices in order.split(config.data.batch_size):
            images = normalize(pixels.index_select(0, indices).permute(0, 3, 1, 2))
            loss = criterion(model(images), labels[indices])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return turn


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=5)
    parser.add_argument("--blocks", type=int, default=80, help="of 50 steps, per round (80)")
    parser.add_argument("--batch", type=int, default=12, help="images per step (12)")
    parser.add_argument("--width", type=int, default=8, help="of the network (8)")
    options = parser.parse_args()
    if options.contender:
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as folder:
            rounds.give(measure, options, Path(folder, "run"))
        return
    results, failures = rounds.compare(__file__, ["in turns"], options)
    more = measurements.numbers(results, "in turns", "percent_more")
    measurements.write(
        options.results / "overhead.json",
        "The loop of `train` against a bare loop",
        f"Each round is a process with {options.blocks} blocks of {BLOCK} steps of both loops, in "
        f"turns of {TURN}; resnet9 of width {options.width}, batches of {options.batch} images of "
        f"{SIDE} x {SIDE}, float32. Medians (lowest to highest).",
        measurements.measured(
            results,
            failures,
            [measurements.goal("percent that a step of `train` takes more", "<= 3", more)],
        ),
    )


if __name__ == "__main__":
    main()
