"""A config as a flat dict of dotted names, as in `config.json`, and as words of a command line."""

import dataclasses
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..config import Config, flag


def words_of(knobs: dict[str, Any]) -> list[str]:
    """Knobs as words of a command line: `{"compute.compile": False}` -> `--compute.no-compile`."""
    words = []
    for knob, value in knobs.items():
        section, dot, name = flag(knob).rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{section}{dot}{'' if value else 'no-'}{name}")
        else:
            words += [f"--{flag(knob)}", *map(word, value if isinstance(value, tuple) else [value])]
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


@cache
def knob_kinds() -> dict[str, Any]:
    """The type of every knob by its dotted name."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            kinds |= {f"{name}.{key}": inner for key, inner in get_type_hints(kind).items()}
        else:
            kinds[name] = kind
    return kinds


def unflatten(flat: dict[str, Any]) -> Config:
    """The config that `flatten` made `flat` from; knobs that are missing have their defaults.

    Raises:
        TypeError: if there is no such knob, or its value is of another kind.
        UserError: if a value is out of range.
    """
    values: dict[str, Any] = {}
    for knob, value in flat.items():
        section, _, name = knob.rpartition(".")
        known = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        if knob not in knob_kinds():
            raise TypeError(f"there is no --{flag(knob)}")
        if not fits(known, knob_kinds()[knob]):
            raise TypeError(f"--{flag(knob)} {value!a} is not of the right kind")
        (values.setdefault(section, {}) if section else values)[name] = known
    sections = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = sections[name](**value)
    return Config(**values)


def fits(value: Any, kind: Any) -> bool:  # noqa: ANN401 - knobs have many types
    """Whether a knob of type `kind` can have `value`; a file may hold anything."""
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, choice) for choice in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis and type(value) is tuple else kinds
        return type(value) is tuple and len(value) == len(kinds) and all(map(fits, value, kinds))
    return type(value) in ((int, float) if kind is float else (kind,))
