"""The command line: read the answers that were given, refuse wrong ones, render the template."""

import argparse
import difflib
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from cookiecutter.exceptions import CookiecutterException
from cookiecutter.main import cookiecutter

from pretuned import TEMPLATE
from pretuned_answers import RefusedError, check

_YES_NO = {"yes": True, "no": False, "true": True, "false": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the template and return the exit code: 2 for a mistake of the user."""
    questions = _questions()
    options = _parser(questions).parse_args(arguments)
    try:
        given = _read_answers(options.answers, questions)
        check(given)
        folder = _render(given, options.output_dir, no_input=options.no_input)
    except (RefusedError, CookiecutterException, OSError) as error:
        # Cookiecutter begins some of its messages with the word itself.
        print(f"ERROR: {str(error).removeprefix('Error: ')}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        print("\nERROR: no project was made: the questions were not answered", file=sys.stderr)
        return 130
    print(f"{folder} is ready: cd {folder} && make train")
    return 0


def _questions() -> dict[str, object]:
    """Return key -> default, as text, truth or list of choices; `_` keys are cookiecutter's."""
    text = (TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8")
    return {key: value for key, value in json.loads(text).items() if not key.startswith("_")}


def _parser(questions: dict[str, object]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pretuned",
        description="Make a PyTorch image-classification project that you own, read and extend.",
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
        return f"{key} ({', '.join(default)})"
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
        default = questions[key]
        if isinstance(default, list):
            answers[key] = _choice(key, value, {choice.lower(): choice for choice in default})
        elif isinstance(default, bool):
            answers[key] = _choice(key, value, _YES_NO)
        else:
            answers[key] = value
    return answers


def _choice(key: str, value: str, choices: dict[str, object]) -> object:
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


def _render(given: dict[str, object], output_dir: Path, *, no_input: bool) -> str:
    """Let cookiecutter ask and render; return the new folder."""
    with tempfile.TemporaryDirectory(prefix="pretuned-") as scratch:
        # Cookiecutter remembers answers in the home folder, reads defaults from there, and leaves
        # its rendered hooks, with all answers, among the temporary files. None of it is asked for.
        tempfile.tempdir = scratch
        try:
            return cookiecutter(
                str(TEMPLATE),
                no_input=no_input,
                extra_context=given,
                output_dir=str(output_dir),
                default_config={"replay_dir": scratch, "cookiecutters_dir": scratch},
            )
        finally:
            tempfile.tempdir = None
