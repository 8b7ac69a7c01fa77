"""A run is done by its time limit, on all ranks after the same step."""

import json
from pathlib import Path

import pytest
from conftest import changed, logged, run_ranks
from test_time_limit import tick

from image_classifier.errors import UserError
from image_classifier.runtime import consensus
from image_classifier.runtime.launch import RESTART_COUNTS
from image_classifier.tools.finish_in_time import limit
from image_classifier.train import train


def finished_in_time(config):
    """Train for a minute of 6 s per step, on rank 1 a little more; the final step."""
    tick(pytest.MonkeyPatch(), 6, limit)
    consensus.EXCHANGE_SECONDS = 0
    train(config)
    return logged(config.run.dir)[-1]["step"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_finishes_in_time_decays_its_learning_rate_by_the_clock(ranks, config):
    hurried = changed(config, epochs=100, run__max_minutes=1, run__finish_in_time=True)
    steps = run_ranks(ranks, finished_in_time, changed(hurried, run__log_every_steps=1))
    assert len(set(steps)) == 1
    assert 10 <= steps[0] <= 13  # of 400
    rates = [row["train/lr"] for row in logged(config.run.dir) if "train/lr" in row]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.1 * max(rates)
    status = json.loads(Path(config.run.dir, "status.json").read_text())
    assert status["state"] == "done"
    # Its time is over: the same command evaluates it once more, and no other.
    train(hurried)
    assert logged(config.run.dir)[-1]["step"] == steps[0]


def test_a_restart_of_the_same_command_counts_no_time_twice(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(limit, "seconds_since_start", lambda: now[0])
    assert limit.Deadline(600, 90).seconds == 190  # another command
    monkeypatch.setenv("RUN_RESTARTS", "1")
    restarted = limit.Deadline(600, 90)
    assert restarted.place(0, 600) == 90  # where it was saved, on ranks of all clocks
    now[0] = 130.0
    assert restarted.seconds == 130


def test_what_cannot_finish_in_time_is_refused(config):
    with pytest.raises(UserError, match=r"--run.finish-in-time needs .*--run.max-minutes"):
        changed(config, run__finish_in_time=True)


def test_images_that_grow_cannot_finish_in_time(config):
    tool = "progressive_resizing"
    pytest.importorskip(f"image_classifier.tools.{tool}")
    growing = changed(config, run__max_minutes=1, augment__min_size=16)
    with pytest.raises(UserError, match=r"--run.finish-in-time needs .*--augment.min-size 0"):
        changed(growing, run__finish_in_time=True)


def test_the_time_of_all_starts_and_of_the_last_evaluation_counts(monkeypatch):
    monkeypatch.delenv(RESTART_COUNTS[0], raising=False)
    monkeypatch.setattr(limit, "seconds_since_start", lambda: 10.0)
    deadline = limit.Deadline(100.0, seconds_before=60.0)
    assert deadline.read() == (0, 700_000)
    deadline.evaluation_seconds = 20.0
    assert deadline.read() == (0, 875_000)


def test_a_run_that_is_done_stays_so_though_its_last_evaluation_was_short(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(limit, "seconds_since_start", lambda: now[0])
    deadline = limit.Deadline(100.0, seconds_before=0.0)
    deadline.evaluation_seconds = 20.0  # with the images that it loaded
    now[0] = 80.0
    deadline.agree(deadline.read()[1])
    assert deadline.message
    now[0] = 81.0
    assert limit.Deadline(100.0, deadline.seconds).message
    assert not limit.Deadline(200.0, deadline.seconds).message


def test_a_schedule_never_goes_back_behind_its_steps():
    deadline = limit.Deadline(100.0, seconds_before=30.0)
    assert [deadline.place(step, 100) for step in (10, 50)] == [30, 50]
    deadline.agree(200_000)  # by a clock that is behind
    assert deadline.place(10, 100) == 30
