"""The time limit of a run: it pauses there."""

import json
import time
from pathlib import Path

from conftest import changed, losses
from test_faults import plant

from image_classifier import pace
from image_classifier.config import ComputeConfig, RunConfig
from image_classifier.errors import EXIT_RESTART
from image_classifier.runtime import launch
from image_classifier.train import train


def tick(monkeypatch, seconds, module=pace):
    """Let each step take so many seconds of the clock that the limit in `module` reads."""
    now = [0.0]
    monkeypatch.setattr(module, "seconds_since_start", lambda: now[0])

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
    with monkeypatch.context() as clock:
        tick(clock, 25)
        assert launch.attempt(lambda: train(changed(limited, run__fresh=True))) == EXIT_RESTART
    assert "; run the same command, without --run.fresh, to resume" in capfd.readouterr().err
    monkeypatch.setenv(launch.BEGAN, str(time.monotonic()))  # each start has its own minute
    train(limited)
    assert losses(config.run.dir) == losses(trained_once)


def test_a_process_that_torchrun_started_counts_its_time_from_its_start(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(launch.BEGAN, "0")  # so that it is as before at the end
    monkeypatch.delenv(launch.BEGAN)
    spent = []

    def work():
        time.sleep(0.1)  # imports, images, a compilation
        spent.append(launch.seconds_since_start())

    assert launch.run_in_processes(work, RunConfig(), ComputeConfig()) == 0
    assert spent[0] >= 0.1
