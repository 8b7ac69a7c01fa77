"""Classifiers of features, each with a small grid, compared by cross-validation.

To add one: a function that makes it, and a row of `GRIDS`.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError

FOLDS = 5
LARGE = 2**22  # numbers, in whose products several threads are faster than one
LINEAR, NEIGHBORS = "logistic", "knn"  # the first becomes the last layer of the network


def logistic(strength: float, has_bias: bool) -> Any:  # noqa: ANN401 - scikit-learn's
    """Logistic regression on standardized features, with an L2 penalty of 1 / `strength`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(C=strength, fit_intercept=has_bias, max_iter=1000)
    return make_pipeline(StandardScaler(with_mean=has_bias), regression)


def neighbors(count: float, _: bool) -> Any:  # noqa: ANN401 - scikit-learn's
    """The `count` training images of largest cosine similarity vote."""
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier(int(count), metric="cosine", weights="distance")


# The knob of each kind, its values, and what makes the classifier.
GRIDS: dict[str, tuple[str, tuple[float, ...], Callable[[float, bool], Any]]] = {
    LINEAR: ("C", (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0), logistic),
    NEIGHBORS: ("k", (1, 3, 5, 10, 20), neighbors),
}


@dataclass(frozen=True)
class Head:
    """A classifier of features, and its scores on training images that it was not fitted to."""

    kind: str
    value: float  # of its knob
    top1: float
    loss: float  # mean cross entropy

    def __str__(self) -> str:
        return f"{self.kind}, {GRIDS[self.kind][0]} = {self.value:g}"


def cross_validate(
    features: Tensor, labels: Tensor, has_bias: bool, seed: int, weights: Tensor | None = None
) -> list[Head]:
    """The scores of all classifiers in the grids, on the same folds.

    Args:
        features: (count, width) float32.
        labels: (count,) int64; each class from 0 on has an image.
        has_bias: whether a linear classifier may have one.
        seed: of the folds.
        weights: (count,) float32, how much each image counts in the loss of a linear classifier.

    Raises:
        UserError: if there are less than two classes, or no class has two images.
    """
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    sizes = labels.bincount()
    count = min(FOLDS, int(sizes.max()))
    if count < 2 or len(sizes) < 2:
        raise UserError(
            "probe needs training images of two classes at least, and two images of one of them"
        )
    values, targets = features.double().numpy(), labels.numpy()
    folds, heads = StratifiedKFold(count, shuffle=True, random_state=seed % 2**32), []
    for kind, (_, grid, make) in GRIDS.items():
        for value in grid:
            # As many neighbors as the smallest training part has, at most.
            if kind == NEIGHBORS and value > len(labels) - -(-len(labels) // count):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of classes smaller than the number of folds
                found = cross_val_predict(
                    make(value, has_bias),
                    values,
                    targets,
                    cv=folds,
                    method="predict_proba",
                    params=weighted(kind, weights),
                )
            top1 = float(np.mean(found.argmax(1) == targets))
            heads.append(Head(kind, value, top1, float(log_loss(targets, found))))
    return heads


def few_threads(features: Tensor) -> AbstractContextManager[object]:
    """A block in which one thread computes with `features`, unless they are many.

    Threads wait for each other after each small product: several take ten times the CPU time of one
    with 300 x 256 features, and where other programs keep the cores busy ten times as long, too.
    """
    import sklearn.linear_model  # noqa: F401 - what is loaded later would have all threads
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1 if features.numel() < LARGE else None)


def best_of(heads: list[Head], kind: str) -> Head:
    """The head of a kind with the best top-1; of equal ones, that of the lowest loss."""
    return max((head for head in heads if head.kind == kind), key=lambda h: (h.top1, -h.loss))


def weighted(kind: str, weights: Tensor | None) -> dict[str, np.ndarray]:
    """What to fit a classifier with, so that its images have these weights."""
    if weights is None or kind != LINEAR:
        return {}
    return {"logisticregression__sample_weight": weights.cpu().numpy()}


def fitted(
    head: Head, features: Tensor, labels: Tensor, has_bias: bool, weights: Tensor | None = None
) -> Any:  # noqa: ANN401
    """The scikit-learn classifier that `head` names, fitted to all training images."""
    classifier = GRIDS[head.kind][2](head.value, has_bias)
    return classifier.fit(features.double().numpy(), labels.numpy(), **weighted(head.kind, weights))


def linear_layer(classifier: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - scikit-learn's
    """Weight (classes, width) and bias (classes,) float64 of logistic regression on raw features.

    The standardization is folded into them.
    """
    scaler, regression = classifier
    weight, bias = map(torch.from_numpy, (regression.coef_, regression.intercept_))
    if len(weight) == 1:  # of two classes: one sigmoid
        weight, bias = (torch.cat((-half, half)) for half in (weight / 2, bias / 2))
    weight = weight / torch.from_numpy(scaler.scale_)
    return weight, bias - weight @ torch.from_numpy(scaler.mean_ * scaler.with_mean)
