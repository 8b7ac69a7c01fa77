"""A run folder is one run of trackio; the real library is tested by the template."""

import itertools
import shlex
import sys
from types import SimpleNamespace
from unittest.mock import Mock

from image_classifier.tools.trackio.tracker import open_tracker


def test_a_run_that_goes_on_is_not_taken_for_one_of_the_same_name_in_another_folder(
    tmp_path, monkeypatch
):
    numbers = itertools.count()
    opened = []

    def init(**how):
        opened.append(SimpleNamespace(id=f"run {next(numbers)}", how=how))
        return opened[-1]

    place = tmp_path / "of all runs"
    monkeypatch.setenv("TRACKIO_DIR", str(place))
    monkeypatch.setitem(sys.modules, "trackio", Mock(init=init, TRACKIO_DIR=place))
    folders = [tmp_path / recipe / "seed-0" for recipe in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
    for folder, start_step in zip((*folders, *folders), (0, 0, 2, 0), strict=True):
        note = open_tracker(folder, {}, start_step).note
    assert [run.id for run in opened] == ["run 0", "run 1", "run 0", "run 1"]
    # By the name alone, one that begins would be the latest run of that name.
    assert [run.how["resume"] for run in opened] == ["never", "never", "allow", "never"]
    command = shlex.split(note.removeprefix("to view: "))
    assert command[:3] == [f"TRACKIO_DIR={place}", "trackio", "show"]
