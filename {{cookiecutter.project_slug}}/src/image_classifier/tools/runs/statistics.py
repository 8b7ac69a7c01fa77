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
class Difference:
    """How much larger the second of two is, and where the truth lies with 95 % confidence."""

    mean: float
    low: float
    high: float

    @property
    def is_real(self) -> bool:
        """Whether it can be told from none."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Mean:
    """The mean of the shares that several runs reach, and its interval of 95 % confidence."""

    mean: float
    deviation: float  # standard deviation of single runs
    low: float
    high: float


def mean_of(
    values: Sequence[float], grain: float, overlap: float = 0.0, is_share: bool = True
) -> Mean:
    """The mean of what two runs or more reach: shares of 1, such as accuracies, or other numbers.

    They come in steps of `grain`, so they are taken to vary by that much at the least. Folds share
    training images: their results depend on each other, so their deviation is too small for the
    interval (https://www.jmlr.org/papers/v5/grandvalet04a.html). `overlap`, the ratio of validation
    to training images, corrects it: https://doi.org/10.1023/A:1024068626366
    """
    mean = fmean(values)
    deviation = stdev(values)
    count = len(values)
    reach = t_quantile(count - 1) * max(deviation, grain) * math.sqrt(1 / count + overlap)
    low, high = mean - reach, mean + reach
    return Mean(mean, deviation, *((max(0.0, low), min(1.0, high)) if is_share else (low, high)))


def by_seeds(first: Sequence[float], second: Sequence[float], grain: float) -> Difference:
    """The paired difference of what two recipes reach, seed by seed; at least two.

    Values come in steps of `grain`, so they are taken to vary by that much at the least: a few
    that happen to be equal prove nothing.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = fmean(differences)
    count = len(differences)
    reach = t_quantile(count - 1) * max(stdev(differences), grain) / math.sqrt(count)
    return Difference(mean, mean - reach, mean + reach)


def t_quantile(freedom: int) -> float:
    """How far from 0 Student's t is at most, with 95 % probability."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom))


def by_images(only_first: int, only_second: int, count: int) -> Difference:
    """The difference of two models' shares of right answers to the same `count` images.

    `only_first` of them only the first has right. https://doi.org/10.1002/sim.1781 (Agresti and
    Min): with half an image more in each of the four cells the interval holds for few images too.
    """
    shift = only_second - only_first
    total = count + 2
    mean = shift / total
    reach = 1.96 * math.sqrt(only_first + only_second + 1 - shift * mean) / total
    return Difference(shift / count, mean - reach, mean + reach)


def mcnemar(only_first: int, only_second: int) -> float:
    """The probability of so uneven a split, or a more uneven one, if both models are as good.

    Exact: images on which one of two is right fall to either like a coin.
    https://doi.org/10.1007/BF02295996
    """
    from scipy.stats import binomtest

    total = only_first + only_second
    return float(binomtest(only_first, total).pvalue) if total else 1.0
