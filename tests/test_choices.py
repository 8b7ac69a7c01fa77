"""What an answer changes, and what the `pretuned` command understands."""

import email.message
import email.policy
import email.utils
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from conftest import ALL, LONG_NAMES, OFF, PROJECT, ROOT, contents, pyproject, python, template
from markdown_it import MarkdownIt

from pretuned import cli, update
from pretuned_answers import tools

DEFAULT_WORDS = (
    *("Image Classifier", "image-classifier", "image_classifier", "Ada Lovelace"),
    *("ada@example.com", "Train an image classifier on your own pictures", "cookiecutter"),
)
FILES = template().keys()
TOOLS = {file for file in FILES if "/tools/" in file} | {"docs/tips.md"}
GITHUB, GITLAB = ".github/workflows/ci.yml", ".gitlab-ci.yml"
HOOKS = ".pre-commit-config.yaml"
OPTIONAL = {"Dockerfile", ".dockerignore", "slurm.sh", "sky.yaml", GITHUB, HOOKS}


@pytest.mark.parametrize(
    ("name", "expression", "first_words"),
    [
        ("MIT", "MIT", "MIT License Copyright (c) {author} Permission is hereby granted"),
        ("Apache-2.0", "Apache-2.0", "Apache License Version 2.0, January 2004"),
        ("BSD-3-Clause", "BSD-3-Clause", "BSD 3-Clause License Copyright (c) {author}"),
        ("proprietary", "LicenseRef-Proprietary", "Copyright (c) {author}. All rights reserved."),
    ],
)
def test_every_answer_is_where_it_belongs_and_no_default_is_left(
    name, expression, first_words, render
):
    folder = render(**LONG_NAMES, **ALL, license=name)
    for file, (content, _) in contents(folder).items():
        text = content.decode(errors="ignore") + file
        assert not [word for word in DEFAULT_WORDS if word in text], file
    choices = {"docker": True, "slurm": True, "skypilot": True, "pre_commit": True}
    choices |= {"ci": "GitHub Actions", "tools": "all"}
    answers = LONG_NAMES | choices | {"license": name}
    assert pyproject(folder)["tool"]["pretuned"]["answers"] == answers
    text = " ".join((folder / "LICENSE").read_text(encoding="utf-8").split())
    assert text.startswith(first_words.format_map(LONG_NAMES))
    assert "AS IS" in text
    tokens = MarkdownIt().parse((folder / "README.md").read_text(encoding="utf-8"))
    title = next(token for token in tokens if token.type == "inline")
    assert "".join(part.content for part in title.children or ()) == LONG_NAMES["project_name"]
    # The project builds, and says the same of itself.
    python("-m", "hatchling", "build", "-t", "wheel", folder=folder)
    with zipfile.ZipFile(next(folder.glob("dist/*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name), policy=email.policy.default)
    author = email.utils.parseaddr(metadata["Author-email"])
    assert author == (LONG_NAMES["author"], LONG_NAMES["email"])
    said = metadata["Name"], metadata["Summary"], metadata["License-Expression"]
    assert said == (LONG_NAMES["project_slug"], LONG_NAMES["description"], expression)


@pytest.mark.parametrize(
    ("answers", "gone", "new"),
    [
        ({"docker": "no"}, {"Dockerfile", ".dockerignore"}, set()),
        ({"slurm": "no"}, {"slurm.sh"}, set()),
        ({"skypilot": "no"}, {"sky.yaml"}, set()),
        ({"tools": "none"}, TOOLS, set()),
        ({"ci": "none"}, {GITHUB}, set()),
        ({"pre_commit": "no"}, {HOOKS}, set()),
        ({"ci": "GitLab CI"}, {GITHUB}, {GITLAB}),
        ({"license": "Apache-2.0"}, set(), set()),
        (OFF, OPTIONAL | TOOLS, set()),
    ],
)
def test_a_choice_brings_exactly_its_files(answers, gone, new, render):
    assert contents(render(**ALL | answers)).keys() == FILES - gone | new


@pytest.mark.parametrize("file", ["Dockerfile", "slurm.sh", "sky.yaml"])
def test_a_page_that_names_a_file_that_may_not_be_asked_for_says_so(file):
    pages = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("src/**/*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    found = [text for text in texts if f"`{file}`" in text or f" {file} " in text]
    assert found
    assert all(re.search(f"`{file}`.*, if (it|the project) has", text) for text in found)


def test_answers_are_typed_or_given_in_any_case_and_names_follow_from_the_name(here, monkeypatch):
    typed = ["", "", "", "", "Ada Byron", "", "", "", "n", "n", "2", "n", "4", ""]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    assert cli.main(["project_name=Zoë's Cats & Dogs", "license=bsd-3-clause", "docker=No"]) == 0
    project = pyproject(here / "zoe-s-cats-dogs")
    assert list(project["tool"]["pretuned"]["answers"].values()) == [
        *("Zoë's Cats & Dogs", "zoe-s-cats-dogs", "zoe_s_cats_dogs"),
        *(project["project"]["description"], "Ada Byron", "ada@example.com"),
        *("BSD-3-Clause", False, False, False, "GitLab CI", False, "none"),
    ]
    assert (here / "zoe-s-cats-dogs/src/zoe_s_cats_dogs/__init__.py").is_file()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("project_nme=x", "unknown key 'project_nme'; did you mean 'project_name'?"),
        ("_extensions=x", "unknown key '_extensions'"),
        ("license=apache", "unknown license 'apache'; did you mean 'Apache-2.0'?"),
        ("license=GPL", "(there are: MIT, Apache-2.0, BSD-3-Clause, proprietary)"),
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


@pytest.mark.parametrize(
    ("word", "meant"), [("yes", True), ("True", True), ("no", False), ("FALSE", False)]
)
def test_yes_and_no_may_be_true_and_false(word, meant):
    assert cli._read_answers([f"docker={word}"], cli._questions()) == {"docker": meant}


@pytest.mark.parametrize("words", ["tools=search tools=all", "docker=no docker=yes"])
def test_a_question_has_one_answer(words, here, capsys):
    assert cli.main(["--no-input", *words.split()]) == 2
    last = words.rpartition("=")[2]
    said = f"ERROR: {words.partition('=')[0]} has two answers, of which the second is {last!r}\n"
    assert capsys.readouterr().err == said
    assert not list(here.iterdir())


def test_every_command_that_makes_a_project_is_understood():
    pages = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("README.md", "docs/make_a_project.md")
    ]
    start = r"^(?:uvx --from \S+ |\.venv/bin/)"  # it is on no index yet
    commands = re.findall(rf"{start}pretuned\b(.*)", "\n".join(pages), re.MULTILINE)
    assert len(commands) >= 4
    for words in commands:
        questions = cli._questions()
        options = cli._parser(questions).parse_args(shlex.split(words, comments=True))
        cli.check(cli._read_answers(options.answers, questions))


def test_no_page_takes_the_command_from_an_index_where_anybody_may_put_one():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *PROJECT.rglob("*.md")]
    assert not [page for page in pages if "uvx pretuned" in page.read_text(encoding="utf-8")]


def test_tools_are_asked_for_by_name_too(here, capsys):
    assert cli.main(["--no-input", "tools=Cutout, near-duplicates"]) == 0
    answers = update.about(here / "image-classifier")[1]
    assert answers["tools"] == ["cutout", "near_duplicates"]
    assert cli.main(["--no-input", "project_slug=more", "tools=Few,serve"]) == 0
    answers = update.about(here / "more")[1]
    assert {*answers["tools"]} == {*tools.FEW, "serve"}
    assert (here / "more/src/more/tools/python_api").is_dir()  # which `serve` needs
    capsys.readouterr()
    assert cli.main(["--no-input", "project_slug=other", "tools=cutout,cutuot"]) == 2
    assert "unknown tool 'cutuot'; did you mean cutout?" in capsys.readouterr().err


def test_a_question_that_names_have_answered_offers_nothing_else(here, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n" * 12 + "4\n1\n"))
    assert cli.main(["tools=cutout"]) == 0
    question = capsys.readouterr().out.rpartition("Tools beside training")[2]
    assert "1 - cutout" in question
    assert "2 - " not in question
    assert update.about(here / "image-classifier")[1]["tools"] == ["cutout"]


def test_unanswered_questions_make_nothing(monkeypatch, here):
    monkeypatch.setattr("sys.stdin", io.StringIO("Bird Watch\n"))
    assert cli.main([]) == 130
    assert not list(here.iterdir())


def test_what_is_interrupted_or_killed_says_so_and_makes_nothing(monkeypatch, here, capfd):
    kill = ["sh", "-c", "kill -KILL $$"]
    start = cli.subprocess.Popen
    with monkeypatch.context() as patch:
        patch.setattr(cli.subprocess, "Popen", lambda *_, **__: start(kill))
        assert cli.main(["--no-input"]) == 2
    said = "ERROR: Hook script failed (exit status: -9); nothing was made or changed\n"
    assert capfd.readouterr().err == said
    with monkeypatch.context() as patch:
        patch.setattr(cli, "cookiecutter", Mock(side_effect=KeyboardInterrupt))
        assert cli.main(["--no-input"]) == 130
    assert capfd.readouterr().err == "\nERROR: no project was made: interrupted\n"
    (here / "site").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(here / "site"))  # of the hook
    for error, said in (
        ("KeyboardInterrupt", "Hook script failed (exit status: 130); nothing was made or changed"),
        ("OSError(28, 'disk full')", "[Errno 28] disk full; no project was made"),
    ):
        code = f"import pathlib\ndef stop(*_): raise {error}\npathlib.Path.rglob = stop\n"
        (here / "site/sitecustomize.py").write_text(code)
        assert cli.main(["--no-input"]) == 2
        assert capfd.readouterr().err == f"ERROR: {said}\n"  # no traceback
    assert [path.name for path in here.iterdir()] == ["site"]


def test_a_signal_that_ends_it_leaves_nothing_of_a_project_that_was_not_made(here):
    for name in ("made", "temporary"):
        (here / name).mkdir()
    command = [sys.executable, "-m", "pretuned", "--output-dir", "made"]
    places = {"PYTHONPATH": f"{ROOT}/src", "TMPDIR": str(here / "temporary")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=here, env=os.environ | places, **pipes)
    assert process.stdout.read(1)  # of the first question
    assert [*here.glob("made/.pretuned-*")]
    process.terminate()  # not SIGHUP of a closed terminal, which `nohup` ignores
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not [*here.glob("*/*"), *here.glob("*/.*")]


def test_a_reader_that_has_seen_enough_gets_no_traceback(here):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pretuned", "add"]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    pipes = {"stdout": writer, "stderr": subprocess.PIPE}
    done = subprocess.run(command, cwd=here, env=variables, check=False, **pipes)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_a_caller_does_with_signals_stays_and_threads_have_none():
    numbers = signal.SIGHUP, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with cli._unwound_by_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        after = [signal.getsignal(number) for number in numbers]
        assert after == [signal.SIG_IGN, signal.SIG_DFL]
        with ThreadPoolExecutor(1) as pool:  # as a notebook or a service may have
            pool.submit(cli._unwound_by_signals().__enter__).result()
        assert [signal.getsignal(number) for number in numbers] == after
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.usefixtures("here")
def test_a_notebook_shows_what_it_says(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # which has no encoding to set
    assert cli.main(["add"]) == 0
    assert "\n  search  " in re.sub(" +", "  ", sys.stdout.getvalue())


def test_a_link_that_leads_nowhere_is_in_the_way_of_a_project(here, capsys):
    (here / "image-classifier").symlink_to("nowhere")
    assert cli.main(["--no-input", "tools=none"]) == 2
    said = f"ERROR: '{here}/image-classifier' exists; choose another project_slug\n"
    assert capsys.readouterr().err == said


def test_nothing_is_left_outside_the_new_folder(monkeypatch, here):
    for name in ("HOME", "TMPDIR"):
        (here / name).mkdir()
        monkeypatch.setenv(name, str(here / name))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert cli.main(["--no-input", "--output-dir", "output"]) == 0
    assert not [*here.glob("HOME/*"), *here.glob("TMPDIR/*")]


def test_the_last_line_has_the_folder_as_it_was_asked_for_and_a_shell_can_read_it(here, capsys):
    for folder in ("output", "my output"):
        assert cli.main(["--no-input", "--output-dir", folder, "tools=none"]) == 0
        made = f"{folder}/image-classifier"
        said = f"{made} is ready: cd {shlex.quote(made)} && make train\n"
        assert capsys.readouterr().out == said
        assert (here / made / "train.py").exists()


def test_answers_and_options_come_in_any_order(here):
    assert cli.main(["project_name=Bird Watch", "--no-input", "tools=none"]) == 0
    assert not (here / "bird-watch/src/bird_watch/tools/report").exists()


def test_the_version_is_the_one_that_projects_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == pyproject(PROJECT)["tool"]["pretuned"]["version"]
