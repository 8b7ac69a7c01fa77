"""What docs/faults.md promises: a few tries, the table as it was measured, and tests by name."""

import json
import random
import re
import sys
import time
from importlib import import_module

import pytest
from conftest import PROJECT, ROOT, python

ROWS = (ROOT / "faults" / "__main__.py").read_text(encoding="utf-8")
CALLS = re.findall(r'tests_of\(\s*(\w+), "(\S+?)"(?:, "-k", "(.+?)")?', ROWS)


def test_what_is_injected_loses_nothing():
    said = python("-m", "faults", "--short", folder=ROOT, PYTHONPATH=str(ROOT))
    assert "BROKEN" not in said
    assert said.count("**kept**") >= 4


def test_a_call_that_was_interrupted_goes_on_with_the_other_rows(tmp_path, monkeypatch):
    main = import_module("faults.__main__")
    tried = tmp_path / "tried"

    def inject(name):
        def note(_, tries):
            with tried.open("a") as file:
                file.write(name)
            if name == "b" and tried.read_text().count("b") < 2:
                raise KeyboardInterrupt
            return f"{tries} tries"

        return main.Row(name, "", note, 3, 1)

    monkeypatch.setattr(main, "ROWS", [inject(name) for name in "abc"])
    monkeypatch.setattr(main, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(main, "train_whole", lambda _: None)
    monkeypatch.setattr(main.measurements, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [main.__file__])
    with pytest.raises(KeyboardInterrupt):
        main.main()
    assert not (tmp_path / "faults.json").exists()
    assert main.main() == 0
    assert tried.read_text() == "abbc"
    found = json.loads((tmp_path / "faults.json").read_text())["faults"]
    assert [(row["fault"], row["seen"]) for row in found] == [(name, "3 tries") for name in "abc"]


def test_runs_are_killed_though_they_take_far_less_time_than_the_first_one(tmp_path):
    kills, children = (import_module(f"faults.{name}") for name in ("kills", "children"))
    folder = tmp_path / "run"
    starts = []  # of each run: whether it is a whole one, and when it began

    def begin():
        starts.append((not folder.exists(), time.monotonic()))
        folder.mkdir(exist_ok=True)
        return children.fork(time.sleep, 0.4 if starts[-1][0] else 0.01)

    ends = []
    seconds = []  # that whole runs lived until they were killed
    for is_done in kills.killed_at_random(begin, folder, 8, 1000, random.Random(0)):
        is_whole, began = starts[-1]
        ends.append(is_done)
        if is_whole and not is_done:
            seconds.append(time.monotonic() - began)
    assert ends.count(False) == 8
    assert ends[-1]
    assert not folder.exists()
    assert max(seconds) > 0.15  # rests of runs, which end at once, are no measure


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
