"""What a run says at its end: what it confuses, and whether fine-tuning gained over the probe."""

from math import sqrt

import torch
from torch import Tensor

from ...metrics import Predictions, counted_and_correct
from ...runtime.console import printable, say
from ...tracking import Observer, Result, Setup

NORMAL = 1.96  # standard deviations of an interval of 95 %
SHOWN = 2  # pairs of classes
LEAST = 2  # mistakes of a pair that is shown


def open_observer(setup: Setup) -> Observer:
    """Keep the predictions before the first step, which are those of a linear probe."""
    train = setup.train_data.source
    probe: list[Predictions] = []

    def conclude(result: Result) -> str:
        if not result.is_last:
            if result.state.startswith("step 0 of"):
                probe[:] = [result.predictions]
            return ""
        facts = [confusions(result.predictions, train.class_counts())]
        facts += [gain_over(probe[0], result.predictions)] if probe else []
        if told := "; ".join(filter(None, facts)):
            say(told)
        return ""

    return Observer(conclude=conclude)


def confusions(predictions: Predictions, num_training: Tensor) -> str:
    """The pairs of classes that are confused most, with their images; nothing of several labels.

    `num_training` has the number of training images of each class: (classes,).
    """
    if predictions.source.is_multi_label:
        return ""
    table = predictions.confusion()
    sizes = table.sum(1)
    wrong = table.clone().fill_diagonal_(0)
    classes = [printable(name) for name in predictions.source.classes]
    told = []
    for place in wrong.flatten().argsort(descending=True, stable=True)[:SHOWN].tolist():
        true, taken = divmod(place, len(classes))
        if (count := int(wrong[true, taken])) >= LEAST:
            told.append(
                f"{classes[true]} for {classes[taken]} ({count} of {int(sizes[true])} images; "
                f"{int(num_training[true])} and {int(num_training[taken])} to train on)"
            )
    return f"most often taken: {', '.join(told)}" if told else ""


def gain_over(probe: Predictions, best: Predictions) -> str:
    """How much more of the images the best weights have right than the probe, and by chance."""
    (counted, before), (_, after) = (
        counted_and_correct(found.predicted, found.source.labels) for found in (probe, best)
    )
    gained = int((after & ~before).sum())
    lost = int((before & ~after).sum())
    mean, width = difference(gained, lost, int(counted.sum()))
    told = f"fine-tuning gained {100 * mean:+.1f} points over the linear probe"
    low, high = 100 * (mean - width), 100 * (mean + width)
    chance = "" if low > 0 or high < 0 else ", which may be chance"
    return f"{told}{chance} (95 %: {low:+.1f} .. {high:+.1f})"


def difference(gained: int, lost: int, count: int) -> tuple[float, float]:
    """The difference of two shares of the same images, and half of its interval of 95 %.

    With half an image more in each of four cells: https://doi.org/10.1002/sim.1781
    """
    gained, lost, count = gained + 0.5, lost + 0.5, count + 2
    mean = (gained - lost) / count
    return mean, NORMAL * sqrt((gained + lost) / count - mean**2) / sqrt(count)


def mean_gain(more: Tensor, fewer: Tensor) -> tuple[float, float]:
    """The mean difference of two scores of the same images, (count,) each, and half its interval.

    https://en.wikipedia.org/wiki/Paired_difference_test
    """
    differences = (more - fewer).double()
    if len(differences) < 2:
        return float(differences.mean()), 1.0
    # A scatter of half an image at least: a few equal ones prove nothing.
    scatter = torch.clamp(differences.std(), min=0.5 / sqrt(len(differences)))
    return float(differences.mean()), NORMAL * float(scatter) / sqrt(len(differences))
