"""Who proposes configs: Optuna's samplers, or a grid."""

import math
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from ray.tune.search.optuna import OptunaSearch

from ...config import Config
from ...errors import UserError
from ...runtime.config_dict import flatten, unflatten
from .spaces import Space

Knobs = dict[str, Any]  # that a trial changes
Distributions = dict[str, BaseDistribution] | Callable[[Any], None]  # a space as Optuna has it
FIXED = ("epochs", "seed", "run.")  # of all trials
GOAL = {"metric": "score", "mode": "max"}  # the metric that decides, negative if less is better


def open_space(space: Space, config: Config) -> Distributions:
    """A search space as Optuna has it, if its knobs exist and the config allows their bounds.

    A function is called only when a trial is proposed: the run refuses what it cannot have.

    Raises:
        UserError: naming the knob, or the value.
    """
    if callable(space):
        return space
    found: dict[str, BaseDistribution] = {}
    for knob, domain in space.items():
        if knob.startswith(FIXED):
            raise UserError(f"a search space cannot change {knob}: it is the same in all trials")
        with suppress(ValueError):
            found |= OptunaSearch.convert_search_space({knob: domain})
        if knob not in found:
            raise UserError(
                f"{knob} of the search space is no distribution with bounds, as tune.choice([1])"
            )
        for value in evenly(found[knob], 2):
            unflatten(flatten(config) | {knob: value})
        if hasattr(found[knob], "log"):  # it has bounds: what is proposed is rounded, too
            found[knob].low = tidy(found[knob].low)
            found[knob].high = tidy(found[knob].high)
    return found


def build_engine(
    kind: str, space: Distributions, recorded: list[Knobs], trials: int, seed: int
) -> OptunaSearch:
    """What proposes configs: those that are `recorded` again, in their order, and then others.

    A grid ends with {}, once it has no more points.

    Raises:
        UserError: if there is no grid of so many trials over such a space.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if kind == "grid":
        new = [point for point in grid(space, trials, seed) if point not in recorded]
        points = dict(enumerate((recorded + new)[:trials]))
        return OptunaSearch(lambda trial: points.get(trial.number, {}), **GOAL)
    # The first are drawn at random, a quarter at most of TPE's; and no two at once at one place.
    startup = trials if kind == "random" else max(2, min(10, trials // 4))
    # What is proposed again takes nothing from the generator.
    seed = (seed + len(recorded)) % 2**32
    sampler = optuna.samplers.TPESampler(n_startup_trials=startup, constant_liar=True, seed=seed)
    return OptunaSearch(space, sampler=sampler, points_to_evaluate=list(recorded), **GOAL)


def grid(space: Distributions, trials: int, seed: int) -> list[Knobs]:
    """At most `trials` combinations of evenly spaced values, in an order of the seed.

    Raises:
        UserError: if the space is a function, or there are more combinations than `trials`.
    """
    if callable(space):
        raise UserError("--search grid needs a dict as its space: set --search tpe or random")
    choices = [len(d.choices) for d in space.values() if isinstance(d, CategoricalDistribution)]
    num_open = max(1, len(space) - len(choices))
    levels = int((trials / math.prod(choices)) ** (1 / num_open) + 1e-9)
    axes = [evenly(distribution, max(2, levels)) for distribution in space.values()]
    points = [dict(zip(space, point, strict=True)) for point in product(*axes)]
    if len(points) > trials:
        raise UserError(
            f"a grid over {', '.join(space)} has {len(points)} points at least: set --trials "
            f"{len(points)}, or another --search"
        )
    random.Random(seed).shuffle(points)  # noqa: S311 - no secret
    return points


def evenly(distribution: BaseDistribution, levels: int) -> list[Any]:
    """All categories; or values, evenly spaced from bound to bound, each once."""
    if isinstance(distribution, CategoricalDistribution):
        return [*distribution.choices]
    low, high, step = distribution.low, distribution.high, distribution.step
    values = (np.geomspace if distribution.log else np.linspace)(low, high, levels)
    if step:
        values = np.unique(low + np.round((values - low) / step) * step)
    return [int(v) if isinstance(distribution, IntDistribution) else tidy(v) for v in values]


def tidy(value: Any) -> Any:  # noqa: ANN401 - a knob
    """A value as a command line shows it, with six digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
