# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""Whole training: ResNet-18 at 128 pixels on the CPU, or ResNet-50 at 224 pixels on a GPU.

    python benchmarks/training.py                    # generated photographs, 500 x 375
    python benchmarks/training.py --root FOLDER      # yours: FOLDER/train/<class>/*.jpg
    python benchmarks/training.py --device cuda
    python benchmarks/training.py --device cuda --network resnet18 --size 128
    python benchmarks/training.py --rounds 1 --steps 20 --only examples ours     # a quick look

Everybody trains the same network from torchvision with the same crops, flips and batches, by SGD
with Nesterov momentum at a constant learning rate, so that losses at equal steps can be compared;
round r is the run with seed r. Where a loader asks for a number of workers it is two, or on a GPU
the number of cores. The clock starts after ten steps, or on a GPU after 60: while the network is
compiled, workers load two batches each. It stops after the last step; neither imports nor
evaluation are in it. On a GPU all but `examples`, which has no such switch, compile the network.

- `examples`: the loop of pytorch/examples, which is in float32
- `timm`: the components of timm and the loop of its train.py, channels_last; bf16, where the CPU
  or the GPU has instructions for it, else it would be slower than fp32
- `lightning`: Lightning's Trainer, likewise, around the loader of `examples`
- `ours-streamed`: `train` of a generated project, from the same files
- `ours-fp32-nchw`: from the raw cache of `prepare`, all else as in `examples`
- `ours-fp32`: and channels_last
- `ours`: and `--precision auto`, which is what a run takes if it is not told otherwise
- `ours-jpeg`: from the smaller cache of JPEGs
- `ours-synthetic`: from noise that lies in the device's memory: what the network alone could do

