"""What `make` does here and in a project: with programs that only note how they are called."""

import os
import shutil

import pytest
from conftest import PROJECT, ROOT, run

NOTE = """#!/bin/sh
line="${0##*/} $*"
echo "$line" >> "$NOTES"
case "$line" in "$FAILS"*) exit 1 ;; esac
"""
CHECKS = ["ruff check", "ruff format --check", "lint-imports"]
TESTS = ["python -m pytest -n auto"]
GPU = ["python -c import torch; torch.cuda.init()", "python -m pytest -m gpu"]


def program(path, code=NOTE):
    """Write a program that `make` may call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    path.chmod(0o755)


def installed(folder, stamp):
    """A folder with an environment in which nothing is to be installed."""
    for name in ("python", "ruff", "lint-imports", "pyrefly", "pretuned"):
        program(folder / ".venv/bin" / name)
    (folder / ".venv" / stamp).write_text(f"{folder}/.venv\n")
    return folder


@pytest.fixture
def bare(tmp_path):
    """The Makefile of a project."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copyfile(PROJECT / name, folder / name)
    return folder


@pytest.fixture
def project(bare):
    """A project that has its environment."""
    return installed(bare, ".image-classifier")


@pytest.fixture
def template(tmp_path):
    """The Makefile of this repository, with its environment."""
    folder = tmp_path / "template"
    (folder / PROJECT.name).mkdir(parents=True)
    shutil.copyfile(ROOT / "Makefile", folder / "Makefile")
    for place in (folder, folder / PROJECT.name):
        (place / "pyproject.toml").touch()
    return installed(folder, ".pretuned")


def make(folder, *words, code=0, fails="nothing", **variables):
    """What was called by `make`, and what it said."""
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    variables = {"NOTES": str(notes), "FAILS": fails, "MAKEFLAGS": ""} | variables
    words = ("env", "--unset=VENV", "--unset=UV_PYTHON", "make", *words)
    said = run(*words, folder=folder, code=code, **variables)
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [line.rstrip() for line in lines], said.stdout + said.stderr


def test_a_project_is_tested_by_all_checks_and_all_tests_of_which_none_may_fail(project):
    assert make(project, "check")[0] == CHECKS
    assert make(project, "test")[0] == CHECKS + TESTS + GPU
    assert make(project, "test", fails=GPU[0])[0] == CHECKS + TESTS + GPU[:1]  # there is none
    for part in (*CHECKS, *TESTS, GPU[1]):
        assert make(project, "test", fails=part, code=2)[0][-1] == part


def test_this_repository_is_tested_by_all_checks_and_all_tests_of_which_none_may_fail(template):
    parts = "ruff check", "ruff format --check", "lint-imports --no-cache", "pyrefly check"
    parts += "python -m pytest -n 2", "python -m pytest tests/test_renders.py"
    called, _ = make(template, "test")
    assert len(called) == len(parts)
    assert all(line.startswith(part) for line, part in zip(called, parts, strict=True))
    for part in parts:
        assert make(template, "test", fails=part, code=2)[0][-1].startswith(part)


def test_training_is_by_the_code_of_the_project_which_python_keeps_compiled(project):
    show = '#!/bin/sh\necho "$* $PYTHONPATH ${PYTHONDONTWRITEBYTECODE-compiled}" >> "$NOTES"\n'
    program(project / ".venv/bin/python", show)
    others = {"PYTHONPATH": "/other", "PYTHONDONTWRITEBYTECODE": "1"}
    for words, asked in (((), "shapes"), (("ARGS=smoke --seed 1",), "smoke --seed 1")):
        called, _ = make(project, "train", *words, **others)
        assert called == [f"train.py {asked} {project}/src compiled"]


@pytest.mark.parametrize("name", ["project", "template"])
def test_what_is_cleaned_away_are_caches_and_neither_runs_nor_the_environment(name, request):
    folder = request.getfixturevalue(name)
    mine = "runs/a", "data/a", "src/a.py", "tests/a.py", ".venv/bin/python", "Makefile"
    gone = "build/a", "dist/a", ".ruff_cache/a", ".pytest_cache/a", ".import_linter_cache/a"
    if name == "project":
        gone += "src/a/__pycache__/a.pyc", "tests/__pycache__/a.pyc"
    for path in (*mine[:4], *gone):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    make(folder, "clean")
    assert [path for path in (*mine, *gone) if (folder / path).exists()] == [*mine]


