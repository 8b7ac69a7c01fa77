"""What options are made of: a default with a range, and the parts that tools add to a section.

A tool adds options by `tools/<name>/options.py`:

- `SECTIONS`: dataclasses whose fields become options of a section: `{"model": LoraOptions}` with a
  field `rank` is `--model.rank`. Those of "images" are of `data`, also in `check` and `prepare`.
- `FREE_TO_CHANGE`: those of them that may differ when a run is resumed, by name: `model.rank`.
- `check(config)` raises `UserError` for values that contradict each other.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from .finding import find_tools

LARGE = 1e9
PLACES = {"images": "data"}  # parts of sections, which have no name of their own in an option


def within(default: object, low: float, high: float = LARGE) -> Any:  # noqa: ANN401 - a field
    """A field with its default and the range of its numbers, both ends included."""
    return dataclasses.field(default=default, metadata={"range": (low, high)})


def section(name: str) -> Callable[[type], type]:
    """A class decorator: the section `name` of the options, with those that tools add to it."""

    def extended(core: type) -> type:
        tools = find_tools("options").items()
        parts = {tool: m.SECTIONS[name] for tool, m in tools if name in m.SECTIONS}
        taken = {knob.name for knob in dataclasses.fields(core)}
        for tool, part in parts.items():
            own = {knob.name for knob in dataclasses.fields(part)}
            if twice := own & taken:
                raise ValueError(f"the tool {tool} adds {sorted(twice)} to {name!r}, which has it")
            taken |= own
        if not parts:
            return core
        names = {"__doc__": core.__doc__, "__module__": core.__module__}
        kind = type(core.__name__, (*reversed(parts.values()), core), names)
        return dataclasses.dataclass(frozen=True)(kind)

    return extended


def of_tools() -> dict[str, object]:
    """The options that tools add, by their dotted names, with their defaults."""
    return {
        f"{PLACES.get(name, name)}.{knob.name}".removeprefix("."): knob.default
        for tool in find_tools("options").values()
        for name, part in tool.SECTIONS.items()
        for knob in dataclasses.fields(part)
    }


def option(config: object, knob: str, otherwise: object) -> Any:  # noqa: ANN401
    """An option that a tool may have added, by its dotted name; `otherwise` without the tool."""
    part, _, name = knob.rpartition(".")
    return getattr(getattr(config, part), name, otherwise)


def check_ranges(config: object) -> None:
    """Raise `UserError` for the first number that is not in its range."""
    sections = {"": config} | {f"{name}.": part for name, part in vars(config).items()}
    for prefix, part in sections.items():
        for knob in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            low, high = knob.metadata.get("range", (-math.inf, math.inf))
            value = getattr(part, knob.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not low <= number <= high:
                    raise out_of_range(prefix + knob.name, number, f"{low:g} .. {high:g}")


def flag(knob: str) -> str:
    """The knob as the command line has it: `optim.warmup_epochs` -> `optim.warmup-epochs`."""
    return knob.replace("_", "-")


def out_of_range(knob: str, value: float, allowed: str) -> UserError:
    """What to raise for a number that a knob can't have; an integer may be more than any float."""
    shown = f"{value:g}" if isinstance(value, float) else value
    return UserError(f"--{flag(knob)} {shown} is not in {allowed}")
