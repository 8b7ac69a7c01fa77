"""The gate in cookiecutter: it asks the rules before anything is run or made.

Cookiecutter makes the project's folder first and asks `pre_gen_project` afterwards, so an answer
such as `../x` would leave its trace outside. And it renders what follows `--no-input` as Jinja,
which can run any code, before it asks at all. A Jinja extension is the one part of a template
that comes before both. Cookiecutter finds it in `needs_cookiecutter_2_6.py`.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from cookiecutter import __version__
from jinja2 import Environment
from jinja2.ext import Extension

from pretuned_answers import RefusedError, check, check_markup

TEMPLATE_FOLDER = Path(__file__).resolve().parent.parent


class Gate(Extension):
    """Refuse Jinja in answers, and give the filter `accepted` that checks all of them."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        # Older ones take `docker=no` for a text, and some leave out what a yes would bring.
        if [int(part) for part in __version__.split(".")[:2]] < [2, 6]:
            _refuse(RefusedError(f"cookiecutter {__version__} is too old: take 2.6 or newer"))
        if _hooks_are_off():
            _refuse(RefusedError("only hooks write the answers into a project: --accept-hooks yes"))
        environment.filters["accepted"] = _accepted
        # For the hooks. `cookiecutter._repo_dir` is relative if the user said `cookiecutter .`,
        # and a hook runs in the new folder.
        environment.globals["template_folder"] = str(TEMPLATE_FOLDER)
        self._own_markup = _own_markup()

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:  # noqa: ARG002
        """Return `source` unchanged if all its Jinja is the template's own."""
        foreign = source
        for expression in self._own_markup:
            foreign = foreign.replace(expression, "")
        try:
            check_markup("answer", foreign)
        except RefusedError as error:
            _refuse(error)
        return source


def _hooks_are_off() -> bool:
    """Whether cookiecutter was told to run no hooks; it says so to no template: see who called."""
    frame = inspect.currentframe()
    while frame and frame.f_locals.get("accept_hooks") is not False:
        frame = frame.f_back
    return frame is not None


def _own_markup() -> set[str]:
    """Return every Jinja expression that the template itself holds."""
    files = [TEMPLATE_FOLDER / "cookiecutter.json", *(TEMPLATE_FOLDER / "hooks").glob("*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    folder_names = [path.name for path in TEMPLATE_FOLDER.glob("{{*}}")]
    return {markup for text in texts + folder_names for markup in re.findall(r"{{.*?}}", text)}


def _accepted(answers: Mapping[str, object]) -> str:
    """Return "yes" for the hidden variable whose rendering is the last before the folder."""
    try:
        check(answers)
    except RefusedError as error:
        _refuse(error)
    return "yes"


def _refuse(error: RefusedError) -> None:
    """End the program with one line: cookiecutter would show an exception as a traceback."""
    print(f"ERROR: {error}", file=sys.stderr)
    raise SystemExit(2) from None
