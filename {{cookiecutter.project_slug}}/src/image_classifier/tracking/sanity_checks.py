"""Sanity checks before the first step: errors that end a run, and warnings on likely mistakes.

A check is a function of a `RunSetup`. One in `ERRORS` raises `UserError` where a run would fail or
count wrong; one in `WARNINGS` returns a sentence on what is probably wrong, or "".
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..config import Config, flag
from ..data import EvalData, TrainData
from ..errors import UserError
from ..runtime.console import some
from .flops import blank_forward
from .trackers import check_installed

# A learning rate, the batch size it is usual for, the power of the batch size it grows by, and why.
USUAL_LR = {
    "sgd": (0.1, 256, 1.0, "https://arxiv.org/abs/1706.02677"),  # with a momentum of 0.9
    "adamw": (1e-3, 512, 0.5, "https://arxiv.org/abs/2205.10287"),
    "muon": (3e-3, 512, 0.5, "https://arxiv.org/abs/2502.16982"),  # AdamW's, more in short runs
}
FAR = 20  # times the usual learning rate, or a part of it; published recipes are within 10
SMALL_FOR_BATCHNORM = 8  # images: https://arxiv.org/abs/1803.08494, figure 5
LONG_WARMUP = 0.5  # share of the run
COSTLY = 1.5  # times an image of 128 pixels
SKEWED = 10  # times as many images as the smallest class has


@dataclass(frozen=True)
class RunSetup:
    """What a run begins with."""

    config: Config
    model: nn.Module  # on its device, not wrapped for DDP
    train_data: TrainData
    val_data: EvalData


def check_setup(setup: RunSetup) -> list[str]:
    """Run all checks, in milliseconds. Returns the warnings, on rank 0 alone.

    Raises:
        UserError: if the run could only fail or count wrong.
    """
    check_installed(setup.config.run.trackers)
    for check in ERRORS:
        check(setup)
    is_main = setup.train_data.world.is_main
    warnings = [check(setup) for check in WARNINGS] if is_main else []
    return [warning for warning in warnings if warning]


def wrong_classes(setup: RunSetup) -> None:
    """A label is the number of a class and of an output; a GPU stops on others without a name."""
    train, val = setup.train_data.source, setup.val_data.source
    if train.classes != val.classes:
        raise UserError(
            f"the classes of the validation images ({some(val.classes)}) differ from those of the "
            f"training images ({some(train.classes)}): give both splits the same classes"
        )
    train.check_labels("training")
    val.check_labels("validation")
    shape = blank_forward(setup.model, 1, setup.config.data.image_size).shape[1:]
    if shape != (len(train.classes),):
        raise UserError(
            f"--model.name {setup.config.model.name} gives {tuple(shape)} values for an image, but "
            f"there are {len(train.classes)} classes: its last layer needs one output per class"
        )


def single_value_batchnorm(setup: RunSetup) -> None:
    """BatchNorm in training needs two values per channel: two images, or more than one pixel."""
    data, accumulate = setup.config.data, setup.config.optim.accumulate
    if num_normalised_together(setup) > 1:
        return
    try:  # on a copy, whose statistics may change
        blank_forward(deepcopy(setup.model), 1, data.image_size, training=True)
    except ValueError as error:
        parts = setup.train_data.world.size * accumulate
        raise UserError(
            f"--data.batch-size {data.batch_size} over {setup.train_data.world.size} processes and "
            f"--optim.accumulate {accumulate} leaves BatchNorm one image at a time, where it needs "
            f"2: take a batch size of {2 * parts} or more, or a model with GroupNorm"
        ) from error


def unfit_image_sizes(setup: RunSetup) -> None:
    """The model must take all image sizes of the run; the last of them may come hours later."""
    config = setup.config
    sizes = {"data.test_size": config.data.test_size, "augment.min_size": config.augment.min_size}
    for knob, size in sizes.items():
        if size in (0, config.data.image_size):
            continue
        try:
            blank_forward(setup.model, 1, size)
        except (RuntimeError, AssertionError, UserError) as error:
            raise UserError(
                f"{config.model.name}, built for --data.image-size {config.data.image_size}, can't "
                f"take images of --{flag(knob)} {size}: {str(error).splitlines()[0]}"
            ) from error


def unusual_lr(setup: RunSetup) -> str:
    """The learning rate fits the optimizer and the batch size over all processes."""
    optim, batch_size = setup.config.optim, setup.config.data.batch_size
    if optim.name not in USUAL_LR:
        return ""
    lr, base, power, source = USUAL_LR[optim.name]
    # Momentum adds up a gradient 1 / (1 - momentum) times. Adam's and Muon's average them.
    steps = (1 - optim.momentum) / (1 - 0.9) if optim.name == "sgd" else 1.0
    usual = lr * (batch_size / base) ** power * steps
    is_finetuning = setup.config.run.init_from and optim.lr > 0  # which wants smaller steps
    if usual / FAR <= optim.lr <= usual * FAR or (is_finetuning and optim.lr < usual):
        return ""
    return (
        f"--optim.lr {optim.lr:g} is {optim.lr / usual:.2g} times the usual value for {optim.name} "
        f"with batches of {batch_size} ({source}). Try about {usual:.1g}"
    )


def long_warmup(setup: RunSetup) -> str:
    """Warm-up takes a small part of the run: 5 epochs of 90 in https://arxiv.org/abs/1706.02677."""
    warmup, epochs = setup.config.optim.warmup_epochs, setup.config.epochs
    if warmup <= LONG_WARMUP * epochs:
        return ""
    return (
        f"--optim.warmup-epochs {warmup:g} is {warmup / epochs:.0%} of the run, so the learning "
        f"rate has no time to fall. Try about {0.2 * epochs:.1g} with --epochs {epochs:g}"
    )


