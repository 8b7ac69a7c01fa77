"""A linear probe: logistic regression on the features of trained weights.

Fine-tuning begins with it: from a last layer that fits, the others keep what they know, which the
noise of a random one would spoil (https://arxiv.org/abs/2202.10054).
"""

import math
import warnings
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...config import Config
from ...data import LEFT_OUT, Source
from ...errors import UserError
from ...models import begin_at_zero, find_head
from ...runtime.console import some
from ...tracking import Setup, blank_logits
from .features import Features, compute_features, left_out

FOLDS = 5
# C of scikit-learn, 1 / the L2 penalty. No larger ones: a layer that fits the training images
# perfectly leaves fine-tuning nothing to learn from them.
STRENGTHS = (1e-4, 1e-3, 3e-3, 0.01)
STRENGTH = 0.01  # where there are too few images to choose one
LARGE = 2**22  # numbers, in whose products several threads are faster than one
MOST_WORK = 2**28  # images x features x classes that are fitted: 100 s of a core
ROUNDING = 1e-3  # of logits, relative to the largest
SOFTER = 0.2  # the share of the logits of the probe that training begins with
Score = tuple[float, float]  # top-1 and log likelihood of images that were left out


class Fit(NamedTuple):
    """A linear layer fitted to features, and what cross-validation says of it."""

    weight: Tensor  # (classes, width) float64
    bias: Tensor  # (classes,) float64
    note: str  # the penalty and the score on images that were left out


def fit_head(setup: Setup) -> tuple[str, bool]:
    """Fit the last layer of a model, whose other weights are trained, to the training images.

    It is zeros, and stays so where it can't be fitted. Returns a note for the log, and whether it
    was fitted; every rank has the same layer.

    Raises:
        UserError: if an image cannot be read, or `config` has no epochs and nothing can be fitted.
        FaultError: if memory does not suffice, too many cannot be read, or a worker was killed.
    """
    config = setup.config
    world = setup.world
    model = setup.model
    data = setup.train_data
    _, layer = find_head(model)
    why = misfit(config, layer, data.source)
    if not why:
        with closing(data.open_split("train")) as train:
            features = compute_features(setup, train)
        note = f"linear probe of {features.values.shape[1]:,} features, {features.note}"
        why = misfit(config, layer, replace(data.source, labels=features.labels))
    if not why:
        with world.local_main_first("fitting the last layer"):
            if world.is_main:
                note += fit_layer(layer, features, data.weights, config.seed)
        for parameter in layer.parameters():  # the other ranks still have zeros
            parameter.data.copy_(world.all_reduce_sum(parameter.data.clone()))
        if not rescale(model, layer, config):
            begin_at_zero(model)
            why = "the network computes on after it"
    if not why:
        return note, True
    if not config.epochs:
        raise UserError(f"{config.model.name}: its last layer can't be fitted: {why}")
    begins = "begins at zero" if isinstance(layer, nn.Linear) else "has random weights"
    return f"the last layer {begins}: {why}", False


@torch.no_grad()
def soften_head(*models: nn.Module) -> None:
    """Make the logits of the probe smaller, in place, before all layers learn.

    It hardly errs on the training images, so that they would not say how to change the features;
    with a softer one they do, and the classes stay in the same order.
    """
    for model in models:
        for weight in find_head(model)[1].parameters():
            weight.mul_(SOFTER)


def misfit(config: Config, layer: nn.Module, source: Source) -> str:
    """Why `layer` is not fitted to the training images `source`; nothing if it can be."""
    if not isinstance(layer, nn.Linear):
        return "it is no linear layer"
    if config.run.init_head == "zero":
        return "as --run.init-head says"
    classes = source.classes
    sizes = source.class_counts().tolist()
    missing = tuple(name for name, size in zip(classes, sizes, strict=True) if not size)
    if not source.is_multi_label and (missing or len(classes) < 2):
        return f"there is no training image of {some(missing)}" if missing else "there is one class"
    if (work := len(source) * layer.in_features * len(classes)) > MOST_WORK:
        return (
            f"{len(source):,} images x {layer.in_features:,} features x {len(classes):,} classes "
            f"would take too long, {work / MOST_WORK:.1f} x the limit"
        )
    return ""


