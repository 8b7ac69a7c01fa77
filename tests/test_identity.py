"""The template is the project: nothing stands between the folder here and the folder you get."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import PROJECT, ROOT, all_files, contents, tracked_files

from pretuned import cli


def test_the_default_answers_give_the_folder_itself(render):
    folder = render()
    expected = contents(PROJECT, tracked_files(PROJECT))
    assert contents(folder, all_files(folder)) == expected


def test_an_editable_install_renders_the_same_bytes(tmp_path):
    assert cli.main(["--no-input", "--output-dir", str(tmp_path)]) == 0
    assert_same_as_template(tmp_path / "image-classifier")


def test_what_developers_leave_in_the_template_is_not_handed_on(tmp_path):
    template = copied(tmp_path / "template")
    for leftover in ("src/__pycache__/a.pyc", ".ruff_cache/a", ".venv/bin/a", "runs/a", "data/a"):
        path = template / PROJECT.name / leftover
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left behind")
    run("cookiecutter.cli", template, "--no-input", home=tmp_path)
    assert_same_as_template(tmp_path / "image-classifier")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Build the wheel from the checkout, and from the source distribution."""
    built = tmp_path_factory.mktemp("built")
    run("hatchling", "build", "-t", "wheel", "-d", built / "checkout", cwd=ROOT, home=built)
    run("hatchling", "build", "-t", "sdist", "-d", built, cwd=ROOT, home=built)
    subprocess.run(["tar", "xf", next(built.glob("*.tar.gz"))], check=True, cwd=built)
    source = next(built.glob("pretuned-*/"))
    run("hatchling", "build", "-t", "wheel", "-d", built / "sdist", cwd=source, home=built)
    return {name: next((built / name).glob("*.whl")) for name in ("checkout", "sdist")}


@pytest.mark.parametrize("source", ["checkout", "sdist"])
def test_an_installed_wheel_renders_the_same_bytes(source, wheels, tmp_path):
    # Compiled, as pip leaves it: a render must not hold the bytecode of the bundled template.
    target = tmp_path / "installed"
    install = ("uv", "pip", "install", "--no-deps", "--compile-bytecode", "--target", target)
    run(*install, wheels[source], home=tmp_path)
    run("pretuned", "--no-input", "--output-dir", tmp_path, home=tmp_path, path=target)
    assert_same_as_template(tmp_path / "image-classifier")


def test_a_clone_renders_the_same_bytes(tmp_path):
    clone = copied(tmp_path / "clone")
    git = ("git", "-C", clone, "-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (["init", "-q"], ["add", "--all"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    url = f"git+file://{clone}"
    run("cookiecutter.cli", url, "--no-input", "-o", tmp_path, "licence=MIT", home=tmp_path)
    assert_same_as_template(tmp_path / "image-classifier")


def copied(target):
    """Copy the checkout, without what git ignores, and return the copy."""
    for file in tracked_files(ROOT):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target / file)
    return target


def assert_same_as_template(folder):
    """Compare bytes, and of the modes what an archive keeps: who may execute."""
    expected = contents(PROJECT, tracked_files(PROJECT))
    found = contents(folder, all_files(folder))
    assert found.keys() == expected.keys()
    for file, (text, mode) in expected.items():
        assert found[file][0] == text, file
        assert bool(found[file][1] & 0o100) == bool(mode & 0o100), file


def run(module, *arguments, home, cwd=None, path=None):
    """Run a module in a process of its own, which imports from `path` first."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"HOME": str(home), "PYTHONPATH": str(path or "")}
    subprocess.run(command, check=True, cwd=cwd or home, env=environment)
