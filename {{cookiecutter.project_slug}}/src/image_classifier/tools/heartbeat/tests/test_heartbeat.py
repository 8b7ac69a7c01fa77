"""A rank that is gone is named by those that are left."""

import json
import re
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
            signal.raise_signal(signal.SIGKILL)

    after_each_step(pytest.MonkeyPatch(), die)
    with suppress(FaultError):
        train(config)


def test_a_rank_that_was_killed_is_named_with_its_place(config):
    with pytest.raises(EOFError):
        run_ranks(2, left_alone, config)
    found = json.loads(Path(config.run.dir, "status.json").read_text())
    assert found["state"] == "failed"
    account = r"no answer from rank 1 on .*which has ended.* at test_heartbeat.py:"
    assert re.search(account, found["message"])


def test_rows_of_ranks_are_those_that_are_whole(damaged, tmp_path):
    row = dict.fromkeys(("rank", "host", "process", "step", "line", "time", "how"), 1)
    path = tmp_path / "heartbeats"
    path.write_bytes(damaged + b"\n" + json.dumps(row).encode() + b"\n")
    assert watcher.rows_of(path) == [row]
