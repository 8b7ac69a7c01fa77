"""Classic mistakes, looked for before the first step: what can't be right, and what may be meant.

A rule is a function of a `Start`. One in `REFUSALS` raises `UserError` where a run would fail or
count wrong; one in `DOUBTS` returns a line about what is most likely wrong, and the run goes on.
All of them together take a few milliseconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..config import Config, OptimConfig, UserError, flag
from ..data import EvalData, TrainData, check_numbers, highest_in_file, is_dark, scale_of_grey
from ..models.torchvision import SMALL_IMAGE
from ..optim import SCHEDULES
from ..runtime.console import some
from .trackers import check_installed

# A learning rate, the batch that it is usual for, the power of the batch that it grows by, and why.
USUAL_LR = {
    "sgd": (0.1, 256, 1.0, "https://arxiv.org/abs/1706.02677"),  # with a momentum of 0.9
    "adamw": (1e-3, 512, 0.5, "https://arxiv.org/abs/2205.10287"),
    "muon": (3e-3, 512, 0.5, "https://arxiv.org/abs/2502.16982"),  # as AdamW's, and short runs more
}
FAR = 20  # times the usual learning rate, or a part of it: published recipes are within 10
FEW_FOR_BATCHNORM = 8  # images, below which accuracy suffers: https://arxiv.org/abs/1803.08494
LONG_WARMUP = 0.5  # share of the run
PROBES = 64  # training files that are looked into
COSTLY = 1.5  # times an image of 128 pixels
DEEP_SUFFIXES = (".png", ".tif", ".tiff")  # of files that may have 16 bits per pixel
SKEWED = 10  # times as many images as of the smallest class


@dataclass(frozen=True)
class Start:
    """What a run is about to begin with."""

    config: Config
    model: nn.Module  # on the device, and not wrapped
    train_data: TrainData
    val_data: EvalData
    lr_at: Callable[[int], float]
    total_steps: int


def find_mistakes(start: Start) -> list[str]:
    """Refuse what can't be right; a line on each thing that may be wrong, on rank 0 alone.

    Raises:
        UserError: if a run could only fail or count wrong.
    """
    check_installed(start.config.run.trackers)
    for refuse in REFUSALS:
        refuse(start)
    doubts = [doubt(start) for doubt in DOUBTS] if start.train_data.world.is_main else []
    return [line for line in doubts if line]


def labels_outside_head(start: Start) -> None:
    """Each label is the number of a class and of an output: a GPU stops on others without a name.

    torch's cross entropy passes over -100 without a word.
    """
    train, val = start.train_data.source, start.val_data.source
    if train.classes != val.classes:
        raise UserError(
            f"the classes of the validation images ({some(val.classes)}) are not those of the "
            f"training images ({some(train.classes)}): a label would mean two things"
        )
    check_numbers(train, "training")
    check_numbers(val, "validation")
    count = len(train.classes)
    matrices = [weight for weight in start.model.parameters() if weight.ndim > 1]
    if matrices and len(matrices[-1]) == count:  # as good as sure, and costs nothing
        return
    logits, _ = look(start.model, start.config.data.image_size)
    if logits.shape[1:] != (count,):
        raise UserError(
            f"--model.name {start.config.model.name} gives {tuple(logits.shape[1:])} values for "
            f"an image, where there are {count} classes: its last layer must have as many outputs"
        )


def lonely_batchnorm(start: Start) -> None:
    """BatchNorm in training needs two values of each channel: torch fails in the first step else.

    One image has them where it is still larger than a pixel.
    """
    count = num_together(start)
    if count > 1:
        return
    _, norms = look(start.model, start.config.data.image_size)
    if norms:
        batch_size, accumulate = start.config.data.batch_size, start.config.optim.accumulate
        processes = start.train_data.world.size
        parts = processes * accumulate
        group = ", or --model.norm group" if start.config.model.name == "resnet9" else ""
        raise UserError(
            f"--data.batch-size {batch_size} leaves {count} image to each of {parts} parts "
            f"({processes} processes x --optim.accumulate {accumulate}), and the BatchNorm "
            f"{norms[0]} would see 1 value of each channel, where it needs 2: take a batch size "
            f"of {2 * parts} or more, or fewer parts{group}"
        )


def sizes_unfit_for_model(start: Start) -> None:
    """Images of all sizes that a run will have: it is soon said here, and hours later else."""
    data, augment = start.config.data, start.config.augment
    for knob, size in (
        ("data.test_size", data.test_size),
        ("augment.min_size", augment.min_size),
    ):
        if size in (0, data.image_size):
            continue
        try:
            look(start.model, size)
        except (RuntimeError, AssertionError, UserError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{start.config.model.name}, built for --data.image-size {data.image_size}, can't "
                f"take images of --{flag(knob)} {size}: {reason}"
            ) from error


def schedule_beyond_run(start: Start) -> None:
    """The schedule ends with the run: one made for more steps never cools down, or comes too late.

    https://arxiv.org/abs/1608.03983: most of what is gained is gained where the rate is low.
    """
    optim, last = start.config.optim, start.total_steps
    end, expected = start.lr_at(last), optim.lr * SCHEDULES[optim.schedule](1.0)
    if abs(end - expected) > 0.01 * optim.lr:
        raise UserError(
            f"the schedule of the learning rate does not end with the run: after {last:,} steps, "
            f"the last, it is at {end:.3g}, and --optim.schedule {optim.schedule} ends at "
            f"{expected:.3g}; `build_schedule` is to be given total_steps of the run"
        )


def shuffled_evaluation(start: Start) -> None:
    """Over all ranks each validation image is seen once, in order, and with its own label.

    A sampler that pads counts some twice (https://github.com/pytorch/pytorch/issues/25162), and
    one that shuffles parts images from what is said of them.
    """
    data, world = start.val_data, start.val_data.world
    indices = data.indices
    seen = torch.bincount(indices, minlength=len(data.source))
    seen = world.sum(seen.to(world.device))
    left_out, repeated = int((seen == 0).sum()), int((seen > 1).sum())
    if left_out or repeated:
        raise UserError(
            f"evaluation is to see each of the {len(seen):,} validation images once over all "
            f"processes, but leaves out {left_out:,} and repeats {repeated:,}: EvalData.indices"
        )
    own_labels = torch.equal(data.labels.cpu(), data.source.labels[data.indices])
    if not world.agree(own_labels and bool((indices[1:] > indices[:-1]).all())):
        raise UserError(
            "evaluation is to see the validation images in their order and with their labels, "
            "but they are shuffled: EvalData.indices and EvalData.labels"
        )


def unusual_lr(start: Start) -> str:
    """The learning rate goes with the optimizer and the batch over all processes."""
    optim, batch_size = start.config.optim, start.config.data.batch_size
    usual = usual_lr(optim, batch_size)
    if usual is None or usual / FAR <= optim.lr <= usual * FAR:
        return ""
    if optim.lr < usual and optim.lr > 0 and start.config.run.init_from:
        return ""  # trained weights want smaller steps
    ratio = optim.lr / usual
    times = f"{ratio:,.0f} x" if ratio > 1 else f"1/{1 / ratio:,.0f} of" if ratio else "0 x"
    return (
        f"--optim.lr {optim.lr:g} is {times} what is usual for {optim.name} and batches of "
        f"{batch_size} ({USUAL_LR[optim.name][-1]}), which is about {usual:.1g}"
    )


def usual_lr(optim: OptimConfig, batch_size: int) -> float | None:
    """What most recipes have for this optimizer and global batch; None for one not in the table."""
    if optim.name not in USUAL_LR:
        return None
    lr, base, power, _ = USUAL_LR[optim.name]
    # Momentum adds up a gradient 1 / (1 - momentum) times. Adam's and Muon's average them.
    steps = (1 - optim.momentum) / (1 - 0.9) if optim.name == "sgd" else 1.0
    return lr * (batch_size / base) ** power * steps


def long_warmup(start: Start) -> str:
    """Warm-up is for the first steps of a run: https://arxiv.org/abs/1706.02677 has 5 epochs of 90.

    It is often what is left of a longer run when --epochs is made smaller.
    """
    warmup, epochs = start.config.optim.warmup_epochs, start.config.epochs
    if warmup <= LONG_WARMUP * epochs:
        return ""
    return (
        f"--optim.warmup-epochs {warmup:g} is {warmup / epochs:.0%} of the run, and the learning "
        f"rate has no time to fall; about {0.2 * epochs:.1g} is usual for --epochs {epochs:g}"
    )


def few_for_batchnorm(start: Start) -> str:
    """Statistics of a few images are noise: https://arxiv.org/abs/1803.08494, figure 5."""
    count, batch_size = num_together(start), start.config.data.batch_size
    norms = any(isinstance(layer, _BatchNorm) for layer in start.model.modules())
    if count >= FEW_FOR_BATCHNORM or not norms:
        return ""
    return (
        f"BatchNorm takes its statistics from {count} of the {batch_size} images of a batch at a "
        f"time, which is less than {FEW_FOR_BATCHNORM}: fewer and larger parts, or GroupNorm "
        "(https://arxiv.org/abs/1803.08494)"
    )


def skewed_classes(start: Start) -> str:
    """A class that is hardly ever seen is hardly ever answered: https://arxiv.org/abs/1901.05555."""
    source = start.train_data.source
    sizes = torch.bincount(source.labels)
    smallest, largest = int(sizes[sizes > 0].min()), int(sizes.max())
    if largest <= SKEWED * smallest or start.config.data.balance != "none":
        return ""
    return (
        f"the largest class has {largest:,} training images and the smallest {smallest:,}, which "
        "so counts for little: --data.balance sampling or loss makes all count alike"
    )


def costly_stem(start: Start) -> str:
    """Up to 64 pixels first layers keep full resolution, which is made for 32: CIFAR's images."""
    model, size = start.config.model, start.config.data.image_size
    enlarged = getattr(start.model, "enlarged", 1)
    times = (enlarged * size / 128) ** 2
    if model.stem != "auto" or enlarged == 1 or times < COSTLY:
        return ""
    return (
        f"--model.stem auto keeps full resolution up to {SMALL_IMAGE} pixels: an image of {size} "
        f"costs {model.name} about {times:.2g} times as much as one of --data.image-size 128, and "
        f"{enlarged**2} times as much as with --model.stem imagenet"
    )


def dark_images(start: Start) -> str:
    """Of 16-bit grey images the upper 8 bits are kept, and many cameras fill only the lower ones.

    A few files are looked into; of those that have not 16 bits, no more than the header is read.
    """
    paths = start.train_data.source.paths
    if paths is None:
        return ""
    count = min(PROBES, len(paths))
    picked = paths.picked(torch.arange(count) * len(paths) // count)
    files = [path for path in picked if path.suffix.lower() in DEEP_SUFFIXES]
    highest = {path: high for path in files if (high := highest_in_file(path)) is not None}
    dark = {path: high for path, high in highest.items() if is_dark(high)}
    if 2 * len(dark) <= len(highest):
        return ""
    path = max(dark, key=dark.__getitem__)
    shown = int(dark[path] * scale_of_grey(dark[path]))
    return (
        f"of {len(highest)} 16-bit grey training images that were looked into, {len(dark)} become "
        f"all but black: the highest value in {str(path)!a} is {dark[path]:,} of 65,535, which is "
        f"{shown} of 255; scale them to the whole range, or save them with 8 bits"
    )


def other_normalisation(start: Start) -> str:
    """Evaluation normalises as training does, whatever the validation images come with."""
    train, val = start.train_data.source, start.val_data.source
    if (train.mean, train.std) == (val.mean, val.std):
        return ""
    return (
        f"the validation images come with mean {val.mean} and deviation {val.std}, the training "
        f"images with {train.mean} and {train.std}, which both are normalised by: "
        "let the dataset give all splits those of the training images"
    )


REFUSALS = (
    labels_outside_head,
    lonely_batchnorm,
    sizes_unfit_for_model,
    schedule_beyond_run,
    shuffled_evaluation,
)
DOUBTS = (
    unusual_lr,
    long_warmup,
    few_for_batchnorm,
    skewed_classes,
    other_normalisation,
    costly_stem,
    dark_images,
)


def num_together(start: Start) -> int:
    """Images that BatchNorm computes its statistics from."""
    compute, processes = start.config.compute, start.train_data.world.size
    parts = start.config.optim.accumulate * (1 if compute.sync_batchnorm else processes)
    return start.config.data.batch_size // parts


def look(model: nn.Module, image_size: int) -> tuple[Tensor, list[str]]:
    """What a model makes of two blank images, and its BatchNorms for which an image is a pixel.

    That takes as long as evaluating two images, so only rules that have reason to do it.
    """
    norms = []

    def note(name: str, features: Tensor) -> None:
        if features.numel() == features.shape[0] * features.shape[1]:
            norms.append(name)

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
    ]
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.no_grad():  # not inference_mode: training may use what a model keeps of this
        logits = model.forward(torch.zeros(2, 3, image_size, image_size, device=device))
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return logits, norms
