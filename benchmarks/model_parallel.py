# ruff: noqa: PLC0415 - the process that measures imports torch, the one that starts it does not
"""ResNet-50 on two devices: halves of the network, or copies of it. Here a device is a CPU core.

    python benchmarks/model_parallel.py
    python benchmarks/model_parallel.py --rounds 1 --blocks 1 --model resnet18      # a quick look

The code is that of `docs/examples/model_parallel.py` in the project, and of its `train.py`.
All variants train on the same batch of noise, and take turns, a step each:

- one process: the whole network, with as many threads as there are devices
- split: the same with its two halves one after the other, as on two GPUs of one process
- DDP: two processes, each with the whole network and half of the batch
- pipeline of m: two processes, each with half of the network, and the batch in m micro-batches

Prints and writes `results/model_parallel.json`.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import measurements
import project
import rounds

ABOUT = "models optim parallel precision train"
EXAMPLE = measurements.PROJECT / "docs" / "examples" / "model_parallel.py"
SIDE, CLASSES = 32, 10
MICRO_BATCHES = (1, 2, 4, 8)
DEVICES = 2
NAMES = ["one process", "split", "DDP", *(f"pipeline of {m}" for m in MICRO_BATCHES)]


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Images per second of each variant for as many processes as this is one of."""
    import torch
    import torch.distributed as dist
    from image_classifier.precision import Precision
    from image_classifier.runtime.distributed import join_world

    config = project.build_config(
        data={"image_size": SIDE, "batch_size": options.batch}, model={"name": options.model}
    )
    with join_world(config.compute) as world:
        torch.manual_seed(0)
        images = torch.randn(options.batch, 3, SIDE, SIDE)
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(CLASSES, (options.batch,))
        precision = Precision("fp32", config.compute, config.optim, world.device)
        steps = variants(config, world, precision)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(1 + options.blocks):
            for name, step in steps.items():
                if world.size > 1:
                    dist.barrier()
                began = time.perf_counter()
                step(images, labels)
                if world.size > 1:
                    dist.barrier()
                seconds[name].append(time.perf_counter() - began)
    # The first step of each is for warming up.
    return {name: options.batch / statistics.median(found[1:]) for name, found in seconds.items()}


def variants(config: Any, world: Any, precision: Any) -> dict[str, Callable[..., None]]:  # noqa: ANN401
    """The training step of each variant, a function of all images and labels."""
    import torch
    from image_classifier.data import Augmented
    from image_classifier.models import build_model
    from image_classifier.optim import build_optimizer
    from image_classifier.parallel import Replicas
    from image_classifier.tasks import Loss, class_loss
    from image_classifier.train import train_step

    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    batch, share = config.data.batch_size, world.local_slice(config.data.batch_size)

    def built() -> Any:  # noqa: ANN401
        model = build_model(config.model, CLASSES, SIDE)
        return model.to(memory_format=precision.memory_format)

    def updated(model: Any, run: Callable[..., Any]) -> Callable[..., None]:  # noqa: ANN401
        optimizer = build_optimizer(config.optim, model)

        def step(images: torch.Tensor, labels: torch.Tensor) -> None:
            run(images, labels)
            precision.step(optimizer)

        return step

    def of_train(model: Any) -> Callable[..., None]:  # noqa: ANN401
        part = batch // world.size
        loss_fn = Loss(class_loss(config.optim, part))
        return updated(
            model,
            lambda images, labels: train_step(
                model, Augmented(images[share], labels[share]), loss_fn, precision, part
            ),
        )

    if world.size == 1:
        split = example.Split(built(), [world.device] * DEVICES)
        return {"one process": of_train(built()), "split": of_train(split)}
    loss_fn = Loss(class_loss(config.optim, batch))
    pipelines = {
        f"pipeline of {m}": updated(*example.pipeline_step(built(), world, loss_fn, "1f1b", m))
        for m in MICRO_BATCHES
        if m >= DEVICES
    }
    naive = updated(*example.pipeline_step(built(), world, loss_fn, "gpipe", 1))
    return {
        "DDP": of_train(Replicas(config.compute, world).wrap(built())),
        "pipeline of 1": naive,
    } | pipelines


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=2)
    parser.add_argument("--blocks", type=int, default=3, help="steps of each in a round (3)")
    parser.add_argument("--batch", type=int, default=16, help="images per step (16)")
    parser.add_argument("--model", default="resnet50", help="one of torchvision's (resnet50)")
    options = parser.parse_args()
    if "RANK" in os.environ or options.contender == "1":
        found = measure(options)
        if os.environ.get("RANK", "0") == "0":
            rounds.give(lambda: found)
        return
    if options.contender:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(DEVICES)]
        subprocess.run([*torchrun, *sys.argv], check=True)
        return
    found, failures = rounds.compare(__file__, ["1", str(DEVICES)], options)
    both = [one | two for one, two in zip(*found.values(), strict=True)] if len(found) > 1 else []
    results = {name: [{"images_per_second": each[name]} for each in both] for name in NAMES}
    measurements.relate(results, "images_per_second", NAMES[1:], NAMES[0])
    measurements.write(
        options.results / "model_parallel.json",
        "ResNet-50 on two devices, each a core",
        f"Training steps of {options.model}, {options.batch} images of {SIDE} x {SIDE}, float32: "
        f"medians of {options.blocks} steps in each round.",
        measurements.measured(results, failures),
    )


if __name__ == "__main__":
    main()
