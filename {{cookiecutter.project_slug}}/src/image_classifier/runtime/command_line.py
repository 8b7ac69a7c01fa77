"""Words of a command line to options; a mistake becomes a line that says what is right."""

import contextlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..config import Config
from ..errors import OF_TOOLS, UserError, choose
from ..extensions import chained, check_ranges, find_tools, flag, function, joined
from ..presets import PRESETS, shortened

HELP = {"-h", "--help"}
SHORT_FORMS = {"--pretrained": ["--run.init-from", "pretrained"]}  # as other programs have them
COMMENT = re.compile(r"^    (\w+): [^#\n]*((?:# .*)?(?:\n    # .*)*)", re.MULTILINE)  # of a field


def parse(
    kind: type,
    words: list[str],
    prog: str,
    about: str,
    default: Any = tyro.MISSING_NONPROP,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """`words` as an instance of the dataclass `kind`.

    Args:
        kind: options; the comment of a field, all of it, is its help.
        words: of the command line, after the command.
        prog: how the user called the command, as help and messages show it.
        about: the description in the help.
        default: values of the options that `words` do not set.

    Raises:
        UserError: if `words` are no such options, or a number is out of its range.
    """
    add_help(kind)
    flags = flags_of(kind)
    short = short_forms(flags)
    words = [whole for word in words for whole in short.get(word, [word])]
    if HELP & set(words):
        return tyro.cli(kind, default=default, args=words, prog=prog, description=about)
    check_flags(words, flags)
    account = io.StringIO()
    try:
        with contextlib.redirect_stdout(account), contextlib.redirect_stderr(account):
            options = tyro.cli(kind, default=default, args=words, prog=prog)
    except SystemExit:
        _, message, *_ = re.split(r"\n *[-─]{8,} *\n?", account.getvalue())
        message = " ".join(message.split()).removeprefix(f"Error parsing {kind.__name__}: ")
        message = message.replace("Unrecognized options:", "values follow their flags; unexpected:")
        raise UserError(message) from None
    for option in fields(kind):
        if is_positional(option.type) and not getattr(options, option.name):
            raise UserError(f"Missing from {prog}: {option.name.upper()}; see --help")
    check_ranges(options)
    return options


@contextlib.contextmanager
def naming_flags_of(kind: type) -> Iterator[None]:
    """A block whose `UserError` names a flag such as `--data.root` as `kind` has it: `--root`."""
    try:
        yield
    except UserError as error:
        section = rf"--\w+\.(?=({'|'.join(flags_of(kind))})\b(?!-))"
        raise UserError(re.sub(section, "--", str(error))) from error


def short_forms(flags: list[str]) -> dict[str, list[str]]:
    """Those of SHORT_FORMS that stand for one of `flags`."""
    return {s: whole for s, whole in SHORT_FORMS.items() if whole[0].removeprefix("--") in flags}


def check_flags(words: list[str], flags: list[str]) -> None:
    """Reject an unknown flag; suggest the closest one, with or without its section, or `train`."""
    of_train = {f"--{known}" for known in flags_of(Config)} | SHORT_FORMS.keys()
    names = [*flags, *(short.removeprefix("--") for short in short_forms(flags))]
    forms = {form: known for known in reversed(names) for form in (known, *known.split("."))}
    for word in words:
        name = flag(word.partition("=")[0])  # tyro accepts underscores, too
        if re.fullmatch(r"--?[A-Za-z][\w.-]*", name) and name.removeprefix("--") not in flags:
            near = get_close_matches(name.lstrip("-").lower(), forms, 1, cutoff=0.7)
            hints = [f"; did you mean --{forms[form]}?" for form in near]
            hints += ["; `train` has it" if name in of_train and not near else OF_TOOLS]
            raise UserError(f"there is no {name}{''.join(hints)}")


def flags_of(kind: type) -> list[str]:
    """The flags of options, without dashes, in the order of the fields."""
    flags: list[str] = []
    for option in fields(kind):
        if is_dataclass(option.type):
            flags += [f"{option.name}.{inner}" for inner in flags_of(option.type)]
        elif not is_positional(option.type):
            flags += [flag(option.name), *([f"no-{flag(option.name)}"] * (option.type is bool))]
    return flags


def is_positional(hint: Any) -> bool:  # noqa: ANN401 - the type hint of a field
    """Whether a field is positional: a word without a flag."""
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


@cache
def add_help(kind: type) -> None:
    """Make the whole comment of each field its help, of which tyro takes the first line only."""
    for owner in filter(inspect.get_annotations, kind.__mro__):  # a section has parts of tools
        comments = dict(COMMENT.findall(inspect.getsource(owner)))
        for name, hint in owner.__annotations__.items():
            if is_dataclass(hint):
                add_help(hint)
                continue
            about = re.sub(r"\s*# ", " ", comments.get(name, "")).strip()
            word = {}
            if is_positional(hint):  # it is required, which tyro cannot be told
                word = {"metavar": name.upper(), "help_behavior_hint": "(required)"}
            owner.__annotations__[name] = Annotated[hint, tyro.conf.arg(help=about, **word)]


def take_preset(
    words: list[str], otherwise: str, folder: str = "", kind: type = Config
) -> tuple[str, Config]:
    """The preset whose name `words` begin with, which is removed from them: name and config.

    Without a name it is `finetune` if there is a `--data.root` or `--data.labels`, else
    `otherwise`. What a preset counts in epochs is scaled to `--epochs`. Its `run.dir` is `folder`,
    with the name for `{}`. A tool puts what a file says before the other flags, as those of `kind`.

    Raises:
        UserError: if there is no preset of that name, or the file can't be used.
    """
    take_file = function("presets", "take_file")
    title = take_file(words, flags_of(kind)) if take_file else ""
    if words and not words[0].startswith("-"):
        name = words.pop(0)
    else:
        is_own = value_of(words, "--data.root") or value_of(words, "--data.labels")
        name = "finetune" if is_own and not value_of(words, "--data.name") else otherwise
    preset = choose("preset", name, all_presets(), OF_TOOLS)()
    preset = chained("presets", "change_preset", preset, name)
    with contextlib.suppress(ValueError):  # `parse` rejects what is no number
        preset = shortened(preset, float(value_of(words, "--epochs")))
    return name, replace(preset, run=replace(preset.run, dir=folder.format(title or name)))


def all_presets() -> dict[str, Callable[[], Config]]:
    """`PRESETS`, and those of the tools that are there; tools may change any of them."""
    tools = find_tools("presets").values()
    theirs = ({p.__name__: p for p in getattr(tool, "PRESETS", ())} for tool in tools)
    return joined("preset", PRESETS, *theirs)


def value_of(words: list[str], name: str) -> str:
    """What follows the last flag `name` of a command line; empty without such a flag."""
    found = re.findall(rf"(?:^|\0){re.escape(name)}[=\0]([^\0]+)", "\0".join(words))
    return found[-1] if found else ""


def summary(function: Callable) -> str:
    """The first line of a function's docstring; empty under `python -OO`, which drops it."""
    return (function.__doc__ or "").partition("\n")[0]


def command(verb: str) -> str:
    """A command as the user called it: `train.py`, or the console script's name and the verb."""
    program = Path(sys.argv[0])
    return program.name if program.stem == verb else f"{program.name} {verb}"
