"""A config as a flat dict of dotted names, as in `config.json`, and as words of a command line."""

import dataclasses
from collections.abc import Container
from typing import Any

from ..config import OPTIMIZERS, Config
from ..errors import UserError
from ..extensions import flag, of_tools
from .command_line import HELP, parse

# Options that are tools' now, with the values that saved configs of pretuned 0.1 have where they
# were not used.
MOVED = {
    "augment.cutmix": 0.0,
    "augment.cutout": 0,
    "augment.min_size": 0,
    "augment.mixup": 0.0,
    "augment.policy": "none",
    "compute.gradient_checkpointing": False,
    "compute.parallel": "ddp",
    "data.balance": "none",
    "data.columns": [],
    "data.labels": "",
    "data.on_bad_image": "stop",
    "model.head": "last",
    "model.lora_rank": 0,
    "optim.layer_decay": 1.0,
    "optim.loss": "entropy",
    "optim.teacher": "",
    "optim.teacher_share": 0.5,
    "optim.teacher_temperature": 1.0,
    "profile": False,
    "run.error_cost": 0.0,
    "run.finish_in_time": False,
    "run.init_head": "probe",
    "run.min_precision": 0.0,
}


def words_of(knobs: dict[str, Any]) -> list[str]:
    """Knobs as words of a command line: `{"compute.compile": False}` -> `--compute.no-compile`."""
    words = []
    for knob, value in knobs.items():
        section, dot, name = flag(knob).rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{section}{dot}{'' if value else 'no-'}{name}")
        elif str(value).startswith("-"):
            words.append(f"--{flag(knob)}={value}")
        else:  # JSON has no tuples
            values = value if isinstance(value, tuple | list) else [value]
            words += [f"--{flag(knob)}", *map(word, values)]
    return words


def word(value: object) -> str:
    """A value as a word of a command line: 2.0 -> `2`."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def flatten(config: Config) -> dict[str, Any]:
    """Every knob by its dotted name, in the order of this page."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def to_save(config: Config) -> dict[str, Any]:
    """`flatten`, without what tools add where it is as by default.

    So it can be read when the tool has gone.
    """
    usual = of_tools()
    return {knob: v for knob, v in flatten(config).items() if knob not in usual or v != usual[knob]}


def sections(options: Any, kind: type = Config) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    """The fields of a `Config`, or of another kind, among options that have more fields."""
    return {knob.name: getattr(options, knob.name) for knob in dataclasses.fields(kind)}


def changed_knobs(config: Config, preset: Config, without: Container[str] = ()) -> dict[str, Any]:
    """The knobs in which `config` is not as `preset`, by their dotted names; none of `without`."""
    now = flatten(config)
    was = flatten(preset)
    return {knob: now[knob] for knob in now if now[knob] != was[knob] and knob not in without}


def of_others(flat: dict[str, Any]) -> dict[str, Any]:
    """The knobs of a saved config that this project has not: of tools that are not here."""
    known = flatten(Config())
    found = {knob: v for knob, v in flat.items() if knob not in known and is_used(knob, v)}
    name = flat.get("optim.name", "sgd")
    return found if name in OPTIMIZERS else found | {"optim.name": name}


def is_used(knob: str, value: object) -> bool:
    """Whether a saved config says more by this than that an option was left as it was."""
    return knob not in MOVED or MOVED[knob] != ([*value] if isinstance(value, tuple) else value)


def unflatten(flat: dict[str, Any]) -> Config:
    """The config that `flatten` made `flat` from; knobs that are missing have their defaults.

    Raises:
        UserError: if there is no such knob, or it can't have this value.
    """
    words = words_of({knob: value for knob, value in flat.items() if is_used(knob, value)})
    if HELP & set(words):
        raise UserError("help is not a knob")
    return parse(Config, words, prog="", about="")
