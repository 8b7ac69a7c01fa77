"""Files beside a run that are damaged, or no files at all: it goes on without, or says so."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import changed
from test_compare import write_run

from image_classifier import groups, precision_probe, workers
from image_classifier.cli import main
from image_classifier.config import Config, DataConfig, UserError
from image_classifier.datasets.paths import PathList
from image_classifier.datasets.prepared import read_manifest
from image_classifier.datasets.shapes import shapes
from image_classifier.distributed import World
from image_classifier.heartbeat import ranks_in
from image_classifier.journal import open_journal
from image_classifier.loader import TrainData
from image_classifier.rows import Csv
from image_classifier.samples import Samples
from image_classifier.train import train

CPU = World(torch.device("cpu"))
DAMAGED = {
    "nothing": b"",
    "object": b"{}",
    "number": b"5",
    "list": b"[]",
    "text": b'"x"',
    "bytes": b"\xff\xfe{",
    "half": b'{"step": 1, "epo',
    "deep": b"[" * 100_000,
    "others": b'{"step": "1", "micro_batch": "2", "state": [], "seed": [], "val/top1": {}}',
    "endless": b'{"step": 1, "micro_batch": -1, "epoch": NaN, "train/loss": 1' + b"0" * 400 + b"}",
}


@pytest.fixture(params=DAMAGED)
def damaged(request: pytest.FixtureRequest) -> bytes:
    """What is in a file in place of what was written."""
    return DAMAGED[request.param]


def test_a_run_goes_on_beside_what_is_damaged(finished: Config, damaged: bytes) -> None:
    folder = Path(finished.run.dir)
    rows = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(damaged + b"\n" + rows + damaged)
    for name in ("nonfinite.jsonl", "micro_batch.json", "config.json", "status.json", "heartbeats"):
        (folder / name).write_bytes(damaged)
    train(changed(finished, run__on_nonfinite="skip"))
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    left = (folder / "metrics.jsonl").read_bytes()
    assert rows in left
    assert all(isinstance(json.loads(line)["step"], int) for line in left.splitlines())


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "status.json"])
def test_runs_are_compared_by_what_is_sound_or_refused_in_a_line(
    name: str, damaged: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write_run(tmp_path / "a", 900), write_run(tmp_path / "b", 910, lr=0.3)
    rows = Path(b, name).read_bytes() if name == "metrics.jsonl" else b""
    Path(b, name).write_bytes(damaged + b"\n" + rows)
    code = main(["compare", a, b])
    said = capsys.readouterr()
    assert code == (2 if name == "config.json" else 0)
    assert said.err.count("\n") == (code == 2)
    Path(b, name).write_bytes(damaged)
    assert main(["compare", a, b]) in (0, 2)


def test_rows_of_ranks_are_those_that_are_whole(damaged: bytes, tmp_path: Path) -> None:
    row = {"rank": 1, "host": "h", "process": 9, "step": 3, "line": "l", "time": 1.0, "how": "runs"}
    path = tmp_path / "heartbeats"
    path.write_bytes(damaged + b"\n" + json.dumps(row).encode() + b"\n")
    assert ranks_in(path) == {1: row}


def test_what_was_measured_and_is_damaged_is_measured_again(
    damaged: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    monkeypatch.setattr(workers, "WORTH_SECONDS", 0)
    monkeypatch.setattr(workers, "rate", lambda _, count: measured.append(count) or 100)
    data = DataConfig(cache=str(tmp_path), limit=8)
    samples = Samples(shapes(data, "train"), data)
    for content in (
        damaged,
        b'{"%s": %s}' % (workers.machine_key(data, samples, CPU).encode(), damaged),
    ):
        measured.clear()
        (tmp_path / "workers.json").write_bytes(content)
        assert workers.choose_workers(data, samples, CPU)[0] == 1
        assert measured
        assert workers.choose_workers(data, samples, CPU)[0] == 1
        assert len(measured) == len(set(measured))


def test_a_measured_precision_that_is_damaged_is_measured_again(
    damaged: bytes, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = {"fp32": [3.0], "bf16": [1.0]}
    monkeypatch.setattr(precision_probe, "measure", lambda *_: rounds)
    config = changed(config, precision="auto", data__cache=str(tmp_path))
    data = TrainData(config, CPU)
    for content in (
        damaged,
        json.dumps({precision_probe.machine_key(config): None}).encode().replace(b"null", damaged),
    ):
        (tmp_path / "precision.json").write_bytes(content)
        said = [precision_probe.settle_precision(config, data, CPU)[1] for _ in range(2)]
        assert [line.split(", ")[1] for line in said] == ["measured now", "measured before"]


def test_a_manifest_that_is_damaged_is_named(damaged: bytes, tmp_path: Path) -> None:
    sound = {"version": 1, "recipe": {"format": "raw", "side": 8, "quality": 85}, "index": "00"}
    sound["shards"] = [{"bytes": 1, "blake2b": "00"}]
    (tmp_path / "manifest.json").write_text(json.dumps(sound))
    assert read_manifest(tmp_path) == sound
    for name in ("recipe", "index", "shards"):
        (tmp_path / "manifest.json").write_text(json.dumps(sound | {name: [5]}))
        with pytest.raises(UserError, match=r"manifest\.json' are damaged"):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(damaged)
    with suppress(UserError):  # and nothing else
        assert read_manifest(tmp_path) is None


def test_rows_that_nothing_tells_of_are_not_gone_on_with(damaged: bytes, tmp_path: Path) -> None:
    out, rows = tmp_path / "x.csv", Csv(("ant", "bee"), 1)
    (tmp_path / "x.csv.partial").write_text(rows.header + "a.jpg,ant,1,ant,1,\n")
    (tmp_path / "x.csv.partial.json").write_bytes(damaged)
    files = PathList(Path(), [b"a.jpg", b"b.jpg"])
    identity = {"weights": "00", "--batch-size": 1}
    with (
        pytest.raises(UserError, match="cannot go on with"),
        open_journal(out, rows, files, identity, fresh=False),
    ):
        pass


def test_answers_of_another_evaluation_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write_run(tmp_path / "a", 900), write_run(tmp_path / "b", 910, lr=0.3)
    row = {"step": 150, "epoch": 3.0, "val/top1": 0.95, "val/top5": 1.0, "val/loss": 0.3}
    with Path(b, "metrics.jsonl").open("a") as file:  # as after an early end with more patience
        file.write(json.dumps(row) + "\n")
    assert main(["compare", a, b]) == 2
    assert "b' has no predictions.safetensors of its last evaluation" in capsys.readouterr().err


def test_a_run_that_is_begun_anew_while_it_is_read_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write_run(tmp_path / "a", 900), write_run(tmp_path / "b", 910, lr=0.3)
    write_run(tmp_path / "new", 950, lr=0.1)

    def read_rows(path: Path) -> list[dict]:
        if path.parent.name == "b":
            for name in ("config.json", "metrics.jsonl", "predictions.safetensors"):
                (tmp_path / "new" / name).replace(tmp_path / "b" / name)
        return groups_rows(path)

    groups_rows = groups.read_rows
    monkeypatch.setattr(groups, "read_rows", read_rows)
    assert main(["compare", a, b]) == 2
    assert "b' was begun anew while it was read: compare once more" in capsys.readouterr().err
