"""Files beside a run that are damaged, or no files at all: it goes on without, or says so."""

import json
from pathlib import Path

import pytest
import torch
from conftest import changed

from image_classifier import precision as precision_module
from image_classifier.config import Config
from image_classifier.data.loader import TrainData
from image_classifier.runtime.distributed import World
from image_classifier.runtime.heartbeat import rows_of
from image_classifier.train import train

CPU = World(torch.device("cpu"))


def test_a_run_goes_on_beside_what_is_damaged(finished: Config, damaged: bytes) -> None:
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


def test_rows_of_ranks_are_those_that_are_whole(damaged: bytes, tmp_path: Path) -> None:
    row = {"rank": 1, "host": "h", "process": 9, "step": 3, "line": "l", "time": 1.0, "how": "runs"}
    path = tmp_path / "heartbeats"
    path.write_bytes(damaged + b"\n" + json.dumps(row).encode() + b"\n")
    assert rows_of(path) == [row]


def test_a_measured_precision_that_is_damaged_is_measured_again(
    damaged: bytes, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = [(3.0, 1.0)]
    monkeypatch.setattr(precision_module, "measure", lambda *_: rounds)
    config = changed(config, precision="auto", data__cache=str(tmp_path))
    data = TrainData(config, CPU)
    (tmp_path / "precision.json").write_bytes(damaged)
    said = [precision_module.settle_precision(config, data, CPU)[1] for _ in range(2)]
    assert [line.split(", ")[1] for line in said] == ["measured now", "measured before"]
