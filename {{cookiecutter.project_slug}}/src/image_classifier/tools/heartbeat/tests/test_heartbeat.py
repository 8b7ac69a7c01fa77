"""A rank that is gone is named by those that are left."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import after_each_step, run_ranks

from image_classifier.errors import FaultError
from image_classifier.tools.heartbeat import watcher
from image_classifier.train import train


def left_alone(config):
    """Train, and be killed if this is rank 1."""
    watcher.BEAT_SECONDS = 0.1

    def die(log, _):
        if log.world.rank == 1 and log.step_done == 3:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    after_each_step(pytest.MonkeyPatch(), die)
    with suppress(FaultError):
        train(config)


def test_a_rank_that_was_killed_is_named_with_its_place(config):
    with pytest.raises(EOFError):
        run_ranks(2, left_alone, config)
    found = json.loads(Path(config.run.dir, "status.json").read_text())
    assert found["state"] == "failed"
    for part in ("no answer from rank 1 on ", "which has ended", "at test_heartbeat.py:"):
        assert part in found["message"]


def test_rows_of_ranks_are_those_that_are_whole(damaged, tmp_path):
    row = {"rank": 1, "host": "h", "process": 9, "step": 3, "line": "l", "time": 1.0, "how": "runs"}
    path = tmp_path / "heartbeats"
    path.write_bytes(damaged + b"\n" + json.dumps(row).encode() + b"\n")
    assert watcher.rows_of(path) == [row]
