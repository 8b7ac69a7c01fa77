"""Scores training images whenever validation images are."""

from dataclasses import replace
from math import isfinite
from types import ModuleType

import torch
from torch import nn

from ...data import EvalData
from ...errors import UserError
from ...evaluate import Scores, evaluate
from ...extensions import option
from ...runtime.distributed import World
from ...tasks import TASKS, metric_of
from ...tracking import Observer, Result, Setup

MOST = 500  # images, or a batch if that is more
PICTURES = 24  # of the hardest images


class TrainSample(EvalData):
    """Some training images, whole and not augmented, for a process that evaluates them alone."""

    def __init__(self, setup: Setup) -> None:
        """Choose evenly spread ones; the first pass loads them.

        Their batches have sizes that validation has, for which a compiled model has graphs.
        """
        val_data = setup.val_data
        self.data = val_data.data
        self.world = World(setup.world.device)
        self.batch_size = val_data.batch_size
        most = self.batch_size * max(1, MOST // self.batch_size)
        count = min(len(setup.train_data), len(val_data.indices), most)
        self.source = replace(setup.train_data.source, weights=None).thinned(count)
        self.note = lambda *_: None  # an unreadable one does not count: training tells of it
        self.indices = torch.arange(count)
        self.labels = self.source.labels[self.indices].to(self.world.device)  # not the source's own
        self.pixels = None
        self.loader = None


def open_observer(setup: Setup) -> Observer:
    """Score a sample of the training images with the weights that are evaluated."""
    if option(setup.config, "compute.parallel", "ddp") != "ddp":  # no process has all weights
        return Observer()
    sample = TrainSample(setup)
    metric = metric_of(setup.config)
    if metric == "loss":  # `train/loss` is that of augmented images
        metric = TASKS[setup.config.model.task].best_by
    scores: Scores | None = None

    def judge(model: nn.Module) -> dict[str, float]:
        nonlocal scores
        try:
            scores = evaluate(model, sample, setup.normalize, setup.precision)
        except UserError:  # none of so few images can be read
            return {}
        score = scores.value(metric)
        return {f"train/{metric}": score} if isfinite(score) else {}

    def section(result: Result, report: ModuleType) -> str:
        return hardest(scores, report) if scores and result.is_last else ""

    note = f"{len(sample):,} training images are scored as validation images are"
    return Observer(notes=(note,), judge=judge, section=section)


def hardest(scores: Scores, report: ModuleType) -> str:
    """The training images with the lowest probability of their true class, or of a label."""
    predictions = scores.predictions
    places = predictions.is_counted.nonzero()  # (count, 1 or 2): images, and labels
    order = predictions.target_probability[*places.T].argsort(stable=True)
    shown = places[order][:PICTURES].tolist()
    tiles = [report.galleries.picture(predictions, place[0], place[-1]) for place in shown]
    note = f"Of {len(predictions.source):,} training images, by the weights of the last evaluation."
    return f"<h2>Hardest training images</h2><p>{note}</p>{report.images.gallery(tiles)}"
