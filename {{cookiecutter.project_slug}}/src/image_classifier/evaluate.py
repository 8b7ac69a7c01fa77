"""Evaluation: every image of a split counts exactly once, on any number of processes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .data import LEFT_OUT, EvalData
from .errors import UserError
from .precision import Precision
from .predictions import Predictions, calibrate, calibration_error
from .preprocess import Normalize
from .runtime.distributed import World


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation, over all ranks."""

    loss: float  # mean cross entropy, without label smoothing
    top1: float  # fraction of the images whose most probable class is right
    top5: float  # fraction of the images whose class is among the five most probable
    confusion: Tensor  # (classes, classes) int64 on the CPU: row target, column prediction
    predictions: Predictions  # for each image
    left_out: int = 0  # unreadable images, which do not count

    def metrics(self) -> dict[str, float]:
        """The numbers to log; top-5 for more than five classes. To add a metric: a line here."""
        top5 = {"val/top5": self.top5} if len(self.confusion) > 5 else {}
        left_out = {"val/bad_images": self.left_out} if self.left_out else {}
        return {
            "val/loss": self.loss,
            "val/top1": self.top1,
            **top5,
            "val/ece": calibration_error(calibrate(self.predictions)),
            **left_out,
        }


def evaluate(
    model: nn.Module,
    data: EvalData,
    normalize: Normalize,
    precision: Precision,
    world: World,
) -> Scores:
    """Evaluate `model` on all images of `data`, of which each rank has a part.

    Waits for the device once. `model` is bare, as DDP would wait for ranks that have no images
    left; its buffers become those of rank 0.

    Raises:
        UserError: if an image cannot be read and `--data.on_bad_image` is stop, or none can.
        FaultError: if too many cannot be read, or a data worker was killed.
    """
    training = [layer for layer in model.modules() if layer.training]
    world.broadcast_buffers(model)
    model.eval()
    # A row for each field of ImageResult, a column for each image; each rank fills its own columns.
    table = torch.zeros((len(ImageResult._fields), len(data)), device=world.device)
    parts = []
    with torch.inference_mode():
        for batch in data.batches():
            logits = predict_logits(model, batch.images, normalize, precision)
            parts.append(torch.stack(image_results(logits, batch.labels)))
    for layer in training:  # not `model.train()`, as frozen BatchNorm layers stay as they are
        layer.training = True
    if parts:
        table[:, world.rank :: world.size] = torch.cat(parts, dim=1)
    found = ImageResult(*world.all_reduce_sum(table).cpu())
    predictions = Predictions(
        source=data.source,
        predicted=found.predicted.long(),
        probability=found.log_probability.exp(),
        target_probability=found.log_target_probability.exp(),
    )
    count = int(predictions.is_counted.sum())
    if not count:
        raise UserError(f"none of the {len(data):,} images to evaluate on can be read")
    return Scores(
        loss=-float(found.log_target_probability.double().sum()) / count,
        top1=int(predictions.is_correct.sum()) / count,
        top5=int(found.is_in_five.sum()) / count,
        confusion=predictions.confusion(),
        predictions=predictions,
        left_out=len(data) - count,
    )


class ImageResult(NamedTuple):
    """What an evaluation knows of images: each (count,) float32."""

    predicted: Tensor  # class, which float32 holds exactly; LEFT_OUT for an unreadable image
    log_probability: Tensor  # of the predicted class; 0 for an unreadable image
    log_target_probability: Tensor  # likewise, of the target
    is_in_five: Tensor  # 1 if the target is among the five most probable classes


def image_results(logits: Tensor, labels: Tensor) -> ImageResult:
    """The results of a batch, of (batch, classes) float32 logits and (batch,) int64 labels."""
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


def predict_logits(
    model: nn.Module, images: Tensor, normalize: Normalize, precision: Precision
) -> Tensor:
    """The logits of images, averaged over the views of evaluation: (batch, classes) float32.

    `images` is (batch, channels, size, size) uint8 or uint16, channels_last.
    """
    with precision.autocast():
        views = normalize.views(images)
        return sum(weight * model(view).float() for view, weight in views)
