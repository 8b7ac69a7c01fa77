"""Errors that end a run before its first step."""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ..config import Config
from ..data import Source
from ..errors import UserError
from ..evaluate import metric_names
from ..extensions import flag, functions, option
from ..metrics import find_metric
from ..runtime.console import first_line, some
from .observers import Setup
from .trackers import chosen_trackers


def check_setup(setup: Setup) -> None:
    """Raise `UserError`, within milliseconds, if the run could only fail or count wrong."""
    chosen_trackers(setup.config.run.trackers)
    if not setup.config.epochs and not functions("head", "fit_head"):
        raise UserError("--epochs 0 needs a tool that is not here: pretuned add linear-probe")
    check_same_classes(setup.train_data.source, setup.val_data.source, "validation")
    check_logits(setup.config, setup.model, setup.train_data.num_classes)
    check_best_by(setup.config.run.best_by, setup.val_data.source)


def check_same_classes(train: Source, other: Source, split: str) -> None:
    """Both splits have the same classes, and each label is the number of one."""
    if train.classes != other.classes:
        raise UserError(
            f"the classes of the {split} images ({some(other.classes)}) differ from those of the "
            f"training images ({some(train.classes)}): give both splits the same classes"
        )
    train.check_labels("training")
    other.check_labels(split)


def check_logits(config: Config, model: nn.Module, num_classes: int) -> None:
    """The model takes all image sizes of the run, some of them hours later, and has all outputs."""
    name = config.model.name
    knobs = "data.image_size", "data.test_size", "augment.min_size"  # the last one is of a tool
    sizes = {option(config, knob, 0): flag(knob) for knob in reversed(knobs)}
    for size in sizes.keys() - {0}:
        try:
            logits = blank_logits(model, size, config.data.channels)
        except (ArithmeticError, AssertionError, RuntimeError, ValueError) as error:  # of sizes
            raise UserError(
                f"--model.name {name} can't take images of {size} pixels, see --{sizes[size]}: "
                f"{first_line(error)}"
            ) from error
        if (shape := tuple(only_logits(logits).shape[1:])) != (num_classes,):
            raise UserError(
                f"--model.name {name} gives {shape} values for an image, but there are "
                f"{num_classes} classes: its last layer needs one output per class"
            )


def only_logits(output: object) -> Tensor:
    """The output of a network; UserError if it is not a tensor."""
    if not isinstance(output, Tensor):
        raise UserError(f"the network returns a {type(output).__name__}: it should return logits")
    return output


def check_best_by(name: str, val: Source) -> None:
    """There is a metric `name` of the validation images."""
    names = metric_names(val)
    if name not in names:
        raise UserError(f"--run.best-by {name!a} is none of: {', '.join(['auto', *names])}")
    metric = find_metric(name)
    if not (metric.is_mean and metric.needs_all):  # of each class against the rest
        return
    labels = val.labels if val.is_multi_label else one_hot(val.labels)
    if not ((labels == 1).any(0) & (labels == 0).any(0)).any():
        raise UserError(
            f"--run.best-by {name}: no class has validation images with it and without it; "
            "loss is a metric that does without"
        )


@torch.no_grad()  # not inference_mode: training may use what a model keeps of this
def blank_logits(model: nn.Module, image_size: int, channels: int = 3) -> Tensor:
    """The logits of one blank image in evaluation, (1, classes); `model` stays as it was."""
    device = next(model.parameters()).device
    image = torch.zeros(1, channels, image_size, image_size, device=device)
    was_training = model.training
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its kernel hides operations from a counter
    try:
        return model.eval().forward(image)  # `forward` is not compiled: one image never comes again
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        model.train(was_training)
