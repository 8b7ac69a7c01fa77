"""A project lives on under its own name: it checks, tests and trains, less any tool or all."""

import re
import shutil
import sys
from importlib.metadata import packages_distributions

import pytest
from conftest import (
    ALL,
    GPUS,
    LONG_NAMES,
    OFF,
    PROJECT,
    SMOKE,
    losses,
    pyproject,
    python,
    run,
    write_photos,
)

from pretuned_answers import tools

# With the shortest names, lines that were broken would fit: the formatter sees that, too.
SHORT_NAMES = {"project_name": "Q", "project_slug": "q", "package_name": "q", "author": "Q"}
# One process imports what all of the tests do; the folders are looked at in its children.
CHECK = """
import importlib, multiprocessing, os, subprocess, sys
import numpy.ma, PIL.PngImagePlugin, sklearn.metrics, tensorboard.summary
import torch._dynamo, torchvision.transforms.v2
import captum.attr, datasets, optuna, ray.tune, timm
import importlinter.cli, pytest

def check(folder):
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder}/src"
    sys.path[:0] = [f"{folder}/src"]
    for words in (["check"], ["format", "--check"]):
        assert not subprocess.call([f"{sys.prefix}/bin/ruff", *words, "--no-cache", "-q"]), folder
    assert not importlinter.cli.lint_imports(no_cache=True), folder
    words = ["--collect-only", "-qq", "-p", "no:cacheprovider", "--assert=plain"]
    assert not pytest.main(words), folder
    assert not importlib.import_module(f"{PACKAGE}.cli").main(["train", *SMOKE.split()]), folder

PACKAGE, SMOKE = sys.argv[1:3]
with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    pool.map(check, sys.argv[3:], chunksize=1)
"""


def test_a_project_with_long_names_and_no_options_tests_itself_and_trains(render):
    project = render(**LONG_NAMES, **OFF)
    make(project, "test")
    make(project, "train", f"ARGS={SMOKE} --run.trackers")
    assert not [*project.glob("src/*/tools"), *project.glob("runs/smoke/report.html")]


# Python imports it as it starts: no process of the tests finds these modules.
HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
hidden = {hidden}

class Find:
    def __call__(self, name, *more):
        return None if name in hidden else find(name, *more)

