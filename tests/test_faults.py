"""What docs/faults.md promises: a few tries, the table as it was measured, and tests by name."""

import ast
import re

import pytest
from conftest import PROJECT, ROOT, python

FOLDERS = {"PROJECT": PROJECT, "ROOT": ROOT}
CALLS = [
    node
    for node in ast.walk(ast.parse((ROOT / "faults" / "__main__.py").read_text(encoding="utf-8")))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tests_of"
]


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


@pytest.mark.parametrize("call", CALLS, ids=ast.unparse)
def test_a_row_that_is_held_by_tests_finds_them(call):
    folder, path, *options = call.args
    text = (FOLDERS[ast.unparse(folder)] / ast.literal_eval(path)).read_text(encoding="utf-8")
    tests = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    assert tests
    for part in ast.literal_eval(options[1]).split(" or ") if options else ():  # behind -k
        assert [test for test in tests if part in test], part
