# ruff: noqa: PLC0415 - a contender's process imports what that contender needs, and nothing else
"""Whole training: ResNet-18 at 128 pixels, batches of 64 photographs, on the CPU.

    python benchmarks/training.py                    # generated photographs, 500 x 375
    python benchmarks/training.py --root FOLDER      # yours: FOLDER/train/<class>/*.jpg
    python benchmarks/training.py --rounds 1 --steps 20 --only examples ours     # a quick look

Everybody trains the same network from torchvision with the same crops, flips and batches, by SGD
with Nesterov momentum at a constant learning rate, so that losses at equal steps can be compared;
round r is the run with seed r. Two workers where a loader asks for a number. The clock runs from
the tenth step to the last; neither imports nor evaluation are in it.

- `examples`: the loop of pytorch/examples, which is in float32
- `timm`: the components of timm and the loop of its train.py, channels_last, bf16
- `lightning`: Lightning's Trainer, bf16-mixed, around the loader of `examples`
- `ours-streamed`: `train` of a generated project, from the same files
- `ours-fp32-nchw`: from the raw cache of `prepare`, all else as in `examples`
- `ours-fp32`: and channels_last
- `ours`: and bf16 where the CPU is fast at it: what the preset `folder` does on its own

Prints and writes `results/training.md` (`training-<folder>.md` with `--root`).
"""

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import loaders
import pictures
import rounds

SIZE, BATCH, WORKERS = 128, 64, 2
LR, MOMENTUM, WEIGHT_DECAY = 0.02, 0.9, 1e-4
SKIPPED = 10  # steps before the clock starts
LOGGED = 10  # steps in a row of our log: its loss is their mean
COMPARED = 20  # last steps whose mean loss is compared


