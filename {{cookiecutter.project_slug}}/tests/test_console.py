"""Nothing that is printed ends a run or a verb's work, whatever becomes of the output."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from unittest.mock import Mock

import pytest
from conftest import SMOKE, run_alone

from image_classifier.cli import commands, main
from image_classifier.errors import EXIT_DONE, EXIT_FAULT
from image_classifier.runtime.console import Progress, clock
from image_classifier.tracking import logger

FULL = "cannot write to standard output: No space left on device\n"
CLOSED = "cannot write to standard output: Bad file descriptor"


@pytest.mark.skipif("check" not in commands(), reason="it was deleted")
def test_a_verb_whose_output_is_lost_fails_unless_its_result_is_a_file(photos, tmp_path, capsys):
    words = ["check", "--data.root", str(photos)]
    result = tmp_path / "result.json"
    for file, code in (([], EXIT_FAULT), ([f"--json={result}"], EXIT_DONE)):
        with open("/dev/full", "w") as full, redirect_stdout(full):
            assert main(words + file) == code
        assert capsys.readouterr().err == FULL
    assert result.exists()


def train_without_output(folder):
    """Train where standard output is closed: the exit code, and what has its number then."""
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT), 2)
    os.close(1)
    sys.stdout = None
    words = f"train {SMOKE} --run.dir {folder}/run --data.limit 96"
    return main(words.split()), os.readlink("/proc/self/fd/1")


def test_a_run_whose_output_is_closed_comes_to_its_end_and_no_file_takes_its_place(tmp_path):
    assert run_alone(train_without_output, tmp_path) == (0, (EXIT_DONE, os.devnull))
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "done"
    promise = "; the run goes on, metrics.jsonl has all\n"
    assert (tmp_path / "said").read_text() == CLOSED + promise


def test_python_has_nothing_to_add_at_its_end():
    code = f"from {main.__module__} import main; raise SystemExit(main([]))"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # so that something is left for the end
    for redirection, said in ((">/dev/full", FULL), ("<&- >&-", f"{CLOSED}\n")):
        words = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code]
        done = subprocess.run(words, env=buffered, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (EXIT_FAULT, "", said)


@pytest.mark.skipif("predict" not in commands(), reason="it was deleted")
def test_a_reader_that_has_seen_enough_ends_a_prediction_without_a_word(
    trained_once, photos, capsys
):
    receive, send = os.pipe()
    os.close(receive)
    words = f"predict {trained_once} {photos} --workers 0 --device cpu --batch-size 1"
    with os.fdopen(send, "w") as pipe, redirect_stdout(pipe):
        assert main(words.split()) == EXIT_FAULT
    assert capsys.readouterr().err == ""


def test_progress_is_of_what_this_start_has_done(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(
        "image_classifier.runtime.console.time.monotonic",
        lambda: now[0],
    )
    progress = Progress(1000, done=400)
    now[0] = 5.0
    progress.show(450)
    now[0] = 20.0
    progress.show(600)
    assert capsys.readouterr().out == "600 of 1,000 images, 10 images/s, ETA 0:40\n"
    progress = Progress(1000, what="pairs")
    now[0] = 40.0
    progress.show(500)
    assert capsys.readouterr().out == "500 of 1,000 pairs, 25 pairs/s, ETA 0:20\n"
    assert [clock(seconds) for seconds in (59.6, 125, 3725)] == ["1:00", "2:05", "1:02:05"]


def test_the_time_that_is_left_is_told_by_the_steps_of_this_start(monkeypatch):
    monkeypatch.setattr(logger.time, "monotonic", lambda: 20.0)
    log = Mock(began=10.0, start_step=90, total_steps=120)
    log.place.return_value = ""
    logger.RunLogger.show(log, 100, "")
    assert log.say.call_args.args[0].endswith("ETA 0:20")