PathFinder.find_spec = Find()  # no function, which pytest would make a method of its own
"""


def test_a_project_with_the_usual_tools_tests_itself_without_optional_libraries(render):
    project = render(**LONG_NAMES)
    hide = HIDE.format(hidden=optional_libraries())
    (project / "src/sitecustomize.py").write_text(hide)
    words = "-m", "pytest", "-q", "-rs", "-n", "auto", "tests"
    assert "'timm'" in python(*words, folder=project, PYTHONPATH=str(project / "src"))  # skipped


def test_a_project_with_short_names_and_all_options_tests_its_tools(render):
    project = render(**SHORT_NAMES, **ALL)
    make(project, "check")
    # What has to do with tools: the other tests were run without them.
    tests = ["src", *(f"tests/test_{name}.py" for name in ("cli", "console", "security"))]
    tests += ["tests/test_structure.py::test_every_command_of_the_readme_is_understood"]
    said = python("-m", "pytest", "-q", "-rs", "-n", "auto", *tests, folder=project)
    # None for want of a library: `dev` of pyproject.toml has all.
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert not [line for line in skipped if not re.search("CUDA|GPU", line)]


def test_a_project_lives_with_any_tools_that_it_was_given_or_that_were_left_to_it(render, tmp_path):
    names = tools.offered(PROJECT)
    folders = []
    for number in range(8):  # each tool with few others; and the usual ones
        asked = {"_tools": ", ".join(names[number - 1 :: 7])} if number else {"tools": "usual"}
        folders.append(tmp_path / str(number))
        shutil.move(render(**LONG_NAMES, **asked), folders[-1])
    whole = render(**LONG_NAMES, **ALL)
    for start in range(0, len(names), 5):  # deleted by hand
        folders.append(tmp_path / f"without {start}")
        shutil.copytree(whole, folders[-1])
        for name in names[start : start + 5]:
            shutil.rmtree(next(folders[-1].glob(f"src/*/tools/{name}")))
    words = LONG_NAMES["package_name"], f"{SMOKE} --run.trackers"
    python("-c", CHECK, *words, whole, *folders)


def test_a_project_extended_as_its_documents_say_passes_its_own_tests(render):
    folder = render(**OFF)
    page = (folder / "docs" / "extend.md").read_text(encoding="utf-8")
    for patch in re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        (folder / "x.patch").write_text(patch, encoding="utf-8")
        run("git", "apply", "x.patch", folder=folder, GIT_CEILING_DIRECTORIES=str(folder.parent))
    some = "-k", "of_the_readme_is or every_extension or whole_of"
    files = "tests/test_structure.py", "tests/test_cli.py"
    said = python("-m", "pytest", "-q", "-rs", *some, *files, folder=folder)
    assert "is your own now" in said


def test_a_project_passes_its_own_tests_whatever_its_owner_makes_of_its_documents(render):
    folder = render(**OFF | {"description": "uv venv, then pip install it"})
    words = "-m", "pytest", "-q", "-rs", "tests/test_structure.py", "-k"
    some = "of_the_readme_is or optional_libraries"
    assert "3 passed" in python(*words, some, folder=folder)
    words += (f"{some} or every_extension",)
    (folder / "docs/guide.md").unlink()
    assert "docs/guide.md is your own now" in python(*words, folder=folder)
    (folder / "README.md").write_text("# Mine\n\n```sh\nexport A=1\npip install -e .\n```\n")
    (folder / "docs/extend.md").unlink()
    assert "README.md is your own now" in python(*words, folder=folder)


def test_a_project_that_is_called_as_one_of_its_commands_passes_its_own_tests(render):
    folder = render(**ALL | {"project_slug": "search"})
    test = "tests/test_structure.py::test_every_command_of_the_readme_is_understood"
    python("-m", "pytest", "-q", test, folder=folder)


@pytest.mark.parametrize("where", ["host", "stream"])  # met before training, and within it
def test_a_mistake_that_one_process_meets_is_one_line(where, tmp_path):
    write_photos(tmp_path, 64, 8)
    (tmp_path / "train/ant/2.jpg").write_bytes(b"<html>")  # one that only one process reads
    words = f"folder --data.root {tmp_path} --data.image-size 32 --data.batch-size 8"
    words += f" --augment.crop pad --augment.policy none --model.name resnet9 --data.where {where}"
    words += f" --run.log-every-steps 1 --run.processes 2 --run.dir {tmp_path}/run"
    done = run(sys.executable, "train.py", *words.split(), code=2)
    assert done.stderr.count("\n") == 1
    assert "cannot read image" in done.stderr
    assert where == "host" or losses(tmp_path / "run")


def optional_libraries():
    """The modules of libraries that the environment of a new project has not."""
    lists = pyproject(PROJECT)["project"]["optional-dependencies"].values()
    names = {re.match(r"[\w-]+", need)[0] for needs in lists for need in needs}
    owners = packages_distributions().items()
    return [
        module for module, of in owners if names & {name.replace("_", "-").lower() for name in of}
    ]


def make(project, *words):
    """Run `make` in the environment of these tests, with nothing installed into it."""
    installed = f"--old-file={sys.prefix}/.{project.name}"
    # Where there is a GPU, on that, too.
    gpus = "--unset=CUDA_VISIBLE_DEVICES" if GPUS is None else f"CUDA_VISIBLE_DEVICES={GPUS}"
    words = ("env", gpus, "make", installed, *words, f"VENV={sys.prefix}")
    # An outer make would hand down its own variables and its jobs.
    run(*words, folder=project, MAKEFLAGS="")
