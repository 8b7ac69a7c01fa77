"""The time limit of a run: it pauses there, or is done by then."""

import json
import time
from pathlib import Path

import pytest
from conftest import changed, logged, losses, run_ranks
from test_faults import plant

from image_classifier import pace
from image_classifier.errors import EXIT_RESTART, UserError
from image_classifier.runtime import consensus, launch
from image_classifier.train import train


def tick(monkeypatch, seconds):
    """Let each step take so many seconds of the clock that the limit reads."""
    now = [0.0]
    monkeypatch.setattr(pace, "seconds_since_start", lambda: now[0])

    def advance(_, loss):
        now[0] += seconds
        return loss

    plant(monkeypatch, advance)


def test_at_the_limit_a_run_saves_says_start_me_again_and_goes_on_exactly(
    config, trained_once, monkeypatch, capfd
):
    limited = changed(config, run__max_minutes=1)
    with monkeypatch.context() as clock:
        tick(clock, 25)
        assert launch.attempt(lambda: train(limited)) == EXIT_RESTART == 75
    line = capfd.readouterr().err
    assert line.startswith("--run.max-minutes is over: saved ")
    assert "step 3 of 8; run the same command to resume" in line
    status = json.loads(Path(config.run.dir, "status.json").read_text())
    assert (status["state"], status["signal"], status["step"]) == ("interrupted", "time limit", 3)
    monkeypatch.setenv(launch.BEGAN, str(time.monotonic()))  # each start has its own minute
    train(limited)
    assert losses(config.run.dir) == losses(trained_once)


def finished_in_time(config):
    """Train for a minute of 6 s per step, on rank 1 a little more; the final step."""
    tick(pytest.MonkeyPatch(), 6)
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


@pytest.mark.parametrize("knobs", [{}, {"run__max_minutes": 1, "augment__min_size": 16}])
def test_what_cannot_finish_in_time_is_refused(config, knobs):
    with pytest.raises(UserError, match=r"--run.finish-in-time needs .*--run.max-minutes"):
        changed(config, run__finish_in_time=True, **knobs)
