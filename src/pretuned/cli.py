"""The command line: read the answers that were given, refuse wrong ones, render the template."""

import argparse
import difflib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cookiecutter.exceptions import CookiecutterException, FailedHookException
from cookiecutter.main import cookiecutter

from pretuned import TEMPLATE, update
from pretuned_answers import RefusedError, check, tools

_YES_NO = {"yes": True, "no": False, "true": True, "false": False}


class _Verb(NamedTuple):
    """What is done to a project, and the words of its help."""

    do: Callable[[argparse.Namespace], tuple[str, bool]]  # what is said, whether git merged all
    about: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the template and return the exit code: 2 for a mistake of the user."""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # for paths that the encoding lacks
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _VERBS:
        return _maintain(*words)
    questions = _questions()
    options = _parser(questions).parse_intermixed_args(words)
    logging.getLogger("cookiecutter").addHandler(logging.NullHandler())  # errors are shown below
    try:
        given = _read_answers(options.answers, questions)
        check(given)
        made = _render(given, options.output_dir, no_input=options.no_input)
    except (RefusedError, CookiecutterException, OSError) as error:
        return _refused(error)
    except (KeyboardInterrupt, EOFError) as error:
        why = "the questions were not answered" if isinstance(error, EOFError) else "interrupted"
        print(f"\nERROR: no project was made: {why}", file=sys.stderr)
        return 130
    folder = options.output_dir / made.name
    _say(f"{folder} is ready: cd {shlex.quote(str(folder))} && make train")
    return 0


def _maintain(verb: str, *words: str) -> int:
    """Do to a project that is there what a verb says, and return the exit code.

    That is 1 if there is something to settle, or the project's own checks fail.
    """
    options = _parser_of(verb).parse_intermixed_args(words)
    try:
        said, is_clean = _VERBS[verb].do(options)
    except (RefusedError, CookiecutterException, OSError) as error:
        return _refused(error)
    except KeyboardInterrupt:
        print("\nERROR: interrupted: run the same command to finish", file=sys.stderr)
        return 130
    _say(said or "nothing has changed")
    if not is_clean:
        _say("settle the conflicts, then: make check")
        return 1
    if verb != "update":
        return 0
    if said:
        place = shlex.quote(str(options.project))
        undo = "stash --include-untracked -- ."
        _say(f"git -C {place} diff shows the changes; git -C {place} {undo} undoes them")
    return 0 if options.no_check else _run_checks(options.project)


def _run_checks(project: Path) -> int:
    """Run the project's own checks, and return the exit code: 1 if one fails, or they can't run."""
    try:
        _check_environment(project)
        return int(subprocess.run(["make", "check"], cwd=project, check=False).returncode != 0)
    except (OSError, KeyboardInterrupt) as error:
        why = f": {_line(error)}" if isinstance(error, OSError) else ""
        print(f"\nERROR: the update is there, and not checked{why}: make check", file=sys.stderr)
        return 1


def _check_environment(project: Path) -> None:
    """Check that `make` would not install an environment: the owner may have another one.

    Raises:
        OSError: if it would.
    """
    if not (project / "Makefile").exists():
        return
    # An owner may compute it, such as `VENV ?= $(HOME)/envs/birds`: make alone knows.
    words = ["make", "--no-print-directory", "--file=Makefile", "--file=-", "pretuned-venv"]
    rules = b"$(info VENV=$(VENV))\npretuned-venv: ; @:\n"
    told = subprocess.run(words, cwd=project, input=rules, capture_output=True, check=False)
    found = re.findall(r"^VENV=(.*?)\s*$", os.fsdecode(told.stdout), re.MULTILINE)
    venv = found[-1] if found else ""  # where make fails, its check says why
    if not (project / venv).exists():
        raise OSError(f"{venv!a} is not there, and would be installed; VENV=PATH names another")


def _diff(options: argparse.Namespace) -> tuple[str, bool]:
    """What an update would bring."""
    said = update.compare(options.project, _render_again, options.base)
    return said or "nothing differs", True


def _update(options: argparse.Namespace) -> tuple[str, bool]:
    """What an update has brought, and whether git merged all of it."""
    return update.update(options.project, _render_again, options.base)


def _add(options: argparse.Namespace) -> tuple[str, bool]:
    """What has come with tools, or the list of those there are."""
    if not options.names:
        return _list_tools(options.project), True
    change = update.Tools(add=options.names)
    said, is_clean = update.change_tools(options.project, _render_again, change)
    pages = [
        str(page)
        for name in change.named(options.names)
        for page in sorted(options.project.glob(f"src/*/tools/{name}/README.md"))
    ]
    return said and "\n".join([said, f"how to use it: {', '.join(pages)}"]), is_clean


def _remove(options: argparse.Namespace) -> tuple[str, bool]:
    """What has gone with tools."""
    return update.change_tools(options.project, _render_again, update.Tools(remove=options.names))


_VERBS = {  # for a project that is there
    "add": _Verb(
        _add, "Add tools to a project, with what they need and what its texts say of them."
    ),
    "remove": _Verb(_remove, "Remove tools from a project, and what its texts say of them."),
    "diff": _Verb(
        _diff, "Show what you changed in a project, what this template did, and what both."
    ),
    "update": _Verb(_update, "Bring a project to this template: in git, with nothing uncommitted."),
}


def _parser_of(verb: str) -> argparse.ArgumentParser:
    """The options of a verb for a project that is there."""
    parser = argparse.ArgumentParser(prog=f"pretuned {verb}", description=_VERBS[verb].about)
    if verb in ("add", "remove"):
        number, about = ("*", "with none: list them") if verb == "add" else ("+", "its name")
        parser.add_argument("names", nargs=number, metavar="tool", help=about)
        parser.add_argument("--project", type=Path, default=Path(), help="its folder (.)")
        return parser
    parser.add_argument("project", nargs="?", type=Path, default=Path(), help="its folder (.)")
    parser.add_argument(
        "--base",
        default="",
        metavar="B",
        help="the template that made it: a wheel, a checkout, or a version of the package index",
    )
    if verb == "update":
        parser.add_argument("--no-check", action="store_true", help="do not run `make check` there")
    return parser


def _list_tools(project: Path) -> str:
    """Every tool with what it does; those that the project has are marked."""
    mine = {path.parent.name for path in project.glob("src/*/tools/*/__init__.py")}
    folders = [tools.there(tools.TEMPLATE)[name] for name in tools.offered(tools.TEMPLATE)]
    width = max(len(folder.name) for folder in folders)
    rows = [
        f"{'*' if folder.name in mine else ' '} {folder.name.replace('_', '-'):<{width}}  "
        f"{tools.summary(folder)}"
        for folder in folders
    ]
    return "\n".join([*rows, "", "* is in this project"])


# Keys of questions as projects of earlier versions have them.
_FORMER = {"license": "licence"}


def _render_again(answers: dict[str, object], output_dir: Path) -> Path:
    """Render the answers of a project that was made before, but for those to older questions."""
    given: dict[str, object] = {"_again": "yes"}
    for key, default in _questions().items():
        value = answers.get(key, answers.get(_FORMER.get(key, key), update.UNASKED.get(key)))
        if value is None:
            continue
        if key == "tools" and isinstance(value, list) and all(isinstance(x, str) for x in value):
            given |= _named_tools(", ".join(value))
            continue
        kind = bool if isinstance(default, bool) else str
        if not isinstance(value, kind) or (isinstance(default, list) and value not in default):
            raise RefusedError(f"pyproject.toml has no such answer: {key} = {value!a}")
        given[key] = value
    check(given)
    return _render(given, output_dir, no_input=True)


def _say(text: str) -> None:
    """Print a line, to nobody if its reader, such as `head`, has seen enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: Exception) -> int:
    """Say why nothing was made or changed, and return the exit code."""
    # A hook that ends by itself has said why; one that was killed has not.
    if not (isinstance(error, FailedHookException) and "(exit status: 1)" in str(error)):
        print(f"ERROR: {_line(error)}", file=sys.stderr)
    return 2


