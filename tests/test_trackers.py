"""The real wandb and trackio, without a network: what was logged is on the disk, resumed too."""

import json
import os
import sqlite3
import subprocess
import sys

from conftest import PROJECT

# Two starts of a run, the second of which goes on after step 2. Nothing but this machine is called.
SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from image_classifier.presets import smoke
from image_classifier.tracking.trackers import Trackers

called, said = [], []
sys.addaudithook(
    lambda event, args: called.append(str(args[1]))
    if event in ("socket.bind", "socket.connect") and isinstance(args[1], tuple)
    else None
)
config, folder = smoke(), Path(sys.argv[1])
config = replace(config, run=replace(config.run, trackers=(sys.argv[2],)))
for start in (0, 2):
    trackers = Trackers(said.append)
    trackers.begin(config, folder, start)
    for step in (start + 1, start + 2):
        trackers.tell("log", step, {"val/top1": step / 10})
    trackers.tell("image", step, "confusion", np.zeros((4, 4, 3), np.uint8))
    trackers.tell("close", True)
print(json.dumps({"said": said, "called": called}))
"""


def track(folder, name):
    """Track a run in `folder` by a library; what it said, and whom it called."""
    folder.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO", "HF_"))}
    places = {"HOME": str(folder.parent), "PYTHONPATH": str(PROJECT / "src"), "PLANTED": "planted"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, name, "--api-key=planted"],
        env=kept | places,
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, done.stdout  # no library talks in between
    for path in folder.rglob("*"):
        assert path.is_dir() or b"planted" not in path.read_bytes(), path
    return json.loads(done.stdout)


def test_wandb_keeps_a_run_that_goes_on_under_one_id_to_be_sent_later(tmp_path):
    told = track(tmp_path / "run", "wandb")
    sync = f"wandb: kept offline; to upload: wandb sync {tmp_path}/run/wandb/offline-run-*"
    assert told["said"] == [sync, sync]
    kept = (tmp_path / "run/wandb/id").read_text()
    starts = sorted((tmp_path / "run/wandb").glob(f"offline-run-*-{kept}"))
    assert starts
    content = b"".join(path.read_bytes() for path in tmp_path.glob("run/wandb/*/*.wandb"))
    assert b"val/top1" in content
    assert list(tmp_path.glob("run/wandb/*/files/media/images/confusion*.png"))
    assert not [host for host in told["called"] if "127.0.0.1" not in host and "::1" not in host]


def test_trackio_keeps_a_run_that_goes_on_in_its_folder(tmp_path):
    told = track(tmp_path / "run", "trackio")
    assert told["said"][0].startswith(f"trackio: to view: TRACKIO_DIR={tmp_path}/run/trackio ")
    assert told["called"] == []
    with sqlite3.connect(tmp_path / "run/trackio/image_classifier.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step")
        logged = [(run, step, json.loads(text)) for run, step, text in rows]
    scores = [(run, step, row["val/top1"]) for run, step, row in logged if "val/top1" in row]
    assert scores == [("run", step, step / 10) for step in (1, 2, 3, 4)]
    assert list(tmp_path.glob("run/trackio/media/**/*.png"))
