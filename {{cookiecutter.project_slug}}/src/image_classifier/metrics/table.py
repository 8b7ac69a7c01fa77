"""Metrics of an evaluation: one table, `METRICS`, says how each is computed and read.

To add one: a line in `METRICS`. Classes without an image, or which all images have, are left out of
means over classes, and labels that are unknown are left out everywhere.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import isnan

import numpy as np
import torch
from torch.nn.functional import one_hot

from ..data import LEFT_OUT
from ..errors import choose
from ..runtime.console import printable
from .predictions import Predictions, calibrate, calibration_error


@dataclass(frozen=True)
class Metric:
    """How a metric is computed, and how to read it."""

    function: Callable[[Predictions], float] | None  # None: an evaluation counts it
    _: KW_ONLY
    lower_is_better: bool  # best.pt depends on it
    is_percent: bool = False  # a share of 1, shown in %; best.pt may be an image behind the best
    title: str = ""  # in words, where that is not its name
    task: str = ""  # that alone has it; none: both
    is_mean: bool = False  # over classes that have images
    needs_all: bool = False  # the probabilities of all classes

    def slack(self, count: int) -> float:
        """How much one of `count` images changes a share of them; nothing where it is no share."""
        return 1.001 / count if count and self.is_percent else 0.0  # more, for rounding


def truth_of(predictions: Predictions) -> np.ndarray:
    """Which labels images have, (count, classes) int8: LEFT_OUT where that does not count."""
    labels = predictions.source.labels
    counted = predictions.is_counted
    if labels.ndim == 1:
        truth = one_hot(labels, len(predictions.source.classes)).to(torch.int8)
        return truth.masked_fill(~counted[:, None], LEFT_OUT).numpy()
    return labels.masked_fill(~counted, LEFT_OUT).numpy()


def against_the_rest(predictions: Predictions) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The number of a class, which images have it, bool, and its probabilities, float32.

    Classes that no image has, or all have, are left out.
    """
    truth = truth_of(predictions)
    shares = predictions.probabilities.numpy()
    for number, (own, share) in enumerate(zip(truth.T, shares.T, strict=True)):
        known = (own != LEFT_OUT) & np.isfinite(share)
        if 0 < (own[known] == 1).sum() < known.sum():
            yield number, own[known] == 1, share[known]


def by_class(predictions: Predictions, score: str) -> np.ndarray:
    """A score of scikit-learn's of each class against the rest: (classes,) float64, some nan."""
    from sklearn import metrics

    found = np.full(len(predictions.source.classes), np.nan)
    if predictions.probabilities is not None:
        for number, is_class, shares in against_the_rest(predictions):
            found[number] = getattr(metrics, score)(is_class, shares)
    return found


average_precisions = partial(by_class, score="average_precision_score")
areas = partial(by_class, score="roc_auc_score")


def class_scores(predictions: Predictions, average: str | None = None) -> np.ndarray:
    """Precision, recall, F1 and images of each class: (4, classes); or a mean of them, (4,)."""
    from sklearn.metrics import precision_recall_fscore_support

    source = predictions.source
    counted = predictions.is_counted
    truth = source.labels[counted]
    found = predictions.predicted[counted]
    if source.is_multi_label:  # an empty column, or a single class would be taken for two
        both = ((table == 1) & counted for table in (source.labels, predictions.predicted))
        truth, found = (np.pad(table.numpy(), ((0, 0), (0, 1))) for table in both)
    how = {"labels": range(len(source.classes)), "average": average, "zero_division": np.nan}
    scores = precision_recall_fscore_support(np.asarray(truth), np.asarray(found), **how)
    return np.array(scores, dtype=float)


def recalls(predictions: Predictions) -> np.ndarray:
    """The recall of each class, (classes,) float64; nan for a class without images."""
    return class_scores(predictions)[1]


def macro_f1(predictions: Predictions) -> float:
    """The mean F1 of the classes that have images."""
    _, _, f1, images = class_scores(predictions)
    return mean(f1[images > 0])


def brier(predictions: Predictions) -> float:
    """The squared error of probabilities: of all classes of an image together, or of a label."""
    truth = truth_of(predictions)
    shares = predictions.probabilities.numpy()
    known = truth != LEFT_OUT
    errors = np.square(shares[known] - truth[known], dtype=np.float64)
    return float(errors.mean()) * (1 if predictions.source.is_multi_label else truth.shape[1])