def _line(error: Exception) -> str:
    """Return what went wrong in one line."""
    if isinstance(error, FailedHookException):
        error = OSError(f"{error}; nothing was made or changed")
    if isinstance(error, shutil.Error):  # of a folder: a row for each file that was not copied
        error = OSError(f"{error.args[0][0][-1]}; no project was made")
    # Cookiecutter begins some of its messages with the word itself.
    return str(error).removeprefix("Error: ").replace("\n", " ")


def _questions() -> dict[str, object]:
    """Return key -> default, as text, truth or list of choices; `_` keys are cookiecutter's."""
    text = (TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8")
    return {key: value for key, value in json.loads(text).items() if not key.startswith("_")}


def _parser(questions: dict[str, object]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pretuned",
        description="Make a PyTorch image-classification project that you own, read and extend. "
        f"For one that is there: pretuned {', '.join(_VERBS)}; see their --help.",
        epilog="keys: " + "; ".join(_described(key, value) for key, value in questions.items()),
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("--no-input", action="store_true", help="ask nothing: take the defaults")
    parser.add_argument(
        "--output-dir", type=Path, default=Path(), metavar="D", help="where the folder is made"
    )
    parser.add_argument(
        "answers", nargs="*", metavar="key=value", help="an answer, in place of its default"
    )
    return parser


def _version() -> str:
    """Return the version that a project made now would name."""
    project = TEMPLATE / "{{cookiecutter.project_slug}}" / "pyproject.toml"
    return tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["pretuned"]["version"]


def _described(key: str, default: object) -> str:
    """Return `key` with its choices, where there are any."""
    if isinstance(default, list):
        names = ", or sizes and names: usual,search" * (key == "tools")
        return f"{key} ({', '.join(default)}{names})"
    return f"{key} (yes, no)" if isinstance(default, bool) else key


def _read_answers(arguments: Iterable[str], questions: dict[str, object]) -> dict[str, object]:
    """Return the answers among the arguments, with choices as the template spells them."""
    answers: dict[str, object] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise RefusedError(f"{argument!a} must have the form key=value")
        if key not in questions:
            raise RefusedError(f"unknown key {key!a}{_nearest(key, questions)}")
        if key in answers:
            raise RefusedError(f"{key} has two answers, of which the second is {value!a}")
        default = questions[key]
        if key == "tools" and tools.are_names(tools.TEMPLATE, value):
            answers |= _named_tools(value)
        elif isinstance(default, list):
            answers[key] = _choice(key, value, {choice.lower(): choice for choice in default})
        elif isinstance(default, bool):
            answers[key] = _choice(key, value, _YES_NO)
        else:
            answers[key] = value
    return answers


def _named_tools(names: str) -> dict[str, object]:
    """Return the answers that ask for tools by their names, with commas between them."""
    tools.chosen(tools.TEMPLATE, "none", names)  # refuses those that there are not
    if not names:
        return {"tools": "none"}
    return {
        "tools": ["usual"],  # where the question is asked: the only choice, shown as the names
        "__prompts__": {"tools": {"usual": names}},
        "_tools": names,
    }


def _choice(key: str, value: str, choices: Mapping[str, object]) -> object:
    """Return what `value` stands for, whatever its case."""
    if value.lower() not in choices:
        words = choices if choices is _YES_NO else map(str, choices.values())
        raise RefusedError(f"unknown {key} {value!a}{_nearest(value, words)}")
    return choices[value.lower()]


def _nearest(word: str, words: Iterable[str]) -> str:
    """Return the end of a message that says which words are right."""
    spelled = {right.lower(): right for right in words}
    close = difflib.get_close_matches(word.lower(), spelled, n=1)
    hint = f"; did you mean {spelled[close[0]]!r}?" if close else ""
    return f"{hint} (there are: {', '.join(spelled.values())})"


def _render(given: dict[str, object], output_dir: Path, *, no_input: bool) -> Path:
    """Let cookiecutter ask and render; return the new folder, which appears whole or not at all."""
    # Where the folder will be, or what exists of the way to it: on one disk it can be renamed.
    near = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    with (
        _unwound_by_signals(),
        tempfile.TemporaryDirectory(prefix="pretuned-") as scratch,
        tempfile.TemporaryDirectory(prefix=".pretuned-", dir=near) as unfinished,
    ):
        # Cookiecutter remembers answers in the home folder, reads defaults from there, and leaves
        # its rendered hooks, with all answers, among the temporary files. None of it is asked for.
        tempfile.tempdir = scratch
        try:
            made = cookiecutter(
                str(TEMPLATE),
                no_input=no_input,
                extra_context=given,
                output_dir=unfinished,
                # pyrefly: ignore[bad-argument-type]  # it takes a dict, too
                default_config={"replay_dir": scratch, "cookiecutters_dir": scratch},
            )
        finally:
            tempfile.tempdir = None
        folder = output_dir.absolute() / Path(made).name
        if os.path.lexists(folder):  # also a link that leads nowhere
            raise FileExistsError(f"{str(folder)!a} exists; choose another project_slug")
        output_dir.mkdir(parents=True, exist_ok=True)
        return Path(made).rename(folder)


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """Let a signal, as of a terminal that is closed, end this as an exception would."""

    def end(number: int, _: object) -> None:
        for other in ours:  # or a second one would end the removal of what is unfinished
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # others may not do this
    numbers = [getattr(signal, name, None) for name in ("SIGHUP", "SIGTERM") if is_main]
    # Not those that `nohup` or a caller has taken; Windows lacks the first.
    ours = [number for number in numbers if number and signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
