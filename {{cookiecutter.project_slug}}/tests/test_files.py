"""Files beside a run that are damaged, or no files at all: it goes on without, or says so."""

import errno
import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import answers_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from image_classifier.checkpoints.pretrained import read_weights
from image_classifier.runtime import files, run_dir
from image_classifier.runtime.distributed import World
from image_classifier.runtime.files import (
    about_tensors,
    give_name,
    open_tensors,
    tensor_file,
    write_whole,
)
from image_classifier.train import train

CPU = World(torch.device("cpu"))


def test_a_run_goes_on_beside_what_is_damaged(finished, damaged):
    folder = Path(finished.run.dir)
    rows = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(damaged + b"\n" + rows + damaged)
    for name in ("micro_batch.json", "config.json", "status.json", "heartbeats"):
        (folder / name).write_bytes(damaged)
    train(finished)
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    left = (folder / "metrics.jsonl").read_bytes()
    assert rows in left
    assert all(isinstance(json.loads(line)["step"], int) for line in left.splitlines())


def test_equal_runs_write_equal_bytes_and_older_files_are_read(finished, tmp_path):
    answers = answers_of(("ant", "bee"), torch.eye(2).long())
    for number in range(4):  # the library orders keys by chance
        answers.save(tmp_path / f"{number}", step=3)
    assert len({(tmp_path / f"{number}").read_bytes() for number in range(4)}) == 1
    new, old = Path(finished.run.dir, "checkpoints", "best.safetensors"), tmp_path / "o.safetensors"
    with safe_open(new, "pt") as file:
        assert [*file.metadata()] == ["about"]
        about = json.loads(file.metadata()["about"])
    save_file(load_file(new), old, {name: json.dumps(value) for name, value in about.items()})
    for path in (new, old):
        assert read_weights(path).classes == tuple(about["classes"])


def test_a_file_that_could_not_be_written_leaves_the_old_one_alone(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", Mock(side_effect=KeyboardInterrupt))
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_full_disk_is_an_error_of_the_system_whoever_writes(tmp_path):
    def write(_):  # as torch.save
        try:
            raise OSError(errno.ENOSPC, "full")
        finally:
            raise RuntimeError("unexpected pos")

    with pytest.raises(OSError, match=r"No space left on device: .*features"):
        write_whole(tmp_path / "features", write)
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have names in Unicode alone")
def test_tensors_are_read_from_a_file_whose_name_is_not_utf8(tmp_path):
    path = tmp_path / os.fsdecode(b"gr\xfcn.safetensors")
    path.write_bytes(tensor_file({"x": torch.arange(3)}, {"step": 7}))
    with open_tensors(path) as file:
        x = file.get_tensor("x")
        assert about_tensors(file.metadata()) == {"step": 7}
    assert x.tolist() == [0, 1, 2]
    assert read_weights(path).weights["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_second_name_replaces_a_file_at_once(tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", Mock(side_effect=OSError("no links")))
    monkeypatch.setattr(Path, "unlink", None)  # there is no moment without a file
    (tmp_path / "new").write_text("new")
    (tmp_path / "best").write_text("old")
    give_name(tmp_path / "new", tmp_path / "best")
    assert (tmp_path / "best").read_text() == (tmp_path / "new").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["best", "new"]


def test_where_files_can_not_be_locked_a_run_goes_on_with_a_warning(config, monkeypatch, capsys):
    monkeypatch.setattr(files.platform, "lock", Mock(side_effect=OSError("not supported")))
    with run_dir.open_run(config, CPU):
        pass
    assert "can't be locked: start no second run in it" in capsys.readouterr().out


@pytest.mark.parametrize("is_main", [True, False])  # of several machines, each has a folder
def test_a_run_that_starts_over_leaves_no_result_of_the_one_before(config, is_main):
    folder = Path(config.run.dir)
    folder.mkdir()
    for name in run_dir.WRITTEN:
        (folder / name).touch()
    run_dir.clear_run(folder, Mock(local_rank=0, is_main=is_main))
    assert "test.json" in run_dir.WRITTEN
    assert os.listdir(folder) == [run_dir.BAD_IMAGES]


def test_a_lock_names_its_last_holder_alone(config):
    for _ in range(2):
        with run_dir.open_run(config, CPU):
            said = Path(config.run.dir, ".lock").read_text()
        Path(config.run.dir, "kept").touch()
    assert said.count("process") == 1
