"""What an answer changes: exactly the words and the files it is about."""

import email.message
import email.policy
import email.utils
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import (
    EVERY_OPTION_OFF,
    LONG_NAMES,
    PROJECT,
    all_files,
    python,
    render_with_cookiecutter,
    tracked_files,
)
from markdown_it import MarkdownIt

DEFAULT_WORDS = (
    "Image Classifier",
    "image-classifier",
    "image_classifier",
    "Ada Lovelace",
    "ada@example.com",
    "Train an image classifier on your own pictures",
)
DOCKER = {Path("Dockerfile"), Path(".dockerignore")}
SLURM = {Path("slurm.sh")}
TOOLS = {Path("docs/tips.md")} | {
    file for file in tracked_files(PROJECT) if "src/image_classifier/tools/" in str(file)
}
GITHUB = {Path(".github/workflows/ci.yml")}
GITLAB = {Path(".gitlab-ci.yml")}


@pytest.fixture(scope="module")
def long_named(tmp_path_factory):
    """Render with names that share no word with the default ones."""
    return render_with_cookiecutter(tmp_path_factory.mktemp("long") / "output", **LONG_NAMES)


def test_no_default_word_is_left(long_named):
    for file in all_files(long_named):
        text = (long_named / file).read_bytes().decode(errors="ignore") + str(file)
        assert not [word for word in DEFAULT_WORDS if word in text], file


def test_the_answers_read_back_equal(long_named):
    project = tomllib.loads((long_named / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["pretuned"]["answers"] == LONG_NAMES | {
        "licence": "MIT",
        "docker": True,
        "slurm": True,
        "ci": "GitHub Actions",
        "tools": "all",
    }
    assert project["project"]["name"] == LONG_NAMES["project_slug"]
    assert project["project"]["description"] == LONG_NAMES["description"]
    author = {"name": LONG_NAMES["author"], "email": LONG_NAMES["email"]}
    assert project["project"]["authors"] == [author]


def test_texts_are_shown_as_typed(long_named):
    assert f"Copyright (c) {LONG_NAMES['author']}\n" in (long_named / "LICENSE").read_text("utf-8")
    tokens = MarkdownIt().parse((long_named / "README.md").read_text(encoding="utf-8"))
    title = next(token for token in tokens if token.type == "inline")
    assert "".join(part.content for part in title.children or ()) == LONG_NAMES["project_name"]


def test_an_answer_with_a_default_word_in_it_is_not_read_twice(render):
    folder = render(author="Image Classifier", project_name="image-classifier by Ada Lovelace")
    answers = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["pretuned"]["answers"]
    assert answers["author"] == "Image Classifier"
    assert answers["project_name"] == "image-classifier by Ada Lovelace"


@pytest.mark.parametrize(
    ("answers", "gone", "new"),
    [
        ({"docker": "no"}, DOCKER, set()),
        ({"slurm": "no"}, SLURM, set()),
        ({"tools": "none"}, TOOLS, set()),
        ({"ci": "none"}, GITHUB, set()),
        ({"ci": "GitLab CI"}, GITHUB, GITLAB),
        ({"licence": "Apache-2.0"}, set(), set()),
        ({"licence": "BSD-3-Clause"}, set(), set()),
        (EVERY_OPTION_OFF, DOCKER | SLURM | GITHUB | TOOLS, set()),
    ],
)
def test_a_choice_brings_exactly_its_files(answers, gone, new, render):
    assert all_files(render(**answers)) == tracked_files(PROJECT) - gone | new


@pytest.mark.parametrize(
    ("licence", "expression", "first_words"),
    [
        ("MIT", "MIT", "MIT License Copyright (c) Ada Lovelace Permission is hereby granted"),
        ("Apache-2.0", "Apache-2.0", "Apache License Version 2.0, January 2004"),
        ("BSD-3-Clause", "BSD-3-Clause", "BSD 3-Clause License Copyright (c) Ada Lovelace"),
        (
            "proprietary",
            "LicenseRef-Proprietary",
            "Copyright (c) Ada Lovelace. All rights reserved.",
        ),
    ],
)
def test_the_licence_is_named_and_given_in_full(licence, expression, first_words, render):
    folder = render(licence=licence)
    text = " ".join((folder / "LICENSE").read_text(encoding="utf-8").split())
    assert text.startswith(first_words)
    assert "AS IS" in text
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["license"] == expression
    assert project["tool"]["pretuned"]["answers"]["licence"] == licence


@pytest.mark.parametrize("licence", ["MIT", "proprietary"])
def test_the_project_builds_with_its_answers_as_metadata(licence, render):
    folder = render(**LONG_NAMES, licence=licence)
    python("-m", "hatchling", "build", "-t", "wheel", folder=folder)
    with zipfile.ZipFile(next(folder.glob("dist/*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name), policy=email.policy.default)
    assert metadata["Summary"] == LONG_NAMES["description"]
    author = email.utils.parseaddr(metadata["Author-email"])
    assert author == (LONG_NAMES["author"], LONG_NAMES["email"])


def test_the_names_follow_from_the_project_name(render):
    folder = render(project_name="Zoë's Cats & Dogs")
    assert folder.name == "zoe-s-cats-dogs"
    assert (folder / "src" / "zoe_s_cats_dogs" / "__init__.py").is_file()


def test_the_folder_holds_no_jinja_and_free_text_only_where_it_is_quoted():
    free = [word for word in DEFAULT_WORDS if word not in ("image-classifier", "image_classifier")]
    for file in tracked_files(PROJECT):
        text = (PROJECT / file).read_bytes().decode(errors="ignore")
        assert "cookiecutter" not in text, file
        # GitHub has the same braces for its own variables.
        assert not re.search(r"(?<!\$)\{\{ *\w|\{%", text), file
        if file.suffix not in (".toml", ".md") and file.name != "LICENSE":
            assert not [word for word in free if word in text], file
