"""Where a mean lies, and whether a difference is more than chance: paired by seeds, or by images.

https://doi.org/10.1162/089976698300017197 compares ways to do it with images; seeds are the plain
paired t-test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
# Within which Student's t lies with 95 % probability, for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)


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
    """Within which Student's t lies with 95 % probability: from a table, then from a series.

    The first terms of Abramowitz and Stegun, 26.7.5, are right to three decimals there.
    """
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    return 1.960 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3


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
    total = only_first + only_second
    less = min(only_first, only_second)
    ways = term = 1
    for n in range(1, less + 1):
        term = term * (total - n + 1) // n
        ways += term
    return min(1.0, ways / 2 ** (total - 1)) if total else 1.0
