"""Faults that the tests of the project and of the template inject already: they are run by name."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from . import ROOT
from .children import expect


def run(folder: Path, words: list[str], **variables: str) -> int:
    """How many tests of a folder passed, all that there are."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    paths = os.pathsep.join([str(folder / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, **variables}
    answer = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    expect(answer.returncode == 0, f"{' '.join(words)}: {answer.stdout[-600:]}")
    return int(re.search(r"(\d+) passed", answer.stdout)[1])


def tests_of(folder: Path, *words: str, **variables: str) -> Callable[[Path, int], str]:
    """A function of a row that runs these tests."""

    def inject(_: Path, __: int) -> str:
        return f"{run(folder, list(words), **variables)} tests, in `tests/{Path(words[0]).name}`"

    return inject
