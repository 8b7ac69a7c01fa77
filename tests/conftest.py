"""What the tests of the template share: ways to render, and a way to compare folders."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"

# As long, as foreign and as hard to quote as the rules allow.
LONG_NAMES = {
    "project_name": "Zoë's “Photo-Sorter” \\ & Classifier of 名前 😀 for *All* under the Sun",
    "project_slug": "photograph-sorter-for-everything-under-the-bright",
    "package_name": "photograph_sorter_for_everything_under_the_bright",
    "description": 'Sorts "photographs" \\ by what they show: 100 % [of the time], `here` <now>.',
    "author": "Zoë O'Brien-D\"Arc \\ 名前 😀",
    "email": "zoe.obrien+photographs@long-domain.example.org",
}
EVERY_OPTION_OFF = {
    "licence": "proprietary",
    "docker": "no",
    "slurm": "no",
    "ci": "none",
    "tools": "none",
}

Render = Callable[..., Path]


def render_with_cookiecutter(output_dir, **answers):
    """Render the checkout as `cookiecutter . --no-input` does, without touching the home folder."""
    scratch = str(output_dir.parent / "cookiecutter")
    folder = cookiecutter(
        str(ROOT),
        no_input=True,
        extra_context=answers,
        output_dir=str(output_dir),
        default_config={"replay_dir": scratch, "cookiecutters_dir": scratch},
    )
    return Path(folder)


def tracked_files(folder):
    """Return the files of `folder` that git has or would take, relative to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    return {Path(name) for name in listing.split("\0") if name and (folder / name).exists()}


def all_files(folder):
    """Return every file below `folder`, caches included, relative to it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def contents(folder, files):
    """Return the bytes of each file, and its mode."""
    return {file: ((folder / file).read_bytes(), (folder / file).stat().st_mode) for file in files}


def python(*words, folder=PROJECT, **environment):
    """What a process of Python prints, in the project or another folder; it must succeed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def one_thread():
    """Small runs in this process are faster on one core, the more so beside other work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def render(tmp_path):
    """Return a function that renders some answers into a new folder."""
    return lambda **answers: render_with_cookiecutter(tmp_path / "output", **answers)
