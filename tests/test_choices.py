"""What an answer changes: exactly the words and the files it is about."""

import email.message
import email.policy
import email.utils
import zipfile
from pathlib import Path

import pytest
from conftest import LONG_NAMES, OFF, PROJECT, all_files, pyproject, python, tracked_files
from markdown_it import MarkdownIt

DEFAULT_WORDS = (
    *("Image Classifier", "image-classifier", "image_classifier", "Ada Lovelace"),
    *("ada@example.com", "Train an image classifier on your own pictures", "cookiecutter"),
)
TOOLS = {str(file) for file in tracked_files(PROJECT) if "tools" in file.parts} | {"docs/tips.md"}
GITHUB, GITLAB = ".github/workflows/ci.yml", ".gitlab-ci.yml"


@pytest.mark.parametrize(
    ("licence", "expression", "first_words"),
    [
        ("MIT", "MIT", "MIT License Copyright (c) {author} Permission is hereby granted"),
        ("Apache-2.0", "Apache-2.0", "Apache License Version 2.0, January 2004"),
        ("BSD-3-Clause", "BSD-3-Clause", "BSD 3-Clause License Copyright (c) {author}"),
        ("proprietary", "LicenseRef-Proprietary", "Copyright (c) {author}. All rights reserved."),
    ],
)
def test_every_answer_is_where_it_belongs_and_no_default_is_left(
    licence, expression, first_words, render
):
    folder = render(**LONG_NAMES, licence=licence)
    for file in all_files(folder):
        text = (folder / file).read_bytes().decode(errors="ignore") + str(file)
        assert not [word for word in DEFAULT_WORDS if word in text], file
    choices = {"docker": True, "slurm": True, "ci": "GitHub Actions", "tools": "all"}
    answers = LONG_NAMES | choices | {"licence": licence}
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
        ({"tools": "none"}, TOOLS, set()),
        ({"ci": "none"}, {GITHUB}, set()),
        ({"ci": "GitLab CI"}, {GITHUB}, {GITLAB}),
        ({"licence": "Apache-2.0"}, set(), set()),
        (OFF, {"Dockerfile", ".dockerignore", "slurm.sh", GITHUB} | TOOLS, set()),
    ],
)
def test_a_choice_brings_exactly_its_files(answers, gone, new, render):
    files = {str(file) for file in tracked_files(PROJECT)}
    assert {str(file) for file in all_files(render(**answers))} == files - gone | new


def test_the_names_follow_from_the_project_name(render):
    folder = render(project_name="Zoë's Cats & Dogs")
    assert folder.name == "zoe-s-cats-dogs"
    assert Path(folder, "src/zoe_s_cats_dogs/__init__.py").is_file()
