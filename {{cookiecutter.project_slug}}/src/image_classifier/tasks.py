"""All that depends on the task: one class for each image, or any number of labels.

Both have the same functions, in `TASKS`. Labels that are unknown are left out everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from .config import Config, OptimConfig
from .data import LEFT_OUT, Augmented, Source, TrainData
from .extensions import chained
from .metrics import THRESHOLD, Predictions, average_precisions, recalls
from .runtime.config_dict import flatten

LossFn = Callable[[Tensor, Augmented], Tensor]  # logits (count, classes), their images -> ()


class ImageResult(NamedTuple):
    """What an evaluation knows of images: each (count,) float32."""

    predicted: Tensor  # class, which float32 holds exactly; LEFT_OUT for an unreadable image
    log_probability: Tensor  # of the predicted class; 0 for an unreadable image
    log_target_probability: Tensor  # likewise, of the target; the sum over the labels of an image
    is_in_five: Tensor  # 1 if the target is among the five most probable classes


@dataclass(frozen=True)
class Loss:
    """What a network learns: the loss, and the targets that it is of."""

    of: LossFn
    targets: Callable[[Augmented], Augmented] = lambda batch: batch  # those of a teacher, mixed in
    teacher: str = ""  # the digest of its file, where there is one


@dataclass(frozen=True)
class Task:
    """The functions of a task; logits are (count, classes) float32."""

    loss: Callable[[OptimConfig, int], LossFn]  # see `build_loss`
    probabilities: Callable[[Tensor], Tensor]  # of logits: (count, classes)
    results: Callable[[Tensor, Tensor], ImageResult]  # of logits and labels
    predictions: Callable[[Source, ImageResult, Tensor | None], Predictions]  # the last are
    # probabilities, (count, classes)
    by_class: Callable[[Predictions], np.ndarray]  # a score of each class: (classes,)
    best_by: str  # the metric that decides unless `run.best_by` says otherwise


def build_loss(config: Config, data: TrainData, batch_size: int) -> Loss:
    """The loss of the logits of a micro-batch, with its labels or with shares of them.

    It is the micro-batch's share of the mean over all `batch_size` images of the rank, so that
    micro-batches of any size add up. An image that could not be read has the label -1, or no
    probability of any class, and adds nothing. Tools may change loss and targets.
    """
    loss = Loss(TASKS[config.model.task].loss(config.optim, batch_size))
    return chained("loss", "change_loss", loss, config, data, batch_size)


def class_loss(optim: OptimConfig, batch_size: int) -> LossFn:
    """Cross entropy with labels or with probabilities of each class."""
    cost = partial(cross_entropy, ignore_index=LEFT_OUT)
    equal: list[Tensor] = []  # weights of classes: a division would be two operations more

    def loss_of(logits: Tensor, batch: Augmented) -> Tensor:
        _, targets, weights = batch
        smoothing = optim.label_smoothing
        if smoothing and targets.is_floating_point():  # torch would teach an image without any
            targets = targets.lerp(targets.mean(dim=1, keepdim=True), smoothing)
            smoothing = 0.0
        if weights is not None:
            each = cost(logits, targets, reduction="none", label_smoothing=smoothing)
            return (each * weights).sum() / batch_size
        if not equal:
            equal.append(torch.full(logits.shape[1:], 1 / batch_size, device=logits.device))
        return cost(logits, targets, equal[0], reduction="sum", label_smoothing=smoothing)

    return loss_of


def label_loss(optim: OptimConfig, batch_size: int) -> LossFn:
    """Binary cross entropy with labels, each of yes or no, or with probabilities of yes."""
    cost = partial(binary_cross_entropy_with_logits, reduction="none")
    return mean_over_labels(cost, optim, batch_size)


def mean_over_labels(
    cost: Callable[[Tensor, Tensor], Tensor], optim: OptimConfig, batch_size: int
) -> LossFn:
    """The mean over an image's known labels of `cost`, which is of logits and targets."""
    smoothing = optim.label_smoothing

    def loss_of(logits: Tensor, batch: Augmented) -> Tensor:
        _, targets, weights = batch
        known = targets >= 0
        smooth = targets.clamp(min=0) * (1.0 - smoothing) + smoothing / 2
        each = cost(logits.float(), smooth).where(known, 0.0)
        of_images = each.sum(1) / known.sum(1).clamp(min=1)
        return (of_images if weights is None else of_images * weights).sum() / batch_size

    return loss_of


def class_results(logits: Tensor, labels: Tensor) -> ImageResult:
    """The results of a batch with (batch,) int64 labels."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, 5)
    logs = logits.log_softmax(dim=1)
    target = labels.clamp(min=0)[:, None]
    counts = labels != LEFT_OUT  # masked: selecting them would wait for the device
    return ImageResult(
        predicted=torch.where(counts, best[:, 0], LEFT_OUT).float(),
        log_probability=torch.where(counts, logs.gather(1, best[:, :1])[:, 0], 0.0),
        log_target_probability=torch.where(counts, logs.gather(1, target)[:, 0], 0.0),
        is_in_five=((best == target).any(dim=1) & counts).float(),
    )


def label_results(logits: Tensor, labels: Tensor) -> ImageResult:
    """The results of a batch with (batch, classes) int8 labels."""
    known = labels != LEFT_OUT
    logs = logsigmoid(torch.where(labels == 1, logits, -logits)).where(known, 0.0)
    none = torch.zeros_like(logs[:, 0])
    return ImageResult(none.where(known.any(1), LEFT_OUT), none, logs.sum(1), none)


def class_predictions(
    source: Source, found: ImageResult, probabilities: Tensor | None
) -> Predictions:
    """What is predicted of images of one class each."""
    return Predictions(
        source=source,
        predicted=found.predicted.long(),
        probability=found.log_probability.exp(),
        target_probability=found.log_target_probability.exp(),
        probabilities=probabilities,
    )


def label_predictions(source: Source, found: ImageResult, probabilities: Tensor) -> Predictions:
    """What is predicted of images with any number of labels."""
    unread = (found.predicted == LEFT_OUT)[:, None]
    refuted = 1 - probabilities
    return Predictions(
        source=source,
        predicted=(probabilities >= THRESHOLD).to(torch.int8).masked_fill(unread, LEFT_OUT),
        probability=torch.where(probabilities >= THRESHOLD, probabilities, refuted),
        target_probability=torch.where(source.labels == 1, probabilities, refuted),
        probabilities=probabilities,
    )


TASKS = {
    "single-label": Task(
        loss=class_loss,
        probabilities=lambda logits: logits.softmax(dim=1),
        results=class_results,
        predictions=class_predictions,
        by_class=recalls,
        best_by="top1",
    ),
    "multi-label": Task(
        loss=label_loss,
        probabilities=torch.sigmoid,
        results=label_results,
        predictions=label_predictions,
        by_class=average_precisions,
        best_by="average_precision",
    ),
}


def metric_of(config: Config | dict[str, Any]) -> str:
    """The metric that decides which weights are best, of a config or what `config.json` has."""
    knobs = flatten(config) if isinstance(config, Config) else config
    metric = knobs.get("run.best_by", "auto")
    return TASKS[knobs.get("model.task", "single-label")].best_by if metric == "auto" else metric
