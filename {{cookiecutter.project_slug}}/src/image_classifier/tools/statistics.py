"""Whether a difference is more than chance: paired by seeds, or by images.

https://doi.org/10.1162/089976698300017197 compares ways to do it with images; seeds are the plain
paired t-test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

CONFIDENCE = 0.95
MOST_SEEDS = 100


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


def by_seeds(first: Sequence[float], second: Sequence[float], grain: float) -> Difference:
    """The paired difference of what two recipes reach, seed by seed; at least two.

    Values come in steps of `grain`, so they are taken to vary by that much at the least: a few
    that happen to be equal prove nothing.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean, count = fmean(differences), len(differences)
    reach = t_quantile(count - 1) * max(stdev(differences), grain) / math.sqrt(count)
    return Difference(mean, mean - reach, mean + reach)


def seeds_needed(difference: float, spread: float) -> int:
    """With how many seeds a difference would be told from none; MOST_SEEDS if not even with those.

    `spread` is the standard deviation of the paired differences.
    """
    counts = range(2, MOST_SEEDS)
    enough = (n for n in counts if t_quantile(n - 1) * spread < abs(difference) * math.sqrt(n))
    return next(enough, MOST_SEEDS)


@cache
def t_quantile(freedom: int) -> float:
    """Within which Student's t lies with 95 % probability."""
    low, high = 0.0, 1000.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def t_within(t: float, freedom: int) -> float:
    """The probability that Student's t lies between -t and t.

    The finite series for whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term = total = cosine if is_odd else 1.0
    for n in range(2 + is_odd, freedom - 1, 2):
        term *= cosine**2 * (n - 1) / n
        total += term
    if not is_odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))


def by_images(only_first: int, only_second: int, count: int) -> Difference:
    """The difference of two models' shares of right answers to the same `count` images.

    `only_first` of them only the first has right. https://doi.org/10.1002/sim.1781 (Agresti and
    Min): with half an image more in each of the four cells the interval holds for few images too.
    """
    shift, total = only_second - only_first, count + 2
    mean = shift / total
    reach = 1.96 * math.sqrt(only_first + only_second + 1 - shift * mean) / total
    return Difference(shift / count, mean - reach, mean + reach)


def mcnemar(only_first: int, only_second: int) -> float:
    """The probability of so uneven a split, or a more uneven one, if both models are as good.

    Exact: images on which one of two is right fall to either like a coin.
    https://doi.org/10.1007/BF02295996
    """
    total, less = only_first + only_second, min(only_first, only_second)
    ways = term = 1
    for n in range(1, less + 1):
        term = term * (total - n + 1) // n
        ways += term
    return min(1.0, ways / 2 ** (total - 1)) if total else 1.0
