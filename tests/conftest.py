"""What the tests of the template share: ways to render, to run a command, and to look at files."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cookiecutter.main import cookiecutter
from PIL import Image

from pretuned import cli, update

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small models need no more
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # alike on every machine
RENDER = cli._render  # also where `renders_once` has put another in its place
SMOKE = "smoke --epochs 1 --optim.warmup-epochs 0 --data.limit 192"  # two steps

# As long, as foreign and as hard to quote as the rules allow.
LONG_NAMES = {
    "project_name": "Zoë's “Photo-Sorter” \\ & Classifier of 名前 😀 for *All* under the Sun",
    "project_slug": "photograph-sorter-for-everything-under-the-bright",
    "package_name": "photograph_sorter_for_everything_under_the_bright",
    "description": 'Sorts "photographs" \\ by what they show: 100 % [of the time], `here` <now>.',
    "author": "Zoë O'Brien-D\"Arc \\ 名前 😀",
    "email": "zoe.o'brien+photographs@long-domain.example.org",
}
OFF = {"license": "proprietary", "docker": "no", "slurm": "no", "skypilot": "no"}
OFF |= {"ci": "none", "pre_commit": "no", "tools": "none"}
ALL = {"tools": "all"}  # as the folder of the template is


def render_with_cookiecutter(output_dir, **answers):
    """Render the checkout as `cookiecutter . --no-input` does, without touching the home folder."""
    scratch = str(output_dir.parent / "cookiecutter")
    settings = {"replay_dir": scratch, "cookiecutters_dir": scratch}
    knobs = {"extra_context": answers, "output_dir": str(output_dir), "default_config": settings}
    return Path(cookiecutter(str(ROOT), no_input=True, **knobs))


def tracked_files(folder):
    """The files of `folder` that git has or would take, relative to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = run(*command, folder=folder).stdout
    return {Path(name) for name in listing.split("\0") if name and (folder / name).exists()}


def contents(folder, files=None):
    """The bytes and the mode of each of these files, or of all in `folder`, caches included.

    But for the manifest, which only a render has: the digests of its other files.
    """
    files = files or [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    files = [file for file in files if str(file) != ".pretuned.json"]
    paths = {str(file): folder / file for file in files}
    return {name: (path.read_bytes(), path.stat().st_mode) for name, path in paths.items()}


def template():
    """The contents of the project here, without what git ignores."""
    return contents(PROJECT, tracked_files(PROJECT))


def pyproject(folder):
    """What the pyproject.toml of a folder says."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command, folder=PROJECT, code=0, **variables):
    """The process of a command in the project or another folder; it must end with this code."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, check=False, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def python(*words, **knobs):
    """What a process of Python prints; see `run`."""
    return run(sys.executable, *words, **knobs).stdout


def processes_with(variable):
    """Of each process with this in its environment, the folder in /proc."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in path.read_bytes():
                yield path.parent


def logged(folder):
    """The rows that a run logged."""
    return [json.loads(row) for row in Path(folder, "metrics.jsonl").read_text().splitlines()]


def git_until(moment):
    """A method of a `Repository` that calls git so many times less one, and then is killed."""
    call = update.Repository.git
    numbers = iter(range(1, 1000))

    def until(*all_, **more):
        if next(numbers) == moment:
            raise KeyboardInterrupt
        return call(*all_, **more)

    return until


def losses(folder):
    """The training and validation losses that a run logged."""
    return [row.get("train/loss") or row["val/loss"] for row in logged(folder)]


def write_photos(root, train, val):
    """Write so many small photographs of two classes."""
    for number in range(train + val):
        split = "train" if number < train else "val"
        path = root / split / ("ant", "bee")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((70, 50), 64).convert("RGB").save(path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """A function that has a project made of the same answers once; then it copies that."""
    made = {}

    def copied(make, answers, output_dir):
        key = make, json.dumps(answers, sort_keys=True)
        if key not in made:
            made[key] = make(answers, tmp_path_factory.mktemp("once") / "output")
        return Path(shutil.copytree(made[key], output_dir / made[key].name))

    return copied


def with_cookiecutter(answers, output_dir):
    """A project that cookiecutter makes."""
    return render_with_cookiecutter(output_dir, **answers)


def with_pretuned(answers, output_dir):
    """A project that `pretuned` makes."""
    return RENDER(answers, output_dir, no_input=True)


@pytest.fixture
def render(tmp_path, once):
    """A function that renders some answers into a new folder."""
    return lambda **answers: once(with_cookiecutter, answers, tmp_path / "output")


@pytest.fixture
def renders_once(once, monkeypatch):
    """`pretuned add`, `remove`, `diff` and `update` render the same answers once."""
    monkeypatch.setattr(
        cli, "_render", lambda answers, folder, **_: once(with_pretuned, answers, folder)
    )
