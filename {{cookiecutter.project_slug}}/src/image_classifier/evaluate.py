"""How good a model is: every image of a split counted exactly once, on any number of processes."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .augment import Normalize
from .config import ComputeConfig, RunConfig, UserError
from .distributed import World, join_world
from .loader import EvalData
from .mistakes import check_labels, some
from .precision import Precision
from .report import scores_text
from .samples import LEFT_OUT
from .trained import open_trained


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation, over all ranks."""

    loss: float  # mean cross entropy, without label smoothing
    top1: float  # fraction of the images whose most probable class is right
    top5: float  # fraction of the images whose class is among the five most probable
    confusion: Tensor  # (classes, classes) int64 on the host: row is the truth, column the answer
    left_out: int = 0  # images that could not be read, and do not count

    def metrics(self) -> dict[str, float]:
        """The numbers that are logged."""
        left_out = {"val/bad_images": self.left_out} if self.left_out else {}
        return {"val/loss": self.loss, "val/top1": self.top1, "val/top5": self.top5} | left_out


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
    was_training = model.training
    world.broadcast_buffers(model)
    model.eval()
    classes = len(data.source.classes)
    device = world.device
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    wide = torch.float32 if device.type == "mps" else torch.float64
    # Loss, how many are in the first five, and how many can't be read.
    sums = torch.zeros(3, dtype=wide, device=device)
    with torch.inference_mode():
        for batch in data.batches():
            logits = answer(model, batch.images, normalize, precision)
            labels = batch.labels
            counts = labels != LEFT_OUT  # masked, as to pick them would wait for the device
            answers = logits.topk(min(5, classes), dim=1).indices  # (batch, 5)
            sums[0] += cross_entropy(logits, labels, reduction="sum", ignore_index=LEFT_OUT)
            sums[1] += (answers == labels[:, None]).sum()
            places = (labels * classes + answers[:, 0]) * counts
            confusion.index_add_(0, places, counts.long())
    model.train(was_training)
    sums[2] = data.num_left_out
    loss, in_top5, left_out = world.sum(sums).tolist()
    confusion = world.sum(confusion).view(classes, classes).cpu()
    count = len(data) - int(left_out)
    assert int(confusion.sum()) == count
    if not count:
        raise UserError(f"none of the {len(data):,} images to evaluate on can be read")
    top1 = int(confusion.diagonal().sum()) / count
    return Scores(loss / count, top1, in_top5 / count, confusion, int(left_out))


def answer(model: nn.Module, images: Tensor, normalize: Normalize, precision: Precision) -> Tensor:
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
        check_labels(images.source, split)
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
