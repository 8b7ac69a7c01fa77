"""The gate in cookiecutter: it asks the rules before anything is run or made.

Cookiecutter makes the project's folder first and asks `pre_gen_project` afterwards, so an answer
such as `../x` would leave its trace outside. And it renders what follows `--no-input` as Jinja,
which can run any code, before it asks at all. A Jinja extension is the one part of a template
that comes before both. Cookiecutter finds it in `needs_cookiecutter_2_6.py`.
"""

import inspect
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cookiecutter import __version__
from jinja2 import Environment
from jinja2.ext import Extension

from pretuned_answers import RefusedError, check, check_markup

TEMPLATE_FOLDER = Path(__file__).resolve().parent.parent
BLOCK = 4096  # bytes: a file ends within one


class Gate(Extension):
    """Refuse Jinja in answers, and give the filter `accepted` that checks all of them."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        # Older ones take `docker=no` for a text, and some leave out what a yes would bring.
        if [int(part) for part in __version__.split(".")[:2]] < [2, 6]:
            _refuse(RefusedError(f"cookiecutter {__version__} is too old: take 2.6 or newer"))
        if _told_to_cookiecutter("accept_hooks") is False:
            _refuse(RefusedError("only hooks write the answers into a project: --accept-hooks yes"))
        environment.filters["accepted"] = _accepted
        # For the hooks. `cookiecutter._repo_dir` is relative if the user said `cookiecutter .`,
        # and a hook runs in the new folder.
        # pyrefly: ignore[unsupported-operation]  # it takes any value
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


def _told_to_cookiecutter(name: str) -> Any:  # noqa: ANN401 - whatever it is
    """Return an argument of the call of cookiecutter, which hides them from templates; or None."""
    frame = inspect.currentframe()
    while frame and not {"accept_hooks", "output_dir"} <= {*frame.f_locals}:  # keys() may be a list
        frame = frame.f_back
    return frame.f_locals[name] if frame else None


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
        _check_space(Path(_told_to_cookiecutter("output_dir") or ""))
    except RefusedError as error:
        _refuse(error)
    return "yes"


def _check_space(folder: Path) -> None:
    """Refuse a full disk: cookiecutter would list each file that it cannot copy, and leave some.

    It copies what the hook deletes, too: runs and environments of whoever worked in the template.
    """
    files = [path for path in TEMPLATE_FOLDER.glob("{{*}}/**/*") if path.is_file()]
    needed = sum(path.stat().st_size + BLOCK for path in files)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = shutil.disk_usage(there)
    if disk.free < needed and disk.total:  # 0: the file system does not say
        sizes = f"{needed / 2**20:.1f} MB, and its disk has {disk.free / 2**20:.1f} MB left"
        raise RefusedError(f"a project needs {sizes}")
    inodes = os.statvfs(there) if hasattr(os, "statvfs") else None  # which Windows has not
    if inodes and inodes.f_files and inodes.f_favail < len(files):
        counts = f"{len(files)} files, and its disk has room for {inodes.f_favail} (inodes)"
        raise RefusedError(f"a project needs {counts}")
    try:  # quotas count otherwise
        with tempfile.TemporaryFile(dir=there) as file:
            for _ in range(0, needed, BLOCK):
                file.write(bytes(BLOCK))
    except OSError as error:
        sizes = f"{needed / 2**20:.1f} MB in {str(there)!r}: {error.strerror}"
        raise RefusedError(f"a project needs {sizes}") from error


def _refuse(error: RefusedError) -> None:
    """End the program with one line: cookiecutter would show an exception as a traceback."""
    print(f"ERROR: {error}", file=sys.stderr)
    raise SystemExit(2) from None
