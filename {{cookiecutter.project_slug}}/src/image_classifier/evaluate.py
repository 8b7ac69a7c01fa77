"""Evaluation: every image of a split counts exactly once, on any number of processes."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from .data import EvalData, Source
from .errors import UserError
from .extensions import find_tools
from .metrics import (
    METRICS,
    NO_DECISION,
    Decision,
    Predictions,
    counted_and_correct,
    find_metric,
    metric_title,
    scores_text,
    words,
)
from .models import find_head
from .precision import Precision
from .preprocess import VIEWS, Normalize
from .tasks import TASKS, ImageResult

MOST_KEPT = 2**26  # probabilities of all images and classes, which each rank keeps: 256 MB


@dataclass(frozen=True, repr=False)
class Scores:
    """The result of an evaluation, over all ranks."""

    predictions: Predictions  # for each image
    known: dict[str, float]  # metrics that were computed: `loss`, without label smoothing; of one
    # label `top1` and, with more than five classes, `top5`; of several `exact`: all are right

    def __repr__(self) -> str:
        """The most important metrics, in a line."""
        metrics = {f"val/{name}": value for name, value in self.known.items()}
        return f"<Scores: {words(metrics, METRICS)}; {self.predictions!r}>"

    @property
    def names(self) -> list[str]:
        """The names of all metrics that there are."""
        return metric_names(self.predictions.source)

    def value(self, name: str) -> float:
        """A metric of `names`, which is computed once."""
        if name not in self.known:
            # Not NumPy's: a checkpoint with a number of theirs could not be read.
            self.known[name] = float(find_metric(name).function(self.predictions))
        return self.known[name]

    def slack(self, name: str) -> float:
        """How much of a metric one image is: see `Metric.slack`."""
        counted, _ = counted_and_correct(self.predictions.predicted, self.predictions.source.labels)
        return find_metric(name).slack(int(counted.sum()))

    def metrics(self, *wanted: str) -> dict[str, float]:
        """The numbers to log: those that are known, the calibration error, and what is wanted."""
        values = {name: self.value(name) for name in (*self.known, *wanted, "ece")}
        finite = {f"val/{name}": value for name, value in values.items() if isfinite(value)}
        found = self.predictions
        if num_unread := found.num_unread:
            finite["val/bad_images"] = num_unread
        if (num_classes := int(found.class_counts().count_nonzero())) < len(found.source.classes):
            finite["val/classes"] = num_classes
        return finite

    def text(self, best_by: str, decision: Decision = NO_DECISION) -> str:
        """All metrics, the score of each class, and what `decision` means, as lines."""
        found = self.predictions
        source = found.source
        shares = TASKS[source.task].by_class(found).tolist()
        text = scores_text(self.metrics(*self.names), shares, source.classes, best_by)
        tools = find_tools("decision").values()
        if found.probabilities is not None:
            return "\n".join([text, *(tool.tell_decision(found, decision) for tool in tools)])
        left_out = [metric_title(name) for name in METRICS if METRICS[name].needs_all]
        left_out = ", ".join([*left_out, *(tool.WHAT for tool in tools)])
        return f"too many images x classes for {left_out}\n{text}"


def evaluate(
    model: nn.Module, data: EvalData, normalize: Normalize, precision: Precision
) -> Scores:
    """Evaluate `model` on all images of `data`, of which each rank has a part.

    Waits for the device once. `model` is bare, as DDP would wait for ranks that have no images
    left; its buffers become those of rank 0.

    Raises:
        UserError: if an image cannot be read, unless a tool passes over it, or none can.
        FaultError: if too many cannot be read, or a data worker was killed.
    """
    world = data.world
    task = TASKS[data.source.task]
    num_classes = len(data.source.classes)
    is_whole = keeps_all(data.source)
    training = [layer for layer in model.modules() if layer.training]
    world.broadcast_buffers(model)
    model.eval()
    # A row for each field of ImageResult, and for each class if its probabilities are kept; a
    # column for each image. Each rank fills its own columns.
    num_rows = len(ImageResult._fields) + num_classes * is_whole
    table = torch.zeros((num_rows, len(data)), device=world.device)
    own = table[:, world.rank :: world.size]
    done = 0
    with torch.inference_mode():
        for batch in data.batches():
            logits = predict_logits(model, batch.images, normalize, precision)
            rows = torch.stack(task.results(logits, batch.labels))
            shares = task.probabilities(logits).T if is_whole else rows[:0]
            own[:, done : done + len(logits)] = torch.cat([rows, shares])
            done += len(logits)
    for layer in training:  # not `model.train()`, as frozen BatchNorm layers stay as they are
        layer.training = True
    table = world.all_reduce_sum(table).cpu()
    found = ImageResult(*table[: len(ImageResult._fields)])
    shares = table[len(ImageResult._fields) :].T if is_whole else None
    predictions = task.predictions(data.source, found, shares)
    counted, right = counted_and_correct(predictions.predicted, data.source.labels)
    count = int(counted.sum())
    num_answers = int(predictions.is_counted.sum())
    if not count:
        raise UserError(f"none of the {len(data):,} images to evaluate on can be read")
    known = {"loss": -float(found.log_target_probability.double().sum()) / num_answers}
    known["exact" if data.source.is_multi_label else "top1"] = int(right.sum()) / count
    if not data.source.is_multi_label and num_classes > 5:
        known["top5"] = int(found.is_in_five.sum()) / count
    return Scores(predictions, known)


def metric_names(source: Source) -> list[str]:
    """The metrics that there are of the images of `source`."""
    return [
        name
        for name, metric in METRICS.items()
        if metric.task in ("", source.task)
        and (keeps_all(source) or not metric.needs_all)
        and (name != "top5" or len(source.classes) > 5)
    ]


def keeps_all(source: Source) -> bool:
    """Whether an evaluation keeps the probabilities of all classes, on every rank."""
    return source.is_multi_label or len(source) * len(source.classes) <= MOST_KEPT


def predict_logits(
    model: nn.Module, images: Tensor, normalize: Normalize, precision: Precision
) -> Tensor:
    """The logits of images, averaged over the views of evaluation: (batch, classes) float32.

    `images` is (batch, channels, size, size) uint8 or uint16, channels_last.
    """
    with precision.autocast():
        return sum(weight * model(view).float() for view, weight in normalize.views(images))


@torch.inference_mode()
def predict_features(
    model: nn.Module, images: Tensor, normalize: Normalize, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Logits (batch, classes) and features (batch, width) of images, both float32.

    Both are averaged over the views of evaluation. `model` is in evaluation mode; `images` is
    (batch, channels, size, size) uint8 or uint16, channels_last.

    Raises:
        UserError: if the last layer gets more than a vector for each image.
    """
    name, head = find_head(model)
    inputs: list[Tensor] = []  # of each view
    hook = head.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float()))
    try:
        logits = predict_logits(model, images, normalize, precision)
    finally:
        hook.remove()
    shape = tuple(inputs[0].shape[1:])
    if shape[1:].count(1) < len(shape) - 1:
        raise UserError(
            f"the network has no features: its last layer {name!r} gets {shape} for an image, and "
            "not one vector"
        )
    weights = [weight for weight, *_ in VIEWS[normalize.tta]]
    return logits, sum(w * found.flatten(1) for w, found in zip(weights, inputs, strict=True))