Prints and writes `results/training.json` (`training-cuda` on a GPU, `-<folder>` with `--root`).
"""

import argparse
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loaders
import measurements
import pictures
import project
import rounds

# What a step takes, beside the way of its images.
ABOUT = "augment models optim precision tools/cpu_precision tracking pace parallel train"
LR, MOMENTUM, WEIGHT_DECAY = 0.02, 0.9, 1e-4
LOGGED = 10  # steps in a row of our log: its loss is their mean
COMPARED = 20  # last steps whose mean loss is compared


@dataclass(frozen=True)
class Setup:
    """What is trained on a kind of device."""

    network: str
    title: str
    size: int
    batch: int
    workers: int
    compiled: bool
    skipped: int  # steps before the clock starts


SETUPS = {
    "cpu": Setup(
        "resnet18", "ResNet-18", size=128, batch=64, workers=2, compiled=False, skipped=10
    ),
    "cuda": Setup(
        "resnet50",
        "ResNet-50",
        size=224,
        batch=256,
        workers=len(os.sched_getaffinity(0)),
        compiled=True,
        skipped=60,
    ),
}


@dataclass
class Course:
    """What a run is, and what it leaves."""

    root: Path
    scratch: Path
    steps: int
    seed: int
    min_area: float
    device: str
    readings: list[rounds.Reading] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of each step, or of each few
    waited: float | None = None  # share of the time without images, of those who tell

    @property
    def setup(self) -> Setup:
        """What is trained there."""
        return SETUPS[self.device]

    @property
    def task(self) -> loaders.Task:
        """What the loaders are asked for."""
        setup = self.setup
        return loaders.Task(
            self.root,
            self.scratch,
            setup.size,
            setup.batch,
            self.min_area,
            setup.workers,
            device=self.device,
        )

    @property
    def num_classes(self) -> int:
        """How many classes the images have."""
        return len(list((self.root / "train").iterdir()))

    def watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of all steps; the clock is read on the way."""
        batches = iter(batches)
        for step in range(self.steps):
            if step == self.setup.skipped:
                self.read()
            yield next(batches)
        self.read()

    def read(self) -> None:
        """Read the clock, when the device has done all that it was told to."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        self.readings.append(rounds.Reading.now())

    def result(self) -> dict[str, float]:
        """Speed, and the mean loss of the last steps."""
        began, ended = self.readings
        took, count = ended.since(began), (self.steps - self.setup.skipped) * self.setup.batch
        last = self.losses[-COMPARED * len(self.losses) // self.steps :]
        return {
            "images_per_second": count / took.seconds,
            "cpu_ms": 1e3 * took.cpu_seconds / count,
            "loss": statistics.mean(last),
            **({} if self.waited is None else {"waited": self.waited}),
        }


class Meter:
    """The last value of a number, and its mean so far."""

    def __init__(self) -> None:
        self.last = self.total = self.count = 0.0

    def update(self, value: float, count: int = 1) -> None:
        """Add a value that is the mean of so many."""
        self.last, self.total, self.count = value, self.total + value * count, self.count + count

    def __str__(self) -> str:
        """The last and the mean."""
        return f"{self.last:.4f} ({self.total / max(1, self.count):.4f})"


def accuracy(output: Any, target: Any, ranks: tuple[int, ...]) -> list[Any]:  # noqa: ANN401
    """The share of the targets among so many of the best answers, in percent: (1,) each."""
    import torch

    with torch.no_grad():
        answers = output.topk(max(ranks), dim=1, largest=True, sorted=True).indices.t()
        right = answers.eq(target.view(1, -1).expand_as(answers))
        return [
            right[:rank].reshape(-1).float().sum(0, keepdim=True) * (100 / len(target))
            for rank in ranks
        ]


def network(course: Course) -> Any:  # noqa: ANN401 - a module, but torch is not imported up here
    """The network that everybody trains."""
    import torch
    from torchvision.models import get_model

    torch.manual_seed(course.seed)
    return get_model(course.setup.network, num_classes=course.num_classes).to(course.device)


def examples(course: Course) -> None:
    """The loop of pytorch/examples, restated: meters and `.item()` in each step, a line every ten.

    https://github.com/pytorch/examples/blob/main/imagenet/main.py
    """
    import time

    import torch

    model = network(course)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), LR, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY
    )
    device = torch.device(course.device)
    names = ("time", "data", "loss", "top1", "top5")
    meters = {name: Meter() for name in names}
    model.train()
    end = time.time()
    for step, (batch, labels) in enumerate(course.watched(loaders.pil_v1(course.task))):
        meters["data"].update(time.time() - end)
        images = batch.to(device, non_blocking=True)
        target = labels.to(device, non_blocking=True)

        output = model(images)
        loss = criterion(output, target)

        top1, top5 = accuracy(output, target, (1, 5))
        meters["loss"].update(loss.item(), len(images))
        meters["top1"].update(top1[0], len(images))
        meters["top5"].update(top5[0], len(images))
        course.losses.append(meters["loss"].last)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        meters["time"].update(time.time() - end)
        end = time.time()
        if step % 10 == 0:
            print(step, *(f"{name} {meters[name]}" for name in names), sep="\t")


def has_fast_bf16(device: str) -> bool:
    """Whether a peer gains by bf16."""
    flags = measurements.machine()["flags"]
    return device == "cuda" or not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def timm(course: Course) -> None:
    """The loop of timm's train.py, restated, with its loader and its optimizer.

    https://github.com/huggingface/pytorch-image-models/blob/main/train.py with
    `--channels-last --amp --amp-dtype bfloat16 --opt sgd --device cpu`, or `cuda --torchcompile`;
    without `--amp` where bf16 is slow.
    """
    import torch
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter

    model = network(course).to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(
        model, opt="sgd", lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    if course.setup.compiled:
        model = torch.compile(model)
    criterion = torch.nn.CrossEntropyLoss()
    losses = AverageMeter()
    model.train()
    optimizer.zero_grad()
    for batch, target in course.watched(loaders.timm_loader(course.task)):
        images = batch.contiguous(memory_format=torch.channels_last)
        with torch.autocast(course.device, torch.bfloat16, enabled=has_fast_bf16(course.device)):
            output = model(images)
            loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        course.losses.append(losses.val)


def lightning(course: Course) -> None:
    """Lightning's Trainer, with what only writes files or draws bars switched off.

    https://lightning.ai/docs/pytorch/stable/common/trainer.html
    """
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Classifier(LightningModule):
        """A network and how it learns."""

        def __init__(self) -> None:
            super().__init__()
            self.model = network(course)
            if course.setup.compiled:
                self.model = torch.compile(self.model)
            self.criterion = torch.nn.CrossEntropyLoss()

        def training_step(self, batch: tuple[Any, Any], _: int) -> Any:  # noqa: ANN401
            """The loss of a batch."""
            images, labels = batch
            loss = self.criterion(self.model(images), labels)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            """SGD."""
            return torch.optim.SGD(
                self.parameters(), LR, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY
            )

    class Clock(Callback):
        """Reads the clock, and keeps the losses where they are."""

        def on_train_batch_start(self, *arguments: object) -> None:
            """Before a step; the last argument is its number."""
            if arguments[-1] == course.setup.skipped:
                course.read()

        def on_train_batch_end(self, *arguments: Any) -> None:  # noqa: ANN401
            """After a step: trainer, module, outputs, batch and number."""
            course.losses.append(arguments[2]["loss"].detach())

        def on_train_end(self, *_: object) -> None:
            """After the last step."""
            course.read()

    trainer = Trainer(
        accelerator="gpu" if course.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if has_fast_bf16(course.device) else "32-true",
        max_steps=course.steps,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loaders.pil_v1_loader(course.task))
    course.losses = [float(loss) for loss in course.losses]


def ours(course: Course, cache: str = "raw", **knobs: Any) -> None:  # noqa: ANN401
    """`train` of a generated project."""
    if cache in ("raw", "jpeg"):
        loaders.prepare(course.root, course.scratch / cache, cache)
    config = build_config(course, cache, **knobs)
    if cache == "synthetic":
        size, batch = course.setup.size, course.setup.batch
        pixels = project.noise(images_of(course.root), size, course.num_classes, distinct=batch)
        project.offer_pixels("synthetic", *pixels)

    def watched(data: Any, start: int, stop: int, batches: Callable) -> Iterator[Any]:  # noqa: ANN401
        yield from course.watched(batches(data, start, stop))
        raise project.EnoughError

    project.train(config, watched)
    rows = map(json.loads, Path(config.run.dir, "metrics.jsonl").read_text().splitlines())
    rows = [row for row in rows if "train/loss" in row]
    course.losses = [row["train/loss"] for row in rows]
    timed = [row["train/waited_fraction"] for row in rows if row["step"] > course.setup.skipped]
    course.waited = statistics.mean(timed)


def build_config(
    course: Course, cache: str, precision: str = "auto", channels_last: bool = True
) -> Any:  # noqa: ANN401 - a config
    """The same training as that of all others: SGD at a constant rate, crops and flips."""
    synthetic = cache == "synthetic"
    return project.build_config(
        seed=course.seed,
        precision=precision,
        # Less than an epoch, and a step more than is measured: after the last one a run evaluates.
        epochs=(course.steps + 1) / (images_of(course.root) // course.setup.batch),
        data={
            "name": "synthetic" if synthetic else "folder",
            "root": str(course.root),
            "cache": str(course.scratch / cache),
            "image_size": course.setup.size,
            "batch_size": course.setup.batch,
            "where": "device" if synthetic else "stream",
        },
        augment={
            "crop": "none" if synthetic else "resized",
            "min_scale": course.min_area,
            "flip": "none" if synthetic else "random",
        },
        model={"name": course.setup.network},
        optim={"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
        compute={
            "device": course.device,
            "compile": course.setup.compiled,
            "channels_last": channels_last,
        },
        run={"dir": str(course.scratch / f"run-{cache}"), "log_every_steps": LOGGED},
    )


def images_of(root: Path) -> int:
    """How many training images there are."""
    return len(list(root.glob("train/*/*")))


CONTENDERS: dict[str, Callable[[Course], None]] = {
    "examples": examples,
    "timm": timm,
    "lightning": lightning,
    "ours-streamed": lambda course: ours(course, cache="none"),
    "ours-fp32-nchw": lambda course: ours(course, precision="fp32", channels_last=False),
    "ours-fp32": lambda course: ours(course, precision="fp32"),
    "ours": ours,
    "ours-jpeg": lambda course: ours(course, cache="jpeg"),
    "ours-synthetic": lambda course: ours(course, cache="synthetic"),
}


def main() -> None:
    """Compare."""
    from dataclasses import replace

    parser = rounds.parser(__doc__, rounds=3)
    loaders.add_options(parser)
    parser.add_argument("--device", choices=SETUPS, default="cpu", help="to train on (cpu)")
    parser.add_argument("--steps", type=int, default=100, help="per run, a multiple of 10 (100)")
    for what, kind in (("network", str), ("size", int), ("batch", int)):
        parser.add_argument(f"--{what}", type=kind, help="in place of that of the device")
    options = parser.parse_args()
    asked = {name: vars(options)[name] for name in ("network", "size", "batch")}
    asked = {name: value for name, value in asked.items() if value}
    title = {"title": asked["network"]} if "network" in asked else {}
    SETUPS[options.device] = replace(SETUPS[options.device], **asked, **title)
    if options.contender:

        def measured() -> dict[str, float]:
            result = contend(options)
            if options.device == "cuda":
                import torch

                result["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
            return result

        warnings.simplefilter("ignore")  # such as that there is no GPU to pin memory for
        rounds.give(measured)
        return
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (options.scratch or Path(temporary)).resolve()
        setup = SETUPS[options.device]
        left = max(loaders.LEFT, 2 * setup.workers)  # batches that workers load ahead
        what = loaders.make_long(options, scratch, (options.steps + left) * setup.batch)
        results, failures = rounds.compare(__file__, CONTENDERS, options, "--scratch", str(scratch))
        on = [options.device] if options.device != "cpu" else []
        on += [str(value) for value in asked.values()]
        name = "-".join(["training", *on, *([options.root.resolve().name] if options.root else [])])
        key = "images_per_second"
        measurements.relate(results, key, CONTENDERS, "examples")
        for other in ("timm", "lightning", "ours-synthetic"):
            measurements.relate(results, key, ["ours", "ours-streamed"], other)
        measurements.write(
            options.results / f"{name}.json",
            f"Whole training: {setup.title}, {setup.size} pixels, batches of {setup.batch}: {what}",
            f"{options.steps} steps a run, of which the first {setup.skipped} are not timed; "
            "round r is the run with seed r. Medians (lowest to highest); ratios are taken within "
            f"a round. The loss is the mean of the last {COMPARED} steps; waited is the share of "
            f"the time that the loop stood still for want of images. {losses_agree(results)}",
            measurements.measured(results, failures, goals(results)),
        )


def contend(options: argparse.Namespace) -> dict[str, float]:
    """Be one of the contenders, in a process of its own."""
    course = Course(
        options.scratch / "long",
        options.scratch,
        options.steps,
        options.round,
        options.min_area,
        options.device,
    )
    pictures.warm(course.root)
    CONTENDERS[options.contender](course)
    return course.result()


def goals(results: measurements.Results) -> list[dict[str, Any]]:
    """What was asked for, and what came out."""
    lines = []
    asked = ("ours", "examples", 2.5), ("ours", "ours-synthetic", 0.95)
    for name, other, least in (*asked, ("ours-streamed", "ours-synthetic", 0.95)):
        ratio = measurements.numbers(results, name, f"images_per_second x {other}")
        if {name, other} <= results.keys():
            what = f"images/s of {name} to those of {other}"
            lines.append(measurements.goal(what, f">= {least}", ratio))
    return lines


def losses_agree(results: measurements.Results) -> str:
    """How far the losses of ours are from the baseline's, in standard errors over seeds."""
    if not {"ours", "examples"} <= results.keys():
        return ""
    theirs, ours = (measurements.numbers(results, name, "loss") for name in ("examples", "ours"))
    apart = statistics.mean(ours) - statistics.mean(theirs)
    said = f"The mean loss of ours minus that of examples is {apart:+.3f}"
    if min(len(theirs), len(ours)) < 2:
        return f"{said} (one seed)."
    error = sum(statistics.variance(losses) / len(losses) for losses in (ours, theirs)) ** 0.5
    return f"{said}, {abs(apart) / error:.1f} standard errors (less than 2 is noise)."


if __name__ == "__main__":
    main()