def mean(values: np.ndarray) -> float:
    """The mean of those that are numbers; nan if none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


SINGLE, MULTI = "single-label", "multi-label"
share = partial(Metric, lower_is_better=False, is_percent=True)
share_by_class = partial(share, is_mean=True)

METRICS: dict[str, Metric] = {
    "top1": share(None, title="top-1", task=SINGLE),
    "exact": share(None, title="all labels right", task=MULTI),
    "top5": share(None, title="top-5", task=SINGLE),
    "loss": Metric(None, lower_is_better=True),
    "balanced_accuracy": share_by_class(lambda found: mean(recalls(found)), task=SINGLE),
    "micro_f1": share(
        lambda found: float(class_scores(found, "micro")[2]), title="micro F1", task=MULTI
    ),
    "macro_f1": share_by_class(macro_f1, title="macro F1"),
    "auroc": share_by_class(lambda found: mean(areas(found)), title="AUROC", needs_all=True),
    "average_precision": share_by_class(
        lambda found: mean(average_precisions(found)), needs_all=True
    ),
    "brier": Metric(brier, lower_is_better=True, title="Brier score", needs_all=True),
    "ece": share(
        lambda found: calibration_error(calibrate(found)), lower_is_better=True, title="ECE"
    ),
}
# In each line on an evaluation.
MAIN = [name for name, metric in METRICS.items() if metric.function is None]
MOST_SHOWN = 20  # classes whose scores are printed


def find_metric(name: str) -> Metric:
    """The metric `name`; `UserError` if there is none."""
    return choose("metric", name, METRICS)


def better(name: str) -> int:
    """1 if more of a metric is better, -1 if less is."""
    return -1 if find_metric(name).lower_is_better else 1


def scale(name: str) -> tuple[int, str, int]:
    """How a metric is shown: a factor, the unit of a difference, and digits."""
    return (100, " points", 2) if find_metric(name).is_percent else (1, "", 4)


def metric_title(name: str) -> str:
    """A metric's name in words."""
    return find_metric(name).title or name.replace("_", " ")


def metric_number(name: str, value: float, digits: int = 2) -> str:
    """A metric's value: a percentage, if it is a share of 1."""
    return f"{value:.{digits}%}" if find_metric(name).is_percent else f"{value:.4f}"


def metric_text(name: str, value: float, digits: int = 2) -> str:
    """A metric in words: `top-1 93.20%`."""
    return f"{metric_title(name)} {metric_number(name, value, digits)}"


def phrase(metrics: dict[str, float], best_by: str = "top1") -> str:
    """The most important metrics of an evaluation in a line; `best_by` is the first."""
    left_out = metrics.get("val/bad_images", 0)
    without = f", without {left_out} that could not be read" if left_out else ""
    lost = "" if "val/loss" in metrics else ", and a loss that is not finite"
    return words(metrics, dict.fromkeys((best_by, *MAIN))) + lost + without


def words(metrics: dict[str, float], names: Iterable[str]) -> str:
    """Those of the metrics `names` that are there; of means, over how few classes they are."""
    found = {name: metrics[f"val/{name}"] for name in names if f"val/{name}" in metrics}
    few = metrics.get("val/classes", 0)
    over = f" over the {few} class{'es' * (few > 1)} with images" if few else ""
    return ", ".join(
        metric_text(name, value) + over * find_metric(name).is_mean for name, value in found.items()
    )


def scores_text(
    metrics: dict[str, float], shares: Sequence[float], classes: tuple[str, ...], best_by: str
) -> str:
    """The scores of up to MOST_SHOWN classes, worst first, and the metrics of an evaluation.

    `shares` are from 0 to 1, one for each class, nan if nothing is known of it; or none at all.
    """
    names = [printable(name) for name in classes]
    pairs = zip(shares, names, strict=False)
    ranked = sorted((share, name) for share, name in pairs if not isnan(share))
    width = max(map(len, names))
    lines = [f"  {name:<{width}} {share:7.2%}" for share, name in ranked[:MOST_SHOWN]]
    if len(ranked) > MOST_SHOWN:
        lines.append(f"  and {len(ranked) - MOST_SHOWN} classes with higher values")
    lines.append(words(metrics, [name for name in METRICS if name not in (best_by, *MAIN)]))
    return "\n".join([*filter(None, lines), phrase(metrics, best_by)])