@dataclass
class Course:
    """What a run is, and what it leaves."""

    root: Path
    scratch: Path
    steps: int
    seed: int
    min_area: float
    readings: list[rounds.Reading] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of each step, or of each few

    @property
    def task(self) -> loaders.Task:
        """What the loaders are asked for."""
        return loaders.Task(self.root, self.scratch, SIZE, BATCH, self.min_area, WORKERS)

    @property
    def num_classes(self) -> int:
        """How many classes the images have."""
        return len(list((self.root / "train").iterdir()))

    def watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of all steps; the clock is read on the way."""
        batches = iter(batches)
        for step in range(self.steps):
            if step == SKIPPED:
                self.readings.append(rounds.Reading.now())
            yield next(batches)
        self.readings.append(rounds.Reading.now())

    def result(self) -> dict[str, float]:
        """Speed, and the mean loss of the last steps."""
        began, ended = self.readings
        took, count = ended.since(began), (self.steps - SKIPPED) * BATCH
        last = self.losses[-COMPARED * len(self.losses) // self.steps :]
        return {
            "images_per_second": count / took.seconds,
            "cpu_ms": 1e3 * took.cpu_seconds / count,
            "loss": statistics.mean(last),
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
    from torchvision.models import resnet18

    torch.manual_seed(course.seed)
    return resnet18(num_classes=course.num_classes)


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
    device = torch.device("cpu")
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


def timm(course: Course) -> None:
    """The loop of timm's train.py, restated, with its loader and its optimizer.

    https://github.com/huggingface/pytorch-image-models/blob/main/train.py with
    `--channels-last --amp --amp-dtype bfloat16 --opt sgd --device cpu`.
    """
    import torch
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter

    model = network(course).to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(
        model, opt="sgd", lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    criterion = torch.nn.CrossEntropyLoss()
    losses = AverageMeter()
    model.train()
    optimizer.zero_grad()
    for batch, target in course.watched(loaders.timm_loader(course.task)):
        images = batch.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
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
            if arguments[-1] == SKIPPED:
                course.readings.append(rounds.Reading.now())

        def on_train_batch_end(self, *arguments: Any) -> None:  # noqa: ANN401
            """After a step: trainer, module, outputs, batch and number."""
            course.losses.append(arguments[2]["loss"].detach())

        def on_train_end(self, *_: object) -> None:
            """After the last step."""
            course.readings.append(rounds.Reading.now())

    trainer = Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=course.steps,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loaders.pil_v1_loader(course.task))
    course.losses = [float(loss) for loss in course.losses]


def ours(course: Course, cache: str = "raw", **compute: Any) -> None:  # noqa: ANN401
    """`train` of a generated project with the preset `folder`, but SGD at a constant rate."""
    from image_classifier import optim
    from image_classifier.loader import TrainData
    from image_classifier.presets import folder
    from image_classifier.train import train

    if cache == "raw":
        loaders.prepare(course.root, course.scratch / cache, cache)
    optim.SCHEDULES["constant"] = lambda _: 1.0
    batches = TrainData.batches
    TrainData.batches = lambda *arguments: course.watched(batches(*arguments))
    config = folder()
    run = course.scratch / "run"
    config = replace(
        config,
        seed=course.seed,
        precision=compute.pop("precision", config.precision),
        # Less than an epoch, however many steps are asked for.
        epochs=course.steps / (images_of(course.root) // BATCH),
        data=replace(config.data, root=str(course.root), cache=str(course.scratch / cache)),
        augment=replace(config.augment, min_area=course.min_area),
        optim=replace(
            config.optim,
            name="sgd",
            lr=LR,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            schedule="constant",
            warmup_epochs=0,
            label_smoothing=0,
        ),
        compute=replace(config.compute, **compute),
        run=replace(
            config.run,
            dir=str(run),
            fresh=True,
            log_every_steps=LOGGED,
            evaluate_every_epochs=1e6,
            tensorboard=False,
        ),
    )
    train(config)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    course.losses = [row["train/loss"] for row in rows if "train/loss" in row]


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
}


def main() -> None:
    """Compare."""
    parser = rounds.parser(__doc__, rounds=3)
    loaders.add_options(parser)
    parser.add_argument("--steps", type=int, default=100, help="per run, a multiple of 10 (100)")
    options = parser.parse_args()
    if options.contender:
        warnings.simplefilter("ignore")  # such as that there is no GPU to pin memory for
        rounds.give(contend, options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        compare(options, (options.scratch or Path(temporary)).resolve())


def contend(options: argparse.Namespace) -> dict[str, float]:
    """Be one of the contenders, in a process of its own."""
    course = Course(
        options.scratch / "long",
        options.scratch,
        options.steps,
        options.round,
        options.min_area,
    )
    CONTENDERS[options.contender](course)
    return course.result()


def compare(options: argparse.Namespace, scratch: Path) -> None:
    """Make the folder, let everybody have their turns, and write the table."""
    scratch.mkdir(parents=True, exist_ok=True)
    long = scratch / "long"
    if not long.exists():
        root = options.root or pictures.generate(scratch / "photographs", options.distinct)
        pictures.lengthen(root.resolve(), long, (options.steps + loaders.LEFT) * BATCH)
    pictures.warm(long)
    results, failures = rounds.compare(__file__, CONTENDERS, options, "--scratch", str(scratch))
    name = f"training-{options.root.resolve().name}" if options.root else "training"
    what = options.root.name if options.root else "generated photographs, 500 x 375"
    key, baseline = "images_per_second", "examples"
    rows = []
    for contender in results:
        ratio = rounds.ratios(results, key, contender, baseline) if baseline in results else []
        rows.append(
            [
                contender,
                rounds.spread(rounds.values(results, contender, key), 1),
                rounds.spread(ratio),
                rounds.spread(rounds.values(results, contender, "cpu_ms"), 1),
                rounds.spread(rounds.values(results, contender, "loss"), 3),
            ]
        )
    headers = ["", "images/s", f"x {baseline}", "CPU ms per image", "loss at the end"]
    both = "ours" in results and baseline in results
    ratio = rounds.ratios(results, key, "ours", baseline) if both else None
    rounds.write(
        options.results,
        name,
        f"Whole training: ResNet-18, {SIZE} pixels, batches of {BATCH}: {what}",
        f"{options.steps} steps a run, of which the first {SKIPPED} are not timed; "
        f"{options.rounds} runs of each, with seeds of their own. Medians (lowest..highest); "
        f"ratios are taken within a round. The loss is the mean of the last {COMPARED} steps.",
        rounds.table(headers, rows),
        rounds.goal("images/s of ours to those of examples", ratio, 2.5, at_most=False),
        losses_agree(results) if both else "",
        rounds.missing(failures),
    )


def losses_agree(results: rounds.Results) -> str:
    """How far the losses of ours are from the baseline's, in deviations between seeds."""
    theirs, ours = (rounds.values(results, name, "loss") for name in ("examples", "ours"))
    apart = statistics.mean(ours) - statistics.mean(theirs)
    if min(len(theirs), len(ours)) < 2:
        return f"- mean loss of ours minus that of examples: {apart:+.3f} (one seed)"
    error = sum(statistics.variance(losses) / len(losses) for losses in (ours, theirs)) ** 0.5
    return (
        f"- mean loss of ours minus that of examples: {apart:+.3f}, which is "
        f"{abs(apart) / error:.1f} standard errors (less than 2 is noise)"
    )


if __name__ == "__main__":
    main()
