"""What docs/faults.md promises: a few tries, the table as it was measured, and tests by name."""

import re

import pytest
from conftest import PROJECT, ROOT, python

ROWS = (ROOT / "faults" / "__main__.py").read_text(encoding="utf-8")
CALLS = re.findall(r'tests_of\(\s*(\w+), "(\S+?)"(?:, "-k", "(.+?)")?', ROWS)


def test_what_is_injected_loses_nothing():
    said = python("-m", "faults", "--short", folder=ROOT, PYTHONPATH=str(ROOT))
    assert "BROKEN" not in said
    assert said.count("**kept**") >= 4


def test_every_promise_of_the_table_was_kept():
    table = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) > 20
    assert "BROKEN" not in table
    assert "not run here |" not in table


@pytest.mark.parametrize(("folder", "path", "words"), CALLS)
def test_a_row_that_is_held_by_tests_finds_them(folder, path, words):
    assert len(CALLS) == ROWS.count("tests_of(")
    text = ({"PROJECT": PROJECT, "ROOT": ROOT}[folder] / path).read_text(encoding="utf-8")
    tests = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    assert tests
    for part in words.split(" or "):
        assert [test for test in tests if part in test], part
