"""The documents name files, tests, options and presets that are there."""

import re

import pytest
from conftest import PROJECT, ROOT
from image_classifier.config import Config
from image_classifier.runtime.command_line import all_presets, flags_of

PACKAGE = PROJECT / "src" / "image_classifier"
FOLDERS = "benchmarks|data|docs|extensions|metrics|models|runtime"
FOLDERS += "|src|tests|tools|tracking"  # that paths begin with
GENERATED = {"measured.md", "faults.md"}
PAGES = [
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED),
    *sorted((PROJECT / "docs").glob("*.md")),
    *(folder / name for folder in (ROOT, PROJECT) for name in ("README.md", "AGENTS.md")),
    *sorted(PACKAGE.rglob("README.md")),
]
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PAGES if path.exists()}


def found(path):
    """The files or folders that a page calls by this path."""
    places = (ROOT, PROJECT, PACKAGE, PACKAGE / "tools")
    return [place / path for place in places if (place / path).exists()]


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_tests_that_a_page_names_are_there(page):
    named = re.findall(rf"`((?:\.\./)?(?:{FOLDERS})/[\w/.]*\w/?)(?:::\w[\w.]*)?`", TEXTS[page])
    assert [path for path in named if not found(path.removeprefix("../"))] == []
    for path, test in re.findall(r"`(?:\.\./)?([\w/]+/test_\w+\.py)::(\w+)`", TEXTS[page]):
        assert any(f"def {test}(" in file.read_text("utf-8") for file in found(path)), test


@pytest.mark.parametrize("page", TEXTS)
def test_options_and_presets_that_a_page_names_are_there(page):
    sections = "data|augment|model|optim|compute|run"
    options = re.findall(rf"--((?:{sections})\.[a-z]+[\w-]*)", TEXTS[page])
    assert {*options} - {*flags_of(Config)} == set()
    presets = re.findall(r"\bpython train\.py +([a-z]\w+)", TEXTS[page])
    assert {*presets} - {*all_presets()} <= {"flowers"}  # of timm's train.py
