"""Which columns of a table are the paths, the labels and the split.

They are called `path`, `label` and as `ROLES` says, or `data.columns` names them.
"""

import re
from collections.abc import Iterable
from itertools import chain
from shlex import quote

from ...config import DataConfig
from ...errors import UserError, did_you_mean
from ...extensions import find_tool
from ...runtime.console import printable
from .cells import SPLITS
from .rows import Table

Roles = dict[str, list[str]]  # the columns of each role; `labels` are those of a class each

ROLES = ("path", "label", "split", "fold", "weight", "group")
SHOWN = 20  # names of columns


def roles_by_name(found: Table, data: DataConfig) -> Roles:
    """The columns that are called as their role, or named by `data.columns`.

    Raises:
        UserError: if a name is wrong, or there twice.
    """
    words = [plain(name) for name in found.names]
    if twice := next((word for word in words if word and words.count(word) > 1), None):
        raise UserError(f"{str(found.file)!a} has two columns {twice!a}")
    roles: Roles = {}
    for word in data.columns:
        role, _, name = word.partition("=")
        if role not in ROLES or not name or (role != "label" and role in roles):
            raise UserError(
                f"--data.columns {word!a} should be such as path=Image label=Id, each of "
                f"{', '.join(ROLES)} once; label=ant label=bee are columns of 0 and 1"
            )
        if plain(name) not in words:
            raise UserError(
                f"--data.columns {word!a}: {str(found.file)!a} has {listing(found.names)}"
                f"{did_you_mean(name, found.names)}"
            )
        roles.setdefault(role, []).append(found.names[words.index(plain(name))])
    for role in ROLES:
        if role not in roles and role in words:
            name = found.names[words.index(role)]
            if name not in chain(*roles.values()):
                roles[role] = [name]
    missing = [role for role in ("path", "label") if role not in roles]
    if missing and not find_tool("finder", "kaggle-tables"):
        raise UserError(
            f"{str(found.file)!a} has no column {missing[0]!r}, but {listing(found.names)}: "
            "--data.columns path=COLUMN label=COLUMN; or pretuned add kaggle-tables"
        )
    if len(roles.get("label", [])) > 1:
        roles["labels"] = roles.pop("label")
    return roles


def plain(name: str) -> str:
    """A name in small letters."""
    return name.strip().lower()


def short(name: str) -> str:
    """A name in small letters and digits alone: `Image Id` -> `imageid`."""
    return re.sub(r"[\W_]", "", name.lower())


def flag_of(name: str) -> int | None:
    """The split whose images a column of yes and no tells, as fastai's `is_valid` does."""
    return SPLITS.get(short(name).removeprefix("is"))


def listing(names: Iterable[str]) -> str:
    """The names of columns."""
    shown = [printable(name.strip()) for name in names]
    return ", ".join(shown[:SHOWN]) + f", ... ({len(shown):,})" * (len(shown) > SHOWN)


def words_for(names: list[str], role: str = "label") -> str:
    """What names columns, as words of a command line."""
    words = [quote(f"{role}={printable(name.strip())}") for name in names[:SHOWN]]
    return "--data.columns " + " ".join(words) + " ..." * (len(names) > SHOWN)


def notes_of(found: Table, roles: Roles) -> list[str]:
    """What was taken for what, and what is ignored."""
    notes = []
    for role, names in roles.items():
        if [plain(name) for name in names] != [role]:
            notes.append(f"{role}: column{'s' * (len(names) > 1)} {listing(names)}")
        if role == "labels" and len(names) == 1:
            notes[-1] += f", its yes and no as two classes: {words_for(names)}"
    ignored = [n for n in found.names if n.strip() and n not in chain(*roles.values())]
    if ignored:
        notes.append(f"ignored columns: {listing(ignored)}")
    return notes
