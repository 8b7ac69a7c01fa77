"""Sanity checks before the first step: warnings on what is probably a mistake.

To add one: a function that returns a sentence, or "" if all is well, in `find_mistakes`.
"""

from contextlib import suppress

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...config import Config
from ...data import Source, open_dataset
from ...errors import FaultError, UserError
from ...extensions import option
from ...tracking import Setup, blank_logits

# A learning rate, the batch size it is usual for, the power of the batch size it grows by, and why.
USUAL_LR = {
    "sgd": (0.1, 256, 1.0, "https://arxiv.org/abs/1706.02677"),  # with a momentum of 0.9
    "adamw": (1e-3, 512, 0.5, "https://arxiv.org/abs/2205.10287"),
    "muon": (3e-3, 512, 0.5, "https://arxiv.org/abs/2502.16982"),  # AdamW's, more in short runs
}
FAR = 20  # times the usual learning rate, or a part of it; published recipes are within 10
SMALL_FOR_BATCHNORM = 8  # images: https://arxiv.org/abs/1803.08494, figure 5
LOOKED_AT = 8  # images, spread over the training set
DARK, UNIFORM = 64, 8  # of 255, as in `check`: the highest value; the range of JPEG's noise
SKEWED = 10  # times as many images as the smallest class has


def find_mistakes(setup: Setup) -> tuple[str, ...]:
    """Look for mistakes, in little more than a forward pass of one image."""
    config = setup.config
    train = setup.train_data.source
    val = setup.val_data.source
    warnings = (
        unusual_lr(config),
        small_batchnorm_batch(config, setup.model, setup.world.size),
        imbalanced_classes(config, train),
        reused_images(config, train, val),
        blank_images(train),
        random_evaluation(setup.model, config.data.eval_size, config.data.channels),
        data_parallel(setup.model),
        idle_options(config, setup.world.size),
    )
    return tuple(filter(None, warnings))


def unusual_lr(config: Config) -> str:
    """The learning rate fits the optimizer and the batch size over all processes."""
    optim = config.optim
    batch_size = config.data.batch_size
    if optim.name not in USUAL_LR or not config.epochs:
        return ""
    lr, base, power, source = USUAL_LR[optim.name]
    # Momentum adds up a gradient 1 / (1 - momentum) times. Adam's and Muon's average them.
    steps = (1 - optim.momentum) / (1 - 0.9) if optim.name == "sgd" else 1.0
    usual = lr * (batch_size / base) ** power * steps
    is_finetuning = config.run.init_from and optim.lr > 0  # which wants smaller steps
    if usual / FAR <= optim.lr <= usual * FAR or (is_finetuning and optim.lr < usual):
        return ""
    return (
        f"--optim.lr {optim.lr:g} is {optim.lr / usual:.2g} times the usual value for {optim.name} "
        f"with batches of {batch_size} ({source}). Try about {usual:.1g}"
    )


def small_batchnorm_batch(config: Config, model: nn.Module, processes: int) -> str:
    """BatchNorm's statistics of a few images are noise."""
    batch_size = config.data.batch_size
    count = batch_size // (config.optim.accumulate * processes)
    has_norms = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    if has_norms and config.optim.freeze_bn and not config.run.init_from:
        return "--optim.freeze-bn keeps the mean 0 and variance 1 of random weights: leave it out"
    if count >= SMALL_FOR_BATCHNORM or not has_norms or config.optim.freeze_bn:
        return ""
    return (
        f"BatchNorm takes its statistics from {count} of the {batch_size} images of a batch, which "
        f"is less than {SMALL_FOR_BATCHNORM}. Try fewer micro-batches, a larger --data.batch-size "
        "or GroupNorm (https://arxiv.org/abs/1803.08494)"
    )


def imbalanced_classes(config: Config, train: Source) -> str:
    """A class that is rarely seen is rarely predicted: https://arxiv.org/abs/1901.05555."""
    sizes = train.class_counts()
    if not sizes.any():
        return "no training image has a label"
    smallest = int(sizes[sizes > 0].min())
    largest = int(sizes.max())
    is_balanced = option(config, "data.balance", "none") != "none"  # of a tool
    if largest <= SKEWED * smallest or is_balanced:
        return ""
    advice = "loss" if train.is_multi_label else "sampling or loss"
    return (
        f"the largest class has {largest:,} training images and the smallest {smallest:,}. "
        f"Try --data.balance {advice} (of the tool balance), with which all classes count alike"
    )


def reused_images(config: Config, train: Source, val: Source) -> str:
    """`best.pt` is chosen on the validation images, which should be no others."""
    if train.has_same_images(val):
        return "the validation images are the training images: scores tell nothing of new images"
    is_test = val.is_test
    if config.data.name == "folder":
        with suppress(UserError):  # there is no such folder, or its images have no labels
            is_test = val.has_same_images(open_dataset(config.data, "test"))
    return is_test * (
        "the validation images are the test images, and best.pt is chosen on them, so its scores "
        "are too good for new images; those of last.pt are fair if you choose nothing by them"
    )


def blank_images(train: Source) -> str:
    """Nothing can be learned from images of one color, and little from nearly black ones."""
    if train.bits != 8:  # they are normalized by their own mean and deviation
        return ""
    ranges = []
    highest = []
    for number in train.spread(LOOKED_AT).tolist():
        with suppress(UserError, FaultError, OSError):  # training says what is wrong with it
            pixels = train.read(number).flatten(0, 1)
            ranges.append(int((pixels.amax(0) - pixels.amin(0)).max()))
            highest.append(int(pixels.max()))
            if ranges[-1] > UNIFORM and highest[-1] >= DARK:  # nearly always the first image
                return ""
    found = len(ranges)
    if found and max(ranges) <= UNIFORM:
        return (
            f"all of {found} training images that were looked at are of one color. `check` lists "
            "such images"
        )
    if not found or max(highest) >= DARK:
        return ""
    return (
        f"the training images are nearly black: of {found}, the highest value is {max(highest)} of "
        "255. If their files use only some of 16 bits, scale them or try --data.bits 16"
    )


def random_evaluation(model: nn.Module, image_size: int, channels: int = 3) -> str:
    """`model.eval()` does not reach `F.dropout`, which draws random numbers there, too."""
    device = next(model.parameters()).device
    generators = torch if device.type == "cpu" else torch.get_device_module(device)
    before = generators.get_rng_state()
    # The logits tell nothing: they may all be 0, as many a last layer is at first.
    blank_logits(model, image_size, channels)
    is_random = not torch.equal(before, generators.get_rng_state())
    generators.set_rng_state(before)
    return is_random * (
        "the model draws random numbers in evaluation, so its scores are random: F.dropout(x, p) "
        "is never off. Use F.dropout(x, p, training=self.training) or nn.Dropout(p)"
    )


def data_parallel(model: nn.Module) -> str:
    """Threads of one process share Python's lock: https://arxiv.org/abs/2006.15704."""
    is_inside = any(isinstance(layer, nn.DataParallel) for layer in model.modules())
    return is_inside * "the model has nn.DataParallel: remove it, --run.processes trains with DDP"


def idle_options(config: Config, processes: int) -> str:
    """Options that have no effect, as another one has not the value that they need."""
    found = []
    if option(config, "run.init_head", "probe") == "zero" and not config.run.init_from:
        found.append("--run.init-head zero has no effect without --run.init-from")
    if option(config, "compute.parallel", "ddp") == "fsdp" and processes == 1:
        found.append("--compute.parallel fsdp has no effect in one process")
    return "; ".join(found)
