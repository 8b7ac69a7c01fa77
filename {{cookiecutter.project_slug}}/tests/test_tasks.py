"""One label or several: the loss, the metrics and what decides are those of the task."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import changed, logged, run_ranks
from sklearn import metrics as sklearn
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from image_classifier.config import Config, DataConfig, OptimConfig
from image_classifier.data import LEFT_OUT, EvalData, Source
from image_classifier.data.datasets import DATASETS
from image_classifier.data.decode import BadImageError
from image_classifier.errors import UserError
from image_classifier.evaluate import evaluate
from image_classifier.models import read_checkpoint
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tasks import TASKS, label_loss, mix_several
from image_classifier.train import train

CPU = World(torch.device("cpu"))
COUNT, CLASSES, UNREADABLE = 23, 7, 4


def read(index):
    """An image of noise; one cannot be read."""
    if index == UNREADABLE:
        raise BadImageError("4.png", "planted")
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=generator)


def of_one_label(data, split):
    """Images of one class each; the last class has none."""
    classes = tuple(map(str, range(CLASSES)))
    return Source(torch.arange(COUNT) * 5 % (CLASSES - 1), classes, reader=read)


def of_several(data, split):
    """Images with any number of labels, some unknown, of one all; no image has the last."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(-1, 2, (COUNT, CLASSES), dtype=torch.int8, generator=generator)
    labels[:, -1], labels[9] = labels[:, -1].clamp(max=0), LEFT_OUT
    return replace(of_one_label(data, split), labels=labels)


def evaluated(task):
    """The scores of a network with random weights on any number of ranks."""
    DATASETS["several" if task == "multi-label" else "one"] = (
        of_several if task == "multi-label" else of_one_label
    )
    config = Config(data=DataConfig(name="several" if task == "multi-label" else "one"))
    with join_world(config.compute) as world:
        data = EvalData(config.data, "val", world, batch_size=3, task=task)
        data.note = lambda *_: None  # as with `data.on_bad_image` skip
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32**2, CLASSES))
        precision = Precision("fp32", config.compute, config.optim, world.device)
        found = evaluate(model, data, Normalize(data.source, 32, precision), precision, world)
        return found, found.metrics(*found.names)


def by_sklearn(found):
    """The metrics of gathered probabilities."""
    labels, shares = found.predictions.source.labels.numpy(), found.predictions.probabilities
    kept = np.arange(COUNT) != UNREADABLE
    labels, shares, guesses = labels[kept], shares.numpy()[kept], shares.numpy()[kept].argmax(1)
    if found.predictions.source.task == "single-label":
        table, present = one_hot(torch.tensor(labels), CLASSES).numpy(), range(CLASSES - 1)
        own, every = [*present], range(CLASSES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class without images is predicted
            balanced = sklearn.balanced_accuracy_score(labels, guesses)
        return {
            "loss": sklearn.log_loss(labels, shares, labels=every),
            "top1": sklearn.accuracy_score(labels, guesses),
            "top5": sklearn.top_k_accuracy_score(labels, shares, k=5, labels=every),
            "balanced_accuracy": balanced,
            "macro_f1": sklearn.f1_score(labels, guesses, labels=own, average="macro"),
            "auroc": sklearn.roc_auc_score(table[:, own], shares[:, own]),
            "average_precision": sklearn.average_precision_score(table[:, own], shares[:, own]),
            "brier": np.square(shares - table).sum(1).mean(),
        }
    known, right, yes = labels >= 0, (shares >= 0.5) == labels, shares >= 0.5
    own = [n for n in range(CLASSES) if (labels[:, n] == 1).any()]

    def mean(score, guesses):
        pairs = ((labels[known[:, n], n], guesses[known[:, n], n]) for n in own)
        return np.mean([score(*pair) for pair in pairs])

    return {
        "loss": sklearn.log_loss(labels[known], shares[known]),
        "exact": np.mean([right[n][known[n]].all() for n in range(COUNT - 1) if known[n].any()]),
        "micro_f1": sklearn.f1_score(labels[known], yes[known]),
        "macro_f1": mean(sklearn.f1_score, yes),
        "auroc": mean(sklearn.roc_auc_score, shares),
        "average_precision": mean(sklearn.average_precision_score, shares),
        "brier": sklearn.brier_score_loss(labels[known], shares[known]),
    }


def test_metrics_are_those_of_scikit_learn_on_any_number_of_ranks():
    for task in TASKS:
        alone, metrics = evaluated(task)
        expected = {f"val/{name}": value for name, value in by_sklearn(alone).items()}
        assert len(expected) == len(metrics) - 2
        assert metrics == pytest.approx(
            expected | {"val/bad_images": 1, "val/ece": metrics["val/ece"]}
        )
        for ranks in (2, 3):
            for found, others in run_ranks(ranks, evaluated, task):
                torch.testing.assert_close(
                    found.predictions.probabilities, alone.predictions.probabilities
                )
                assert others == pytest.approx(metrics)
