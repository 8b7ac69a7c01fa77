# ruff: noqa: PLC0415 - the processes that measure import torch, the one that starts them does not
"""What several processes cost and gain: images/s, the exchange of gradients, a save, a restart.

    python benchmarks/scale.py
    python benchmarks/scale.py --rounds 1 --blocks 2        # a quick look

ResNet-18 learns from noise, with the batch divided between 1, 2 and 3 processes on this machine. A
step is that of `train`, from the forward pass to the optimizer, and steps of all kinds take turns:

- `fp32`, `bf16`: with `--compute.gradient_dtype` of that name
- `alone`: no gradient is exchanged
- `after`: all are exchanged, as one tensor, when the backward pass is over
- `buffers`, `static`: fp32, where DDP also broadcasts buffers, or has `static_graph`
- `fsdp`: fp32, with `--compute.parallel fsdp`

The exchange is what `after` takes more than `alone`; what `fp32` takes less than `after` is hidden
behind the backward pass. Gradients are counted where DDP hands them over, bytes on the network
where Linux counts those of the loopback interface, of all processes together. What is kept are the
weights and the momentum of one process.

`restart`: a run of 2 processes, one of which is killed, until its next step; and a save.

Prints and writes `results/scale.json`.
"""

import argparse
import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import measurements
import project
import rounds

ABOUT = "train parallel precision optim checkpoints runtime/distributed runtime/launch"
ABOUT += " models/torchvision tools/fsdp/shards"
CLASSES, STEPS = 10, 3  # steps of a kind in a turn
KINDS = ("fp32", "bf16", "alone", "after", "buffers", "static", "fsdp")
ON_NETWORK = {"fp32": "network_mb", "fsdp": "fsdp_network_mb"}
NAMES = {"1 process": 1, "2 processes": 2, "3 processes": 3}
RUN = "shapes --data.limit 96 --epochs 200 --optim.warmup-epochs 1 --model.name resnet18"
RUN += " --run.trackers --run.log-every-steps 1 --run.processes 2 --compute.device cpu"
RUN += " --precision fp32"  # else it is measured first


def build_config(options: argparse.Namespace, gradients: str = "fp32") -> Any:  # noqa: ANN401
    """ResNet-18 in float32, which learns slowly enough to stay finite on noise."""
    return project.build_config(
        data={"image_size": options.side, "batch_size": options.batch},
        optim={"lr": 1e-3},
        compute={"gradient_dtype": gradients},
    )


def measure(size: int, options: argparse.Namespace) -> dict[str, float]:
    """What `size` processes measure, as rank 0 tells it."""
    import torch.multiprocessing as mp

    with mp.get_context("spawn").Manager() as manager:
        found = manager.dict()
        mp.spawn(measure_rank, (size, options, uuid.uuid4().hex, found), nprocs=size)
        return dict(found)


