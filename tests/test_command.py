"""The `pretuned` command: it understands, or says which words it would understand."""

import io
import tempfile
import tomllib
from pathlib import Path

import pytest
from conftest import PROJECT

from pretuned import cli


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("project_nme=x", "unknown key 'project_nme'; did you mean 'project_name'?"),
        ("license=MIT", "unknown key 'license'; did you mean 'licence'?"),
        ("_extensions=x", "unknown key '_extensions'"),
        ("licence=apache", "unknown licence 'apache'; did you mean 'Apache-2.0'?"),
        ("licence=GPL", "(there are: MIT, Apache-2.0, BSD-3-Clause, proprietary)"),
        ("ci=gitlab", "did you mean 'GitLab CI'?"),
        ("docker=nope", "unknown docker 'nope'; did you mean 'no'?"),
        ("name", "'name' must have the form key=value"),
    ],
)
def test_a_wrong_word_says_which_are_right(argument, message, tmp_path, capsys):
    assert cli.main(["--no-input", argument]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_choice_may_be_written_in_any_case():
    assert cli.main(["--no-input", "licence=apache-2.0", "ci=NONE", "docker=No"]) == 0
    project = tomllib.loads(Path("image-classifier/pyproject.toml").read_text())
    answers = project["tool"]["pretuned"]["answers"]
    assert (answers["licence"], answers["ci"], answers["docker"]) == ("Apache-2.0", "none", False)


def test_typed_answers_are_taken(monkeypatch):
    typed = ["", "birds", "", "", "Ada Byron", "", "3", "n", "n", "2", "2"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed) + "\n"))
    assert cli.main(["project_name=Bird Watch"]) == 0
    project = tomllib.loads(Path("birds/pyproject.toml").read_text())
    assert project["tool"]["pretuned"]["answers"] == {
        "project_name": "Bird Watch",
        "project_slug": "birds",
        "package_name": "birds",
        "description": project["project"]["description"],
        "author": "Ada Byron",
        "email": "ada@example.com",
        "licence": "BSD-3-Clause",
        "docker": False,
        "slurm": False,
        "ci": "GitLab CI",
        "tools": "none",
    }


def test_unanswered_questions_make_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO("Bird Watch\n"))
    assert cli.main([]) == 130
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_outside_the_new_folder(monkeypatch, tmp_path):
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    scratch.mkdir()
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert cli.main(["--no-input", "--output-dir", "output"]) == 0
    assert not list(scratch.iterdir())
    assert not list(home.iterdir())


def test_the_version_is_the_one_that_projects_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    written = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pretuned"]["version"]
    assert capsys.readouterr().out.strip() == written
