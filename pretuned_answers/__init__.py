"""The rules that every answer must pass, written once for all who ask.

Cookiecutter asks them through `gate.py` before it makes a folder, the hooks ask again before the
folder is filled, and the `pretuned` command asks before its first prompt. Standard library only:
the hooks run in whatever Python cookiecutter lives in.
"""

import keyword
import re
import sys
import unicodedata
from collections.abc import Mapping
from typing import NamedTuple

MAX_NAME_LENGTH = 50
MAX_TEXT_LENGTH = 200

_EMAIL = r"[A-Za-z0-9][A-Za-z0-9._%+-]*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+"

# Names that no file may have on Windows.
_DEVICES = {"con", "prn", "aux", "nul"}
_DEVICES |= {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
# What the project imports or depends on would be hidden by a project or a package of that name.
_TAKEN = {"numpy", "pil", "pillow", "pytest", "ruff", "safetensors", "tensorboard", "torch"}
_TAKEN |= {"torchvision", "triton", "tyro"}
# What stands beside the package: train.py, and folders from which Python could import.
_BESIDE = {"build", "data", "dist", "runs", "src", "tests", "train"}
_PYTHON = {*keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names}

# They break lines and quotes, or make a text read as another one than it is.
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Except the two that join and part letters, in emoji and in many scripts.
_JOINERS = "\u200c\u200d"
_MARKUP = ("{{", "{%", "{#")


class _NameRule(NamedTuple):
    """What a name must match, must not be, and how its words are joined."""

    pattern: str
    reserved: set[str]
    separator: str


_NAMES = {
    "project_slug": _NameRule(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", _DEVICES | _TAKEN, "-"),
    "package_name": _NameRule(
        r"[a-z][a-z0-9]*(_[a-z0-9]+)*", _DEVICES | _TAKEN | _BESIDE | _PYTHON, "_"
    ),
}


class RefusedError(ValueError):
    """An answer that no project can be made from; its text is the one line to show."""


def check(answers: Mapping[str, object]) -> None:
    """Check the answers that are there; cookiecutter's own variables begin with `_`.

    Raises:
        RefusedError: for the first answer that breaks a rule.
    """
    for key, value in answers.items():
        if not isinstance(value, str) or key.startswith("_"):
            continue
        if key in _NAMES:
            _check_name(key, value)
        else:
            _check_text(key, value)


def check_markup(key: str, value: str) -> None:
    """Check that Jinja would leave `value` as it is.

    Raises:
        RefusedError: if Jinja would compute something, or run something.
    """
    for markup in _MARKUP:
        if markup in value:
            raise RefusedError(f"{key} {value!a} must not contain {markup!r}")


def _check_text(key: str, value: str) -> None:
    """Check what a person writes about the project, and the choices too."""
    check_markup(key, value)
    if not value.strip():
        raise RefusedError(f"{key} must not be empty")
    if len(value) > MAX_TEXT_LENGTH:
        raise RefusedError(
            f"{key} has {len(value)} characters; at most {MAX_TEXT_LENGTH} are allowed"
        )
    for character in value:
        if unicodedata.category(character) in _INVISIBLE and character not in _JOINERS:
            raise RefusedError(f"{key} {value!a} must not contain the character {character!a}")
    if key == "email" and not re.fullmatch(_EMAIL, value):
        raise RefusedError(f"email {value!a} must be an address; try 'ada@example.com'")


def _check_name(key: str, name: str) -> None:
    """Check a name that becomes a folder, a distribution or a package."""
    rule = _NAMES[key]
    if re.fullmatch(rule.pattern, name) and len(name) <= MAX_NAME_LENGTH:
        if name not in rule.reserved:
            return
        reason = "is taken by Python, a dependency or the file system"
    else:
        reason = f"must match {rule.pattern} and have at most {MAX_NAME_LENGTH} characters"
    raise RefusedError(f"{key} {name!a} {reason}; try {_suggestion(name, rule)!r}")


def _suggestion(name: str, rule: _NameRule) -> str:
    """Return a name that passes and is close to `name`."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    words = re.findall("[a-z0-9]+", ascii_name.lower()) or ["project"]
    close = rule.separator.join(words)
    if not close[0].isalpha() or close in rule.reserved | {"project"}:
        close = f"my{rule.separator}{close}"
    return close[:MAX_NAME_LENGTH].rstrip(rule.separator)