def measure_rank(
    rank: int, size: int, options: argparse.Namespace, job: str, found: dict[str, float]
) -> None:
    """Time steps of all kinds as a rank, and let rank 0 put the numbers into `found`."""
    import torch
    from image_classifier.runtime.distributed import join_world

    warnings.simplefilter("ignore")
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": job}
    os.environ |= {name: str(value) for name, value in told.items()}
    with join_world(build_config(options).compute) as world:
        torch.manual_seed(0)
        kinds = KINDS if size > 1 else ("alone",)
        steps = {kind: build_step(kind, options, world) for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        sent: dict[str, list[float]] = {kind: [] for kind in ON_NETWORK}
        for block in range(1 + options.blocks):  # the first is for warming up
            for kind, step in steps.items():
                world.all_true(True)
                before, began = bytes_sent(), time.perf_counter()
                for _ in range(STEPS):
                    step()
                world.all_true(True)
                if block:
                    times[kind].append((time.perf_counter() - began) / STEPS)
                if block and kind in sent:
                    sent[kind].append((bytes_sent() - before) / STEPS)
        if world.is_main:
            found.update(summary(times, sent, options.batch))
        if size > 1:
            kept = {kind: bytes_kept(steps[kind].optimizer) for kind in ("fp32", "fsdp")}
            handed = {kind: handed_over(kind, options, world) for kind in ("fp32", "bf16")}
            if world.is_main:
                told = {f"{kind}_gradient_mb": count / 1e6 for kind, count in handed.items()}
                found.update(told | {f"{kind}_kept_mb": n / 1e6 for kind, n in kept.items()})


def summary(
    times: dict[str, list[float]], sent: dict[str, list[float]], batch: int
) -> dict[str, float]:
    """Medians of what was timed, and differences of medians."""
    seconds = {kind: statistics.median(found) for kind, found in times.items()}
    best = seconds.get("fp32", seconds["alone"])
    told = {"images_per_second": batch / best}
    told |= {f"{kind}_ms": 1e3 * found for kind, found in seconds.items()}
    if "after" in seconds:
        told["exchange_ms"] = 1e3 * (seconds["after"] - seconds["alone"])
        told["hidden_ms"] = 1e3 * (seconds["after"] - seconds["fp32"])
        told |= {ON_NETWORK[kind]: statistics.median(count) / 1e6 for kind, count in sent.items()}
    return told


def build_step(kind: str, options: argparse.Namespace, world: Any) -> Callable[[], None]:  # noqa: ANN401
    """A function that trains a network of its own for a step; it has its `optimizer`."""
    import torch
    import torch.distributed as dist
    from image_classifier.data import Augmented
    from image_classifier.models import build_model
    from image_classifier.optim import build_optimizer
    from image_classifier.parallel import Replicas
    from image_classifier.precision import Precision
    from image_classifier.tasks import Loss, class_loss
    from image_classifier.tools.fsdp.shards import Shards
    from image_classifier.train import train_step
    from torch.nn.parallel import DistributedDataParallel

    share, side = options.batch // world.size, options.side
    config = build_config(options, "bf16" if kind == "bf16" else "fp32")
    model = build_model(config.model, CLASSES, side).to(memory_format=torch.channels_last)
    precision = Precision("fp32", config.compute, config.optim, world.device)
    ranks = (Shards if kind == "fsdp" else Replicas)(config.compute, world)
    ranks.shard([model], precision)
    optimizer = ranks.own(build_optimizer(config.optim, model))
    if kind == "static":
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        ddp_model.broadcast_buffers = False
    else:
        ddp_model = ranks.wrap(model)
        ddp_model.broadcast_buffers = kind == "buffers"
    exchanges = kind not in ("alone", "after") or world.size == 1
    images = torch.randn(share, 3, side, side).to(memory_format=torch.channels_last)
    batch = Augmented(images, torch.arange(share) % CLASSES)
    loss_fn = Loss(class_loss(config.optim, share))

    def step() -> None:
        with nullcontext() if exchanges else ddp_model.no_sync():
            train_step(ddp_model, batch, loss_fn, precision, share)
        if kind == "after":
            gradients = [weight.grad for weight in model.parameters()]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.div_(world.size).split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        precision.step(optimizer)

    step.optimizer = optimizer
    return step


def bytes_kept(optimizer: Any) -> int:  # noqa: ANN401
    """What one process keeps from step to step: its weights, and the state of each."""
    from image_classifier.runtime.distributed import local_part

    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(local_part(tensor).nbytes for tensor in (*weights, *states) if tensor is not None)


def handed_over(kind: str, options: argparse.Namespace, world: Any) -> int:  # noqa: ANN401
    """Bytes of gradients that a rank hands over for a sum in a step."""
    import torch.distributed as dist
    from image_classifier import train
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    counted, reduce = [], dist.all_reduce
    register = train.DistributedDataParallel.register_comm_hook

    def count(tensor: Any, **knobs: Any) -> Any:  # noqa: ANN401 - as `all_reduce` has it
        counted.append(tensor.nbytes)
        return reduce(tensor, **knobs)

    def registered(*arguments: object, **knobs: Any) -> None:  # noqa: ANN401 - of DDP
        build(*arguments, **knobs)
        if kind == "fp32":  # without a hook, DDP does the same out of sight
            register(arguments[0], None, default_hooks.allreduce_hook)

    build = train.DistributedDataParallel.__init__
    train.DistributedDataParallel.__init__ = registered
    step = build_step(kind, options, world)
    train.DistributedDataParallel.__init__ = build
    dist.all_reduce = count
    step()
    dist.all_reduce = reduce
    return sum(counted)


def bytes_sent() -> int:
    """Bytes that went through the loopback interface since it exists: see `proc_pid_net(5)`."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def restart(options: argparse.Namespace) -> dict[str, float]:
    """Seconds from the kill of a process to the next step of the run; and what a save takes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(measurements.PROJECT / "train.py"), *RUN.split()]
        command += ["--data.image-size", str(options.side), "--data.batch-size", str(options.batch)]
        command += ["--run.dir", folder]
        run = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        lines = iter(run.stdout.readline, "")  # type: ignore[union-attr]
        began = time.perf_counter()
        try:
            until(lines, r"step +\d")
            first = time.perf_counter() - began
            until(lines, r"step +4/")
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            began = time.perf_counter()
            os.kill(int(children[-1]), 9)
            until(lines, "restart 1 of 3")
            told = time.perf_counter() - began
            until(lines, r"step +\d")
            again = time.perf_counter() - began
        finally:
            run.terminate()
            run.communicate()
        found = {"start_seconds": first, "seconds_until_told": told, "restart_seconds": again}
        return found | save(options, Path(folder, "save"))


