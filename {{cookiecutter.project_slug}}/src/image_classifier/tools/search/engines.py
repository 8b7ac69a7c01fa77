"""Who proposes configs: lists that are drawn beforehand, and Optuna's TPE."""

import math
import random
import warnings
from itertools import product
from typing import Any

import numpy as np
from ray.tune.search import Searcher
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Quantized
from ray.tune.search.variant_generator import generate_variants

from ...config import Config
from ...errors import UserError
from ...runtime.config_dict import flatten, unflatten
from .spaces import Space

Knobs = dict[str, Any]  # that a trial changes
FIXED = ("epochs", "seed", "run.")  # of all trials
GOAL = {"metric": "score", "mode": "max"}  # the metric that decides, negative if less is better


class Listed(Searcher):
    """Proposes what is in a list."""

    def __init__(self, proposals: list[Knobs]) -> None:
        """Nothing is learned from results."""
        super().__init__(**GOAL)
        self.proposals = iter(proposals)

    def suggest(self, _: str) -> Knobs | str:
        """The next of the list."""
        return next(self.proposals, Searcher.FINISHED)

    def on_trial_complete(self, *_: object, **__: object) -> None:
        """Learn nothing."""


def build_engine(
    kind: str, space: Space, recorded: list[Knobs], trials: int, seed: int
) -> Searcher:
    """The searcher that proposes what is `recorded` again, in its order, and then others.

    Args:
        kind: tpe, random or grid.
        space: what it draws from.
        recorded: what an earlier search has proposed.
        trials: proposals in all.
        seed: of what it draws.

    Raises:
        UserError: if it cannot search such a space.
    """
    # What is proposed again takes nothing from the generator.
    seed_now = (seed + len(recorded)) % 2**32
    if kind == "grid":
        points = [point for point in grid(space, trials, seed) if point not in recorded]
        return Listed((recorded + points)[:trials])
    if kind == "random" and not callable(space):
        return Listed(recorded + [draw(space, seed, n) for n in range(len(recorded), trials)])
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if not callable(space):
        check_ends(kind, space)
        space = OptunaSearch.convert_search_space(space)
    if kind == "random":
        sampler = optuna.samplers.RandomSampler(seed_now)
    else:
        with warnings.catch_warnings():  # of options that are marked as experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # A quarter at random; and no two at once at the same place.
            startup = max(2, min(10, trials // 4))
            sampler = optuna.samplers.TPESampler(
                n_startup_trials=startup, constant_liar=True, seed=seed_now
            )
    return OptunaSearch(space, sampler=sampler, points_to_evaluate=list(recorded), **GOAL)


def draw(space: Knobs, seed: int, number: int) -> Knobs:
    """What random search tries in trial `number`."""
    generator = np.random.RandomState([seed % 2**32, number])
    _, drawn = next(generate_variants({"config": space}, random_state=generator))
    return drawn["config"]


def grid(space: Space, trials: int, seed: int) -> list[Knobs]:
    """All combinations of categories and of evenly spaced values, in an order of the seed.

    An order by value would let each trial beat the one before, and none be ended early.

    Raises:
        UserError: if a knob has no bounds, or there are more combinations than `trials`.
    """
    check_ends("grid", space)
    choices = [len(ends(domain)) for domain in space.values() if isinstance(domain, Categorical)]
    num_open = len(space) - len(choices)
    levels = int((trials / math.prod(choices)) ** (1 / max(1, num_open)) + 1e-9)
    axes = [
        ends(domain) if isinstance(domain, Categorical) else evenly(domain, max(2, levels))
        for domain in space.values()
    ]
    points = [dict(zip(space, point, strict=True)) for point in product(*axes)]
    if len(points) > trials:
        raise UserError(
            f"a grid over {', '.join(space)} has {len(points)} points at least: set --trials "
            f"{len(points)}, or another --search"
        )
    random.Random(seed).shuffle(points)  # noqa: S311 - no secret
    return points


def evenly(domain: Domain, levels: int) -> list[float]:
    """Values of a distribution, evenly spaced from bound to bound, each once."""
    sampler = domain.get_sampler()
    step = int(isinstance(domain, Integer))
    if isinstance(sampler, Quantized):
        sampler, step = sampler.sampler, sampler.q
    spaced = np.geomspace if isinstance(sampler, LogUniform) else np.linspace
    values = spaced(*ends(domain), levels)
    if step:
        values = np.unique(np.round(values / step) * step)
    return [int(v) if isinstance(domain, Integer) else tidy(v) for v in values]


def ends(domain: Domain) -> list[Any]:
    """The lowest and the highest value of a distribution, or its categories; [] without bounds."""
    if isinstance(domain, Categorical):
        return domain.categories
    if (
        not isinstance(domain, Float | Integer)
        or not np.isfinite([domain.lower, domain.upper]).all()
    ):
        return []
    # Ray's integers end below the upper bound, unless they are quantized.
    is_open = isinstance(domain, Integer) and not isinstance(domain.get_sampler(), Quantized)
    return [domain.lower, domain.upper - is_open]


def check_space(space: Space, config: Config) -> None:
    """Check that the knobs of a space exist, and that the config allows the values at its ends.

    A function is called only when a trial is proposed: the run refuses what it cannot have.

    Raises:
        UserError: naming the knob, or the value.
    """
    for knob, domain in {} if callable(space) else space.items():
        if knob.startswith(FIXED):
            raise UserError(f"a search space cannot change {knob}: it is the same in all trials")
        if not isinstance(domain, Domain):
            raise UserError(f"{knob} of the search space is no distribution, as tune.choice([1])")
        for value in ends(domain):
            unflatten(flatten(config) | {knob: value})


def check_ends(kind: str, space: Space) -> None:
    """Check that each knob has bounds or categories that depend on no other knob.

    Raises:
        UserError: naming the knob that has not, and the searches that can do with that.
    """
    if callable(space):
        raise UserError(f"--search {kind} needs a dict as its space: set --search tpe or random")
    for knob, domain in space.items():
        if not ends(domain):
            raise UserError(f"--search {kind} needs bounds for {knob}: set --search random")


def text_of(domain: Domain) -> str:
    """A distribution in words: `LogUniform (0.1, 1)`."""
    sampler = domain.get_sampler()
    if isinstance(sampler, Quantized):
        return f"{sampler.sampler} {domain.domain_str} by {sampler.q:g}"
    return f"{sampler} {domain.domain_str}" if ends(domain) else type(domain).__name__


def tidy(value: Any) -> Any:  # noqa: ANN401 - a knob
    """A value as a command line shows it: without numpy's type, with six digits."""
    value = value.item() if isinstance(value, np.generic) else value
    return float(f"{value:.6g}") if isinstance(value, float) else value
