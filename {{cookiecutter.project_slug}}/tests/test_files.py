"""Files beside a run that are damaged, or no files at all: it goes on without, or says so."""

import json
from pathlib import Path

import torch
from conftest import answers_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from image_classifier.checkpoints.pretrained import read_weights
from image_classifier.train import train


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
