# ruff: noqa: PLC0415 - the process that measures imports torch, the one that starts it does not
"""What `--precision` buys: images/s of training steps in fp32, in bf16, and as `auto` chooses.

    python benchmarks/precision.py
    python benchmarks/precision.py --rounds 1 --seconds 2 --only airbench-32     # a quick look

Eight networks learn from noise that lies in memory, so that nothing but the step is timed: forward,
backward and the optimizer, in the loop of `train`. In a round each of them has each precision once,
in a process of its own. Of `auto` on a CPU also: the seconds that its measurement takes, and how
many times as fast as fp32 it finds bf16.

Prints and writes `results/precision.json` (`precision-cuda.json` on a GPU).
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import measurements
import project
import rounds

ABOUT = "models optim precision parallel tools/cpu_precision train"
CLASSES = 10
SKIPPED = 5  # steps before the clock starts
LONGEST = 20_000  # steps
EPOCH = 50  # steps of an epoch
PRECISIONS = ("fp32", "bf16", "auto")


class Task(NamedTuple):
    """What is trained."""

    network: str
    size: int
    batch: int
    width: int = 64  # of airbench


TASKS = {
    "resnet18-128": Task("resnet18", 128, 64),
    "resnet18-32": Task("resnet18", 32, 128),
    "airbench-32": Task("airbench", 32, 250, width=32),  # as in the preset `shapes`
    "mobilenet-128": Task("mobilenet_v3_small", 128, 64),  # of depthwise convolutions
    "efficientnet-128": Task("efficientnet_b0", 128, 32),  # of them, too
    "regnet-128": Task("regnet_y_400mf", 128, 32),  # of convolutions in groups
    "resnet50-224": Task("resnet50", 224, 16),
    "vit-224": Task("vit_s", 224, 16),
}


def build_config(task: Task, precision: str, device: str, folder: Path) -> Any:  # noqa: ANN401
    """A run of `LONGEST` steps on noise that is not augmented."""
    return project.build_config(
        precision=precision,
        epochs=LONGEST / EPOCH,
        data={
            "name": "noise",
            "image_size": task.size,
            "batch_size": task.batch,
            "cache": str(folder / "cache"),
            "where": "device",
        },
        model={"name": task.network, "width": task.width},
        compute={"device": device},
        run={"dir": str(folder / "run"), "log_every_steps": LONGEST},
    )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Images per second of one network in one precision."""
    import torch
    import torchvision  # noqa: F401 - a run imports it anyway: not part of what `auto` takes
    from image_classifier.tools.cpu_precision import precision as probe

    name, _, precision = options.contender.partition(":")
    task = TASKS[name]
    pixels = project.noise(EPOCH * task.batch, task.size, CLASSES, distinct=task.batch)
    project.offer_pixels("noise", *pixels)
    readings: list[tuple[int, rounds.Reading]] = []
    probes: list[dict[str, float]] = []
    own = probe.measure

    def measured(*words: Any) -> list[tuple[float, float]]:  # noqa: ANN401
        """What the measurement of `auto` finds; the clock is read before and after."""
        began = time.monotonic()
        found = own(*words)
        gain = probe.gain_of(found)
        probes.append({"probe_seconds": time.monotonic() - began, "probe_gain": gain})
        return found

    def read(done: int) -> float:
        """Read the clock when the device has done all that it was told to."""
        if options.device == "cuda":
            torch.cuda.synchronize()
        readings.append((done, rounds.Reading.now()))
        return time.monotonic()

    def timed(data: Any, start: int, stop: int, batches: Callable) -> Iterator[Any]:  # noqa: ANN401
        """Batches until enough time has passed; then the run is cut short."""
        ended, done = float("inf"), 0
        for batch in batches(data, start, stop):
            if done == SKIPPED:
                ended = read(done) + options.seconds
            if time.monotonic() > ended:
                break
            yield batch
            done += 1
        read(done)

    probe.measure = measured
    project.train(build_config(task, precision, options.device, folder), timed)
    (began, first), (ended, last) = readings
    took, count = last.since(first), (ended - began) * task.batch
    rates = {"images_per_second": count / took.seconds, "cpu_ms": 1e3 * took.cpu_seconds / count}
    return rates | (probes[0] if probes else {})


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="to train on")
    parser.add_argument("--seconds", type=float, default=5.0, help="timed per round (5)")
    options = parser.parse_args()
    if options.contender:
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as folder:
            rounds.give(measure, options, Path(folder))
        return
    names = [f"{task}:{precision}" for task in TASKS for precision in PRECISIONS]
    results, failures = rounds.compare(__file__, names, options)
    for task in TASKS:
        names = [f"{task}:{precision}" for precision in PRECISIONS]
        measurements.relate(results, "images_per_second", names, f"{task}:fp32")
    on = f"-{options.device}" * (options.device != "cpu")
    measurements.write(
        options.results / f"precision{on}.json",
        "Training steps in fp32, bf16 and as `auto` chooses",
        f"{options.seconds:g} s per round, after {SKIPPED} steps; batches of "
        f"{', '.join(f'{task.batch} ({name})' for name, task in TASKS.items())}. Medians (lowest "
        "to highest); ratios are taken within a round.",
        measurements.measured(results, failures, goals(results)),
    )


def goals(results: measurements.Results) -> list[dict[str, Any]]:
    """What was asked for, and what came out."""
    lines = []
    for task in TASKS:
        fp32, bf16, auto = (
            measurements.numbers(results, f"{task}:{precision}", "images_per_second")
            for precision in PRECISIONS
        )
        found = [one / max(others) for one, *others in zip(auto, fp32, bf16, strict=False)]
        lines.append(
            measurements.goal(f"{task}: auto to the better of fp32 and bf16", ">= 0.95", found)
        )
    return lines


if __name__ == "__main__":
    main()
