"""Where a mean lies, and whether a difference is more than chance: paired by seeds, or by images.

https://doi.org/10.1162/089976698300017197 compares ways to do it with images; seeds are the plain
paired t-test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean, or a mean difference, and its interval of 95 % confidence."""

    mean: float
    deviation: float  # standard deviation of single values
    low: float
    high: float


def mean_of(
    values: Sequence[float], grain: float, overlap: float = 0.0, is_share: bool = True
) -> Mean:
    """The mean of what two runs or more reach: shares of 1, such as accuracies, or other numbers.

    Some come in steps of `grain`, so they are taken to vary by that much at the least: a few that
    happen to be equal prove nothing. `overlap` widens the interval where they depend on each other.
    """
    from scipy.stats import t

    mean = fmean(values)
    deviation = stdev(values)
    error = max(deviation, grain) * math.sqrt(1 / len(values) + overlap)
    # Of numbers that are all equal, and come in no steps, there is no interval.
    low, high = t.interval(CONFIDENCE, len(values) - 1, mean, error) if error else (mean, mean)
    if is_share:
        low = max(0.0, low)
        high = min(1.0, high)
    return Mean(mean, deviation, float(low), float(high))


def by_images(only_first: int, only_second: int, count: int) -> Mean:
    """The difference of two models' shares of right answers to the same `count` images.

    `only_first` of them only the first has right. https://doi.org/10.1002/sim.1781 (Agresti and
    Min): with half an image more in each of the four cells the interval holds for few images too.
    """
    shift = only_second - only_first
    total = count + 2
    center = shift / total
    deviation = math.sqrt((only_first + only_second + 1 - shift * center) / total)
    reach = 1.96 * deviation / math.sqrt(total)
    return Mean(shift / count, deviation, center - reach, center + reach)


def mcnemar(only_first: int, only_second: int) -> float:
    """The probability of so uneven a split, or a more uneven one, if both models are as good.

    Exact: images on which one of two is right fall to either like a coin.
    https://doi.org/10.1007/BF02295996
    """
    from scipy.stats import binomtest

    total = only_first + only_second
    return float(binomtest(only_first, total).pvalue) if total else 1.0