def fit_layer(layer: nn.Linear, features: Features, weights: Tensor | None, seed: int) -> str:
    """Fit `layer` to features; `weights` are those of the images. Returns a note for the log."""
    import sklearn.linear_model  # noqa: F401 - what is loaded later would have all threads
    from threadpoolctl import threadpool_limits

    known = ~left_out(features.labels)
    weights = None if weights is None else weights.cpu()[known]
    values = features.values[known]
    labels = features.labels[known]
    # Threads wait for each other after each small product: several take ten times the CPU time of
    # one with 300 x 256 features, and where other programs keep the cores busy ten times as long.
    threads = 1 if values.numel() < LARGE else None
    with threadpool_limits(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes smaller than the number of folds
        fit = fit_labels if labels.ndim > 1 else fit_classes
        weight, bias, note = fit(values, labels, layer.bias is not None, seed, weights)
    layer.weight.data.copy_(weight)
    if layer.bias is not None:
        layer.bias.data.copy_(bias)
    return f"; {note}"


def fit_classes(
    features: Tensor, labels: Tensor, has_bias: bool, seed: int, weights: Tensor | None = None
) -> Fit:
    """Logistic regression, with the penalty of the best top-1 in cross-validation.

    Args:
        features: (count, width) float32.
        labels: (count,) int64; each class from 0 on has an image.
        has_bias: whether the layer has one.
        seed: of the folds.
        weights: (count,) float32, how much each image counts; None: all alike.
    """
    weight, bias, strength, score = fit_logistic(features, labels, weights, has_bias, seed)
    if len(weight) == 1:  # of two classes: one sigmoid
        weight = torch.cat((-weight, weight)) / 2
        bias = torch.cat((-bias, bias)) / 2
    told = f", top-1 {score[0]:.2%} in cross-validation" if score else ""
    return Fit(weight, bias, f"C = {strength:g}{told}")


def fit_labels(
    features: Tensor, labels: Tensor, has_bias: bool, seed: int, weights: Tensor | None = None
) -> Fit:
    """Logistic regression of each label, with the penalty of the lowest loss in cross-validation.

    As `fit_classes`, but `labels` is (count, classes) int8: 1, 0 or LEFT_OUT, which does not count.
    A label that all images have, or none, has no weights: its bias is that of its frequency.
    """
    weight = torch.zeros((labels.shape[1], features.shape[1])).double()
    bias = torch.zeros(len(weight)).double()
    num_right = num_known = 0
    for number, column in enumerate(labels.T):
        known = column != LEFT_OUT
        targets = column[known]
        positives = int(targets.sum())
        if positives in (0, len(targets)):
            bias[number] = math.log((positives + 0.5) / (len(targets) - positives + 0.5))
            continue
        own = None if weights is None else weights[known]
        (weight[number],), (bias[number],), _, score = fit_logistic(
            features[known], targets, own, has_bias, seed, by_loss=True
        )
        if score:
            num_right += score[0] * len(targets)
            num_known += len(targets)
    if not num_known:
        return Fit(weight, bias, "too few images to cross-validate")
    return Fit(weight, bias, f"{num_right / num_known:.2%} of the labels right in cross-validation")


def fit_logistic(
    features: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    has_bias: bool,
    seed: int,
    *,
    by_loss: bool = False,
) -> tuple[Tensor, Tensor, float, Score | None]:
    """Logistic regression on standardized features, with the best of `STRENGTHS`.

    That is the one of the best top-1 in cross-validation, and of equal ones of the lowest loss; or
    `by_loss` alone, with both labels in each fold. Returns weight (classes, width) and bias
    (classes,) float64 for features as they are, of two classes one row; the strength; and its
    score, if there are two folds or more.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    values = features.double().numpy()
    targets = labels.numpy()
    own = {} if weights is None else {"logisticregression__sample_weight": weights.numpy()}
    scaler = StandardScaler(with_mean=has_bias)
    regression = LogisticRegression(fit_intercept=has_bias, max_iter=1000)
    model = make_pipeline(scaler, regression)
    scores: dict[float, Score] = {}
    sizes = labels.bincount()
    needs_both = by_loss or len(sizes) == 2
    if (count := min(FOLDS, int(sizes.min() if needs_both else sizes.max()))) > 1:
        folds = StratifiedKFold(count, shuffle=True, random_state=seed % 2**32)
        for strength in STRENGTHS:
            regression.C = strength
            found = cross_val_predict(
                model, values, targets, cv=folds, method="predict_proba", params=own
            )
            top1 = float(np.mean(found.argmax(1) == targets))
            scores[strength] = top1, -log_loss(targets, found, labels=range(found.shape[1]))
    strength = regression.C = max(scores, key=lambda c: scores[c][by_loss:], default=STRENGTH)
    model.fit(values, targets, **own)
    weight = torch.from_numpy(regression.coef_) / torch.from_numpy(scaler.scale_)
    bias = torch.from_numpy(regression.intercept_)
    # The standardization is folded into them.
    bias = bias - weight @ torch.from_numpy(scaler.mean_ * has_bias)
    return weight, bias, strength, scores.get(strength)


def rescale(model: nn.Module, layer: nn.Linear, config: Config) -> bool:
    """Divide `layer` by what the network multiplies its outputs by.

    Returns whether it does nothing else with them; if it does, the layer stays as it is.
    """
    outputs: list[Tensor] = []
    hook = layer.register_forward_hook(lambda *call: outputs.append(call[2]))
    logits = blank_logits(model, config.data.eval_size, config.data.channels)
    hook.remove()
    (output,) = outputs
    scale = float((logits * output).sum() / output.square().sum())
    if not torch.allclose(logits, scale * output, atol=ROUNDING * float(logits.abs().max())):
        return False
    for weight in layer.parameters():
        weight.data.div_(scale)
    return True
