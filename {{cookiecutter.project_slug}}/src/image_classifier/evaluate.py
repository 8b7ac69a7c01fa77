"""How good a model is: every image of a split counted exactly once, on any number of processes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .config import ComputeConfig, RunConfig, UserError
from .data import LEFT_OUT, EvalData, check_numbers
from .precision import Precision
from .predictions import Answers, calibrate, scores_text
from .preprocess import Normalize
from .runtime.console import some
from .runtime.distributed import World, join_world
from .trained import open_trained


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation, over all ranks."""

    loss: float  # mean cross entropy, without label smoothing
    top1: float  # fraction of the images whose most probable class is right
    top5: float  # fraction of the images whose class is among the five most probable
    confusion: Tensor  # (classes, classes) int64 on the host: row is the truth, column the answer
    answers: Answers  # to each image
    left_out: int = 0  # images that could not be read, and do not count

    def metrics(self) -> dict[str, float]:
        """The numbers that are logged; top-5 where there are more than five classes."""
        top5 = {"val/top5": self.top5} if len(self.confusion) > 5 else {}
        left_out = {"val/bad_images": self.left_out} if self.left_out else {}
        return {
            "val/loss": self.loss,
            "val/top1": self.top1,
            **top5,
            "val/ece": calibrate(self.answers).error,
            **left_out,
        }


def evaluate(
    model: nn.Module,
    data: EvalData,
    normalize: Normalize,
    precision: Precision,
    world: World,
) -> Scores:
    """Evaluate `model` on all images of `data`. Waits for the device, once.

    `model` is the bare one: what wraps it for training would wait for ranks that have no images
    left. Its statistics are made those of rank 0 first.

    Raises:
        UserError: if an image can't be read and such are not to be skipped, or none can be read.
        FaultError: if too many can't be read, or a data worker was ended.
    """
    training = [layer for layer in model.modules() if layer.training]
    world.broadcast_buffers(model)
    model.eval()
    # A row for each thing to know of an image, a column for each image; each rank fills its own.
    table = torch.zeros((len(Answered._fields), len(data)), device=world.device)
    parts = []
    with torch.inference_mode():
        for batch in data.batches():
            logits = logits_of(model, batch.images, normalize, precision)
            parts.append(torch.stack(answered(logits, batch.labels)))
    for layer in training:  # not `model.train()`, as frozen BatchNorm layers stay as they are
        layer.training = True
    if parts:
        table[:, world.rank :: world.size] = torch.cat(parts, dim=1)
    found = Answered(*world.all_reduce_sum(table).cpu())
    answers = Answers(
        source=data.source,
        answer=found.answer.long(),
        probability=found.log_probability.exp(),
        probability_of_truth=found.log_probability_of_truth.exp(),
    )
    count = int(answers.is_counted.sum())
    if not count:
        raise UserError(f"none of the {len(data):,} images to evaluate on can be read")
    return Scores(
        loss=-float(found.log_probability_of_truth.double().sum()) / count,
        top1=int(answers.is_right.sum()) / count,
        top5=int(found.is_in_five.sum()) / count,
        confusion=answers.confusion(),
        answers=answers,
        left_out=len(data) - count,
    )


class Answered(NamedTuple):
    """What is known of images that were answered to: each (count,) float32."""

    answer: Tensor  # a class, which float32 holds exactly; LEFT_OUT if the image can't be read
    log_probability: Tensor  # of the answer; 0 for an image that can't be read
    log_probability_of_truth: Tensor  # likewise
    is_in_five: Tensor  # 1 if the truth is among the five most probable classes


def answered(logits: Tensor, labels: Tensor) -> Answered:
    """What to know of a batch, (batch, classes) float32 and (batch,) int64, on the device."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, 5)
    logs = logits.log_softmax(dim=1)
    truth = labels.clamp(min=0)[:, None]
    counts = labels != LEFT_OUT  # masked, as to pick them would wait for the device
    return Answered(
        answer=torch.where(counts, best[:, 0], LEFT_OUT).float(),
        log_probability=torch.where(counts, logs.gather(1, best[:, :1])[:, 0], 0.0),
        log_probability_of_truth=torch.where(counts, logs.gather(1, truth)[:, 0], 0.0),
        is_in_five=((best == truth).any(dim=1) & counts).float(),
    )


def logits_of(
    model: nn.Module, images: Tensor, normalize: Normalize, precision: Precision
) -> Tensor:
    """What a test takes for the model's answer to images: (batch, classes) float32 logits.

    (batch, 3, size, size) uint8, channels_last. Logits are averaged where a test has several views.
    """
    with precision.autocast():
        views = normalize.views(images)
        return sum(weight * model(view).float() for view, weight in views)


def evaluate_run(run: str, split: str, root: str, compute: ComputeConfig) -> Scores:
    """Evaluate the best weights of the run folder (or checkpoint) `run`, and print the scores.

    Raises:
        UserError: if there is no such run, or its images are not to be had or of other classes.
    """
    with join_world(compute) as world:
        trained = open_trained(run, compute, world)
        data = trained.config.data
        folder = run if Path(run).is_dir() else ""
        images = EvalData(
            replace(data, root=root or data.root), split, world, RunConfig(dir=folder)
        )
        if images.source.classes != trained.classes:
            raise UserError(
                f"{str(trained.path)!a} knows the classes {some(trained.classes)}, which are "
                f"not those of the images: {some(images.source.classes)}"
            )
        check_numbers(images.source, split)
        scores = evaluate(trained.model, images, trained.normalize, trained.precision, world)
        if world.is_main:
            for note in images.source.notes:
                print(note)
            print(scores_text(scores.metrics(), scores.confusion, trained.classes))
            print(
                f"{len(images):,} {split} images, weights of step {trained.step} "
                f"from {str(trained.path)!a}"
            )
    return scores