def test_a_demo_that_started_to_train_is_resumed_and_another_is_made_anew(template):
    demo = template / "build/demo/image-classifier"
    rules = "train:\n\t@echo trains in $(VENV) >> $(NOTES)\n"
    program(demo / "Makefile", rules)
    (demo / "runs").mkdir()
    trains = "trains in ../../../.venv"
    assert make(template, "demo")[0] == [trains]
    assert (demo / "runs").is_dir()
    (demo / "runs").rmdir()
    made = f'mkdir -p {demo} && printf "%s" "$RULES" > {demo}/Makefile\n'
    program(template / ".venv/bin/pretuned", NOTE + made)
    (demo / "half.py").touch()
    called, _ = make(template, "demo", RULES=rules)
    assert called == ["pretuned --no-input --output-dir build/demo/", trains]
    assert not (demo / "half.py").exists()


SYSTEM = {"PATH": "/usr/bin:/bin"}  # without uv
INSTALL = "uv pip install --python .venv/bin/python --editable . --group dev"
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv"*) mkdir -p "$3/bin" && {ending} ;;
    "-m pip install"*) cp "$UV" .venv/bin/uv ;;
esac
"""


@pytest.mark.skipif(shutil.which("uv", path=SYSTEM["PATH"]) is not None, reason="uv is there")
def test_without_uv_it_is_installed_into_an_environment_by_venv(bare, tmp_path):
    program(tmp_path / "uv")
    program(tmp_path / "python", PYTHON.format(ending='cp "$0" "$3/bin/python"'))
    words = "environment", f"PYTHON={tmp_path}/python"
    assert make(bare, *words, UV=str(tmp_path / "uv"), **SYSTEM)[0] == [INSTALL]
    assert make(bare, *words, **SYSTEM)[0] == []  # it is there
    os.utime(bare / "pyproject.toml")
    assert make(bare, *words, **SYSTEM)[0] == [INSTALL]


@pytest.mark.skipif(shutil.which("uv", path=SYSTEM["PATH"]) is not None, reason="uv is there")
def test_an_environment_that_cannot_be_made_is_told_and_no_half_of_it_is_left(bare, tmp_path):
    program(tmp_path / "python", PYTHON.format(ending="exit 1"))
    for python, said in ((tmp_path / "python", "apt install python3-venv"), ("no", "older than")):
        _, printed = make(bare, "environment", f"PYTHON={python}", code=2, **SYSTEM)
        assert said in printed
        assert not (bare / ".venv").exists()
    (bare / ".venv").mkdir()
    (bare / ".venv/mine").touch()  # of something else
    assert ".venv is there but has no bin/python" in make(bare, "environment", code=2, **SYSTEM)[1]
    assert (bare / ".venv/mine").exists()


@pytest.mark.parametrize(("asked", "calls"), [({}, 2), ({"UV_PYTHON": "3.12"}, 1)])
def test_uv_may_take_a_newer_python_unless_one_is_asked_for(asked, calls, bare, tmp_path):
    program(tmp_path / "bin/uv")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    words = ["environment", *(f"{name}={value}" for name, value in asked.items())]
    called, _ = make(bare, *words, code=2, fails="uv venv", PATH=path)
    expected = ["uv venv --seed .venv", "uv venv --seed --python >=3.11 .venv"]
    assert called == expected[:calls]


def test_a_project_that_was_moved_says_that_its_environment_works_no_longer(tmp_path):
    project = tmp_path / "it's here"
    shutil.copytree(PROJECT, project, ignore=lambda *_: ["src", ".venv"])
    for path in (tmp_path / "bin/uv", project / ".venv/bin/python"):  # which installs
        program(path, "#!/bin/sh\n")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    said = [run("make", "environment", folder=project, PATH=path).stderr for _ in range(2)]
    moved = project.rename(tmp_path / "there")
    (moved / "pyproject.toml").touch()
    said += [run("make", "environment", folder=moved, PATH=path).stderr for _ in range(2)]
    warning = f".venv was made as {project}/.venv, and works only there: rm -r .venv, and make it"
    assert [warning in words for words in said] == [False, False, True, True]


@pytest.mark.parametrize("folder", [ROOT, PROJECT])
def test_an_environment_is_one_path(folder):
    own = {"folder": folder, "HOME": "/home/ada", "MAKEFLAGS": ""}
    for wrong in ("/home/ada/my envs", ""):  # make would remove /home/ada/my, if venv failed
        error = run("make", "help", f"VENV={wrong}", code=2, **own).stderr
        assert f"VENV='{wrong}' is not one path without spaces" in error
    assert "(/home/ada/envs)" in run("make", "help", "VENV=~/envs", **own).stdout
