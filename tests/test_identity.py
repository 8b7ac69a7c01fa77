"""The template is the project: nothing stands between the folder here and the folder you get."""

import re
import shutil

from conftest import (
    ALL,
    PROJECT,
    ROOT,
    contents,
    pyproject,
    python,
    run,
    template,
    tracked_files,
)

from pretuned import cli


def test_the_default_answers_and_all_tools_give_the_folder_itself(render, tmp_path):
    assert cli.main(["--no-input", "--output-dir", str(tmp_path), "tools=all"]) == 0
    assert contents(tmp_path / "image-classifier") == contents(render(**ALL)) == template()


def test_no_module_names_its_package_which_may_be_renamed():
    files = (PROJECT / "src/image_classifier").rglob("*.py")
    modules = [path for path in files if path.parent.name != "tests"]
    assert modules
    for path in modules:
        assert "image_classifier" not in path.read_text(encoding="utf-8"), path


def test_no_test_has_the_package_as_a_variable_which_a_fixture_may_be_called():
    for path in PROJECT.rglob("test_*.py"):  # such as `photos`
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^ *import image_classifier$", text, re.MULTILINE), path


def test_the_type_checker_finds_each_path_that_it_is_to_read():
    for pattern in pyproject(ROOT)["tool"]["pyrefly"]["project-includes"]:
        assert len([*ROOT.glob(pattern)]) == 1, pattern  # it says nothing of one that is not there


def test_an_installed_wheel_renders_the_same_bytes(tmp_path):
    version = pyproject(PROJECT)["tool"]["pretuned"]["version"]
    build = ("-m", "hatchling", "build", "-t")
    python(*build, "sdist", "-d", tmp_path, folder=ROOT)
    run("tar", "xf", *tmp_path.glob("*.tar.gz"), folder=tmp_path)
    for source in (ROOT, *tmp_path.glob("pretuned-*/")):
        home = tmp_path / f"of {source.name}"
        python(*build, "wheel", "-d", home, folder=source)
        assert [*home.glob(f"pretuned-{version}-*.whl")]
        # Compiled, as pip leaves it: a render must not hold the bytecode of the bundled template.
        install = ("-m", "uv", "pip", "install", "--no-deps", "--compile-bytecode", "--target")
        python(*install, home / "lib", *home.glob("*.whl"), HOME=home)
        python(
            "-m",
            "pretuned",
            "--no-input",
            "tools=all",
            folder=home,
            HOME=home,
            PYTHONPATH=home / "lib",
        )
        assert_same_as_template(home / "image-classifier")
    # As PyPI would take them.
    python("-m", "twine", "check", "--strict", *tmp_path.glob("*.gz"), *tmp_path.glob("*/*.whl"))


def test_a_clone_renders_the_same_bytes_and_so_does_a_folder_in_which_somebody_worked(tmp_path):
    copy = tmp_path / "copy"
    copy_tracked(copy)
    commit(copy)
    for leftover in (
        "src/__pycache__/a.pyc",
        ".mypy_cache/a",
        ".ruff_cache/a",
        ".venv/bin/a",
        ".venv-lowest/bin/a",
        "runs/a",
        "data/a",
        "data.cache/a",
        "photos/a",
        "slurm-1.out",
        ".DS_Store",
        "docs/.DS_Store",
        ".idea/a",
        ".vscode/a",
        "uv.lock",
        "x.cache",
        "Thumbs.db",
        "docs/.ipynb_checkpoints/a",
    ):
        path = copy / PROJECT.name / leftover
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left behind")
    for source in (f"git+file://{copy}", copy):
        command = ("-m", "cookiecutter.cli", source, "--no-input", "tools=all")
        python(*command, folder=tmp_path, HOME=tmp_path)
        assert_same_as_template(tmp_path / "image-classifier")
        shutil.rmtree(tmp_path / "image-classifier")


def test_a_read_only_template_makes_a_project_that_its_owner_can_change(tmp_path):
    copy = tmp_path / "copy"
    copy_tracked(copy)
    run("chmod", "-R", "a-w", copy)
    folder = tmp_path / "output"
    python("-m", "cookiecutter.cli", copy, "--no-input", "-o", folder, "tools=all", HOME=tmp_path)
    assert_same_as_template(folder / "image-classifier")
    other = tmp_path / "other"
    words = "license=Apache-2.0", "ci=GitLab CI", "-o", other
    python("-m", "cookiecutter.cli", copy, "--no-input", *words, HOME=tmp_path)
    made = [*folder.rglob("*"), *other.rglob("*")]
    assert all(path.stat().st_mode & 0o200 for path in made)


def test_git_for_windows_leaves_every_byte_of_the_template_and_of_a_project_as_it_is(
    tmp_path, render, monkeypatch
):
    for name, value in {"COUNT": "1", "KEY_0": "core.autocrlf", "VALUE_0": "true"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    copy_tracked(tmp_path / "template")
    for folder in (tmp_path / "template", render(**ALL)):
        commit(folder)
        clone = tmp_path / f"clone of {folder.name}"
        run("git", "clone", folder, clone, folder=tmp_path)
        files = tracked_files(folder)
        assert contents(clone, files) == contents(folder, files)
    run("bash", "-n", "slurm.sh", folder=clone)


def copy_tracked(copy):
    """Copy this repository as it is, without what git ignores."""
    for file in tracked_files(ROOT):
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy / file)


def commit(folder):
    """Make a repository of a folder."""
    for words in ("init", "add --all", "-c user.name=a -c user.email=a@b.c commit --message=all"):
        run("git", *words.split(), folder=folder)


def assert_same_as_template(folder):
    """Compare bytes, and of the modes what an archive keeps: who may execute."""
    expected, found = template(), contents(folder)
    assert found.keys() == expected.keys()
    for file, (text, mode) in expected.items():
        assert (found[file][0], found[file][1] & 0o100) == (text, mode & 0o100), file
