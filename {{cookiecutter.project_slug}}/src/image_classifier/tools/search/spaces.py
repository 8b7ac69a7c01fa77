"""Search spaces: which knobs `search` may change, and how their values are distributed.

To add one: a function from the config to a dict, and its name in `SPACES`; one with the name of a
preset is that preset's. Keys are knobs; values are Ray Tune's distributions with bounds (`choice`,
`uniform`, `loguniform`, `randint`, ...):
https://docs.ray.io/en/latest/tune/api/search_space.html. Where a value or a range depends on
another knob, return a function of an Optuna trial, as `optimizers` does, for TPE and random search:
https://optuna.readthedocs.io/en/stable/tutorial/10_key_features/002_configurations.html
"""

from collections.abc import Callable
from typing import Any

from ray import tune

from ...config import OPTIMIZERS, Config
from ...extensions import of_tools

Space = dict[str, Any] | Callable[[Any], None]


def default(config: Config) -> Space:
    """The learning rate around the preset's, weight decay, and label smoothing."""
    decay = config.optim.weight_decay or 1e-4
    return lr(config) | {
        "optim.weight_decay": tune.loguniform(decay / 10, decay * 10),
        "optim.label_smoothing": tune.quniform(0, 0.2, 0.05),
    }


def lr(config: Config) -> Space:
    """The learning rate alone: up to 16 times less or more than the preset's."""
    return {"optim.lr": tune.loguniform(config.optim.lr / 16, config.optim.lr * 16)}


def finetune(config: Config) -> Space:
    """What decides how far trained weights move, and how strongly images are augmented."""
    space = lr(config)
    if "optim.layer_decay" in of_tools():
        space["optim.layer_decay"] = tune.choice([0.65, 0.75, 0.85, 1.0])
    if "augment.policy" in of_tools():
        space["augment.policy"] = tune.choice(["none", "trivialaugment"])
    return space


def optimizers(_: Config) -> Space:
    """The optimizer, and a learning rate from a range that suits it."""
    usual = {"sgd": 0.2, "adamw": 1e-3, "muon": 0.02}
    names = [name for name in usual if name in OPTIMIZERS]

    def suggest(trial: Any) -> None:  # noqa: ANN401 - of Optuna
        name = trial.suggest_categorical("optim.name", names)
        trial.suggest_float("optim.lr", usual[name] / 10, usual[name] * 10, log=True)

    return suggest


SPACES: dict[str, Callable[[Config], Space]] = {
    space.__name__: space for space in (default, lr, finetune, optimizers)
}