def small_batchnorm_batch(setup: RunSetup) -> str:
    """BatchNorm's statistics of a few images are noise."""
    count, batch_size = num_normalised_together(setup), setup.config.data.batch_size
    has_norms = any(isinstance(layer, _BatchNorm) for layer in setup.model.modules())
    if count >= SMALL_FOR_BATCHNORM or not has_norms:
        return ""
    return (
        f"BatchNorm takes its statistics from {count} of the {batch_size} images of a batch, which "
        f"is less than {SMALL_FOR_BATCHNORM}. Try fewer micro-batches, a larger --data.batch-size "
        "or GroupNorm (https://arxiv.org/abs/1803.08494)"
    )


def imbalanced_classes(setup: RunSetup) -> str:
    """A class that is rarely seen is rarely predicted: https://arxiv.org/abs/1901.05555."""
    sizes = torch.bincount(setup.train_data.source.labels)
    smallest, largest = int(sizes[sizes > 0].min()), int(sizes.max())
    if largest <= SKEWED * smallest or setup.config.data.balance != "none":
        return ""
    return (
        f"the largest class has {largest:,} training images and the smallest {smallest:,}. "
        "Try --data.balance sampling or loss, with which all classes count alike"
    )


def other_normalisation(setup: RunSetup) -> str:
    """Evaluation normalises as training does, whatever the validation images come with."""
    train, val = setup.train_data.source, setup.val_data.source
    if (train.mean, train.std) == (val.mean, val.std):
        return ""
    return (
        f"the validation images have mean {val.mean} and standard deviation {val.std}, but are "
        f"normalised by those of the training images, {train.mean} and {train.std}. Let the "
        "dataset give these to all splits"
    )


def costly_stem(setup: RunSetup) -> str:
    """Small images keep full resolution in the first layers, which is meant for 32 pixels."""
    model, size = setup.config.model, setup.config.data.image_size
    enlarged = getattr(setup.model, "enlarged", 1)
    times = (enlarged * size / 128) ** 2
    if model.stem != "auto" or enlarged == 1 or times < COSTLY:
        return ""
    return (
        f"with --model.stem auto an image of {size} pixels keeps full resolution and costs "
        f"{model.name} {enlarged**2} times as much as with --model.stem imagenet, and about "
        f"{times:.2g} times as much as one of 128 pixels. Try either"
    )


ERRORS = (wrong_classes, single_value_batchnorm, unfit_image_sizes)
WARNINGS = (
    unusual_lr,
    long_warmup,
    small_batchnorm_batch,
    imbalanced_classes,
    other_normalisation,
    costly_stem,
)


def num_normalised_together(setup: RunSetup) -> int:
    """The number of images from which BatchNorm takes its statistics."""
    parts = setup.config.optim.accumulate * setup.train_data.world.size
    return setup.config.data.batch_size // parts
