"""A project lives on under its own name: it checks, tests and trains as the template does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EVERY_OPTION_OFF, LONG_NAMES, python, render_with_cookiecutter
from PIL import Image

SMOKE = "smoke --epochs 1 --optim.warmup-epochs 0 --data.limit 192 --run.trackers"
# With the shortest names, lines that were broken would fit: the formatter sees that, too.
SHORT_NAMES = {"project_name": "Q", "project_slug": "q", "package_name": "q", "author": "Q"}

# A user's mistake on one of two ranks, within training.
BROKEN = """
import os, sys
from q.cli import main

if "RANK" in os.environ:
    from q.errors import UserError
    from q.tracking.logger import RunLogger

    step = RunLogger.step

    def fail_later(log, *arguments):
        if os.environ["RANK"] == "1" and log.row_step == 1:
            raise UserError("the disk is on fire")
        step(log, *arguments)

    RunLogger.step = fail_later
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def long_and_bare(tmp_path_factory):
    """Render with long names and every option off."""
    output = tmp_path_factory.mktemp("long") / "output"
    return render_with_cookiecutter(output, **LONG_NAMES, **EVERY_OPTION_OFF)


@pytest.fixture(scope="module")
def short_and_full(tmp_path_factory):
    """Render with short names and every option on."""
    return render_with_cookiecutter(tmp_path_factory.mktemp("short") / "output", **SHORT_NAMES)


def test_a_project_with_long_names_and_no_options_tests_itself_and_trains(long_and_bare):
    make(long_and_bare, "test")
    make(long_and_bare, "train", f"ARGS={SMOKE}")
    assert not list(long_and_bare.glob("src/*/tools"))
    assert not list(long_and_bare.glob("runs/smoke/report.html"))


def test_a_project_with_short_names_and_all_options_tests_its_tools(short_and_full):
    make(short_and_full, "check")
    # What has to do with tools: the other tests were run without them.
    tests = ["src", *(f"tests/test_{name}.py" for name in ("cli", "console", "security"))]
    tests += ["tests/test_house.py::test_every_command_of_the_readme_is_understood"]
    python("-m", "pytest", "-q", "-n", "auto", *tests, folder=short_and_full)


def test_a_mistake_that_one_process_meets_is_one_line(short_and_full, tmp_path):
    for number in range(16):
        split = "train" if number < 8 else "val"
        path = tmp_path / split / ("ant", "bee")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 0, 0)).save(path)
    (tmp_path / "train" / "ant" / "2.png").write_bytes(b"<html>")  # the second image: rank 1's
    words = f"folder --data.root {tmp_path} --data.image-size 32 --data.batch-size 4"
    words += " --augment.crop pad --augment.policy none --model.name resnet9"
    words += f" --run.processes 2 --run.dir {tmp_path}/run"
    command = [sys.executable, "train.py", *words.split()]
    done = subprocess.run(command, cwd=short_and_full, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot read image" in done.stderr


def test_a_mistake_that_one_process_meets_while_training_is_one_line(short_and_full, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    words = [*SMOKE.split(), "--run.log-every-steps", "1", "--run.processes", "2"]
    done = subprocess.run(
        [sys.executable, "broken.py", *words],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(short_and_full / "src")},
    )
    assert (done.returncode, done.stderr) == (2, "error: the disk is on fire\n")
    rows = (tmp_path / "runs/smoke/metrics.jsonl").read_text().splitlines()
    assert sum("train/loss" in row for row in rows) == 1


def make(folder, target, *variables):
    """Run `make` in the environment of these tests, with nothing installed into it."""
    installed = Path(sys.prefix, f".{folder.name}")
    command = ["make", f"--old-file={installed}", target, f"VENV={sys.prefix}", *variables]
    # An outer make would hand down its own variables and its jobs.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    result = subprocess.run(
        command, cwd=folder, check=False, capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
