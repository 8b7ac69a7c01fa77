"""Weights & Biases is sent nothing of the machine; the real library is tested by the template."""

import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from image_classifier.tools.wandb.tracker import open_tracker
from image_classifier.tracking import PROJECT


def test_the_command_that_uploads_can_be_pasted(tmp_path, monkeypatch):
    folder = tmp_path / "it's mine"
    folder.mkdir()
    library = Mock(**{"login.return_value": False, "init.return_value": Mock(offline=True)})
    monkeypatch.setitem(sys.modules, "wandb", library)
    command = open_tracker(folder, {}, 0).note.rpartition(": ")[2]
    assert shlex.split(command) == ["wandb", "sync", f"{folder}/wandb/offline-run-*"]


@pytest.mark.parametrize(
    ("has_key", "mode", "is_offline"), [(False, "", True), (True, "", False), (False, "on", False)]
)
def test_wandb_is_offline_without_a_key_and_is_sent_nothing_of_the_machine(
    tmp_path, monkeypatch, has_key, mode, is_offline
):
    run = Mock(offline=is_offline, url="https://example.com/run")
    library = Mock(Settings=dict, **{"login.return_value": has_key, "init.return_value": run})
    note = "kept offline; to upload: " if is_offline else run.url
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setitem(sys.modules, "wandb", library)
    tracker = open_tracker(tmp_path, {"optim.lr": 0.1}, 0)
    assert tracker.note.startswith(note)
    if not mode:
        library.login.assert_called_with(prompt=False, verify=False)
    options = library.init.call_args.kwargs
    assert options["mode"] == ("offline" if is_offline else None)
    disabled = ("disable_code", "disable_git", "x_disable_meta", "x_disable_machine_info")
    private = dict.fromkeys([*disabled, "x_disable_stats"], True)
    private |= {"console": "off", "x_save_requirements": False}
    assert options["settings"].items() >= private.items()
    assert options["config"] == {"optim.lr": 0.1}
    tracker.log(7, {"val/top1": 0.5})
    run.log.assert_called_once_with({"val/top1": 0.5}, step=7)
    for is_done in (True, False):
        tracker.close(is_done)
    assert [call.kwargs for call in run.finish.call_args_list] == [{"exit_code": n} for n in (0, 1)]


def test_a_folder_is_one_run_by_its_name_in_the_project_that_is_asked_for(tmp_path, monkeypatch):
    library = Mock(**{"login.return_value": False, "init.return_value": Mock(offline=True)})
    monkeypatch.setitem(sys.modules, "wandb", library)
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    for project in ("", "birds"):
        monkeypatch.setenv("WANDB_PROJECT", project)
        open_tracker(Path(), {}, 0)
    first, second = (call.kwargs for call in library.init.call_args_list)
    assert (first["project"], second["project"]) == (PROJECT, "birds")
    assert first["id"] == second["id"] == Path("wandb/id").read_text()
    assert {(how["name"], how["resume"], how["dir"]) for how in (first, second)} == {
        ("a", "allow", ".")
    }


def test_a_disk_that_is_full_leaves_no_empty_name_of_the_run(tmp_path, monkeypatch):
    library = Mock(**{"login.return_value": False, "init.return_value": Mock(offline=True)})
    monkeypatch.setitem(sys.modules, "wandb", library)
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            open_tracker(tmp_path, {}, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    open_tracker(tmp_path, {}, 0)
    assert len(library.init.call_args.kwargs["id"]) == 8