def until(lines: Any, pattern: str) -> None:  # noqa: ANN401 - an iterator of str
    """Read lines to the first that begins so, or has these words.

    Raises:
        RuntimeError: if the run ends before.
    """
    said = []
    for line in lines:
        said.append(line)
        if re.search(pattern, line):
            return
    raise RuntimeError("".join(said[-5:]).replace("\n", " ") or "the run said nothing")


def save(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Milliseconds in which a save holds up training, and until it is on the disk; its size."""
    import torch
    from image_classifier.checkpoints.saving import Checkpoints
    from image_classifier.checkpoints.state import TrainState
    from image_classifier.data.datasets.source import Source
    from image_classifier.models import build_model
    from image_classifier.optim import build_optimizer
    from image_classifier.precision import Precision
    from image_classifier.runtime.distributed import World

    config = build_config(options)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))
    model = build_model(config.model, CLASSES, options.side)
    optimizer = build_optimizer(config.optim, model)
    precision = Precision("fp32", config.compute, config.optim, torch.device("cpu"))
    model(torch.randn(2, 3, options.side, options.side)).sum().backward()
    precision.step(optimizer)  # which gives it momentum
    state = TrainState(model, optimizer, precision)
    labels, pixels = project.noise(CLASSES, options.side, CLASSES, CLASSES)[::-1]
    classes = tuple(map(str, range(CLASSES)))
    source = Source(labels, classes, pixels=pixels)
    with Checkpoints(config, World(torch.device("cpu")), source) as checkpoints:
        began = time.perf_counter()
        checkpoints.save(state, {"loss": 0.0, "step": 0})
        held = time.perf_counter() - began
        checkpoints.wait()
        done = time.perf_counter() - began
    size = (folder / "checkpoints" / "last.pt").stat().st_size
    return {"save_holds_ms": 1e3 * held, "save_ms": 1e3 * done, "checkpoint_mb": size / 1e6}


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=2)
    parser.add_argument("--blocks", type=int, default=6, help=f"of {STEPS} steps of a kind (6)")
    parser.add_argument("--batch", type=int, default=24, help="images per step, in all (24)")
    parser.add_argument("--side", type=int, default=16, help="of an image, in pixels (16)")
    options = parser.parse_args()
    if options.contender:
        warnings.simplefilter("ignore")
        size = NAMES.get(options.contender)
        rounds.give(*((measure, size, options) if size else (restart, options)))
        return
    measurements.write(
        options.results / "scale.json",
        "Several processes",
        f"ResNet-18, {options.batch} images of {options.side} x {options.side} per step in all, "
        f"float32; medians over {options.blocks} blocks of {STEPS} steps of each kind.",
        measurements.measured(*rounds.compare(__file__, [*NAMES, "restart"], options)),
    )


if __name__ == "__main__":
    main()
