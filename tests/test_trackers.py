"""The real libraries of trackers, without a network: the disk has what was logged, resumed too."""

import json
import os
import sqlite3
from contextlib import closing

import pytest
from conftest import PROJECT, python

# Two starts of a run, the second of which goes on after step 2. Nothing but this machine is called.
SCRIPT = """
import json, sys
from pathlib import Path

import torch
from image_classifier.config import Config, RunConfig
from image_classifier.data import Source
from image_classifier.metrics import Predictions
from image_classifier.tracking.trackers import Trackers

called, said = [], []
def listen(event, args):
    if event in ("socket.bind", "socket.connect") and isinstance(args[1], tuple):
        called.append(str(args[1]))

sys.addaudithook(listen)
labels = torch.arange(2)
source = Source(labels, ("ant", "bee"), torch.zeros(2, 4, 4, 3, dtype=torch.uint8))
found = Predictions(source, labels, torch.ones(2), torch.ones(2))
config = Config(run=RunConfig(trackers=(sys.argv[2],)))
for start in (0, 2):
    trackers = Trackers(said.append)
    trackers.begin(config, Path(sys.argv[1]), start)
    for step in (start + 1, start + 2):
        trackers.tell("log", step, {"val/top1": step / 10})
    trackers.tell("finish", step, found)
    trackers.tell("close", True)
print(json.dumps([said, called]))
"""


@pytest.fixture
def track(tmp_path, monkeypatch):
    """A function that tracks a run in `run` by a library: what it said, and whom it called."""
    for name in os.environ:
        if name.startswith(("WANDB", "TRACKIO", "HF_", "MLFLOW")):
            monkeypatch.delenv(name)
    places = {"HOME": tmp_path, "PYTHONPATH": PROJECT / "src", "PLANTED": "planted"}

    def track_by(name):
        folder = tmp_path / "run"
        folder.mkdir()
        words = ("-c", SCRIPT, folder, name, "--api-key=planted")
        told = json.loads(python(*words, folder=tmp_path, **places))  # no library talks in between
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not [path for path in files if b"planted" in path.read_bytes()]
        return folder, *told

    return track_by


def test_wandb_keeps_a_run_that_goes_on_under_one_id_to_be_sent_later(track):
    folder, said, called = track("wandb")
    sync = f"wandb: kept offline; to upload: wandb sync {folder}/wandb/offline-run-*"
    assert said == [sync, sync]
    assert list(folder.glob(f"wandb/offline-run-*-{(folder / 'wandb/id').read_text()}"))
    assert b"val/top1" in b"".join(path.read_bytes() for path in folder.glob("wandb/*/*.wandb"))
    assert list(folder.glob("wandb/*/files/media/images/confusion*.png"))
    assert not [host for host in called if "127.0.0.1" not in host and "::1" not in host]


def test_trackio_keeps_a_run_that_goes_on_in_its_folder(track):
    folder, said, called = track("trackio")
    assert said[0].startswith(f"trackio: to view: TRACKIO_DIR={folder}/trackio ")
    assert called == []
    with closing(sqlite3.connect(folder / "trackio/image_classifier.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step")
        logged = [(run, step, json.loads(text)) for run, step, text in rows]
    scores = [(run, step, row["val/top1"]) for run, step, row in logged if "val/top1" in row]
    assert scores == [("run", step, step / 10) for step in (1, 2, 3, 4)]
    assert list(folder.glob("trackio/media/**/*.png"))


def test_mlflow_keeps_a_run_that_goes_on_in_a_database_beside_its_folder(track):
    folder, said, called = track("mlflow")
    store = folder.parent / "mlflow.db"
    view = f"mlflow: to view: mlflow ui --backend-store-uri sqlite:///{store}"
    assert said == [view, view]
    assert {*called} <= {"('::1', 0)"}  # urllib3 tries whether there is IPv6
    assert b"planted" not in store.read_bytes()
    with closing(sqlite3.connect(store)) as database:
        runs = database.execute("SELECT run_uuid, name, status, user_id FROM runs").fetchall()
        rows = "SELECT step, value FROM metrics WHERE key = 'val/top1' ORDER BY step"
        scores = database.execute(rows).fetchall()
        options = dict(database.execute("SELECT key, value FROM params"))
    assert runs == [((folder / "mlflow.id").read_text(), "run", "FINISHED", "unknown")]
    assert scores == [(step, step / 10) for step in (1, 2, 3, 4)]
    assert options["optim.lr"] == "0.5"
    assert not [name for name in options if name.startswith(("run.", "data.root"))]
    assert list(folder.parent.glob("mlartifacts/*/artifacts/confusion.png"))
