"""The `pretuned` command: it understands, or says which words it would understand."""

import io
import tempfile
from pathlib import Path

import pytest
from conftest import PROJECT, pyproject

from pretuned import cli

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("project_nme=x", "unknown key 'project_nme'; did you mean 'project_name'?"),
        ("_extensions=x", "unknown key '_extensions'"),
        ("licence=apache", "unknown licence 'apache'; did you mean 'Apache-2.0'?"),
        ("licence=GPL", "(there are: MIT, Apache-2.0, BSD-3-Clause, proprietary)"),
        ("docker=nope", "unknown docker 'nope'; did you mean 'no'?"),
        ("name", "'name' must have the form key=value"),
    ],
)
def test_a_wrong_word_says_which_are_right(argument, message, here, capsys):
    assert cli.main(["--no-input", argument]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(here.iterdir())


def test_a_choice_may_be_written_in_any_case():
    assert cli.main(["--no-input", "licence=apache-2.0", "ci=NONE", "docker=No"]) == 0
    answers = pyproject(Path("image-classifier"))["tool"]["pretuned"]["answers"]
    assert (answers["licence"], answers["ci"], answers["docker"]) == ("Apache-2.0", "none", False)


def test_typed_answers_are_taken(monkeypatch):
    typed = ["", "birds", "", "", "Ada Byron", "", "3", "n", "n", "2", "2", ""]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    assert cli.main(["project_name=Bird Watch"]) == 0
    project = pyproject(Path("birds"))
    assert list(project["tool"]["pretuned"]["answers"].values()) == [
        *("Bird Watch", "birds", "birds", project["project"]["description"], "Ada Byron"),
        *("ada@example.com", "BSD-3-Clause", False, False, "GitLab CI", "none"),
    ]


def test_unanswered_questions_make_nothing(monkeypatch, here):
    monkeypatch.setattr("sys.stdin", io.StringIO("Bird Watch\n"))
    assert cli.main([]) == 130
    assert not list(here.iterdir())


def test_nothing_is_left_outside_the_new_folder(monkeypatch, here):
    for name in ("HOME", "TMPDIR"):
        Path(name).mkdir()
        monkeypatch.setenv(name, str(here / name))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert cli.main(["--no-input", "--output-dir", "output"]) == 0
    assert not [*here.glob("HOME/*"), *here.glob("TMPDIR/*")]


def test_the_version_is_the_one_that_projects_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == pyproject(PROJECT)["tool"]["pretuned"]["version"]
