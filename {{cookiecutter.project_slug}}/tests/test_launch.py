"""Ranks that we start: until one fails, and once more after a loss."""

import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest

from image_classifier.runtime import launch
from image_classifier.runtime.distributed import open_store
from image_classifier.runtime.signals import Signals, StoppedError


def test_a_rank_that_lost_another_and_is_told_to_end_leaves_the_report_to_that() -> None:
    with pytest.raises(StoppedError, match=r"^$") as error, Signals():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] closed")
    assert error.value.code == 128 + signal.SIGTERM


RANK = """
import os, signal, sys, time

is_first, is_main = os.environ["RUN_RESTARTS"] == "0", os.environ["RANK"] == "0"

def ignore(*numbers):
    return [signal.signal(number, signal.SIG_IGN) for number in numbers]

def ctrl_c():
    time.sleep(0.2)  # two at once would be one
    os.kill(os.getppid(), signal.SIGINT)
    return True

"""


@pytest.mark.parametrize(
    ("rank", "code", "causes"),
    [
        ("sys.exit(75 * is_first)", 0, []),  # as often as it asks for it
        ("is_first and os.kill(os.getpid(), 9)", 0, ["ended by SIGKILL (out of memory?)"]),
        ("os.kill(os.getpid(), 9)", 128 + 9, ["ended by SIGKILL (out of memory?)"] * 3),
        ("sys.exit(74)", 74, ["a rank was lost"] * 3),
        ("sys.exit(2)", 2, []),
        # A signal to the launcher while its ranks start; a second Ctrl-C where one hangs.
        ("is_main and os.kill(os.getppid(), 15); time.sleep(60)", 128 + 15, []),
        ("is_main and ignore(2, 15) and ctrl_c() and ctrl_c() and time.sleep(60)", 128 + 2, []),
    ],
)
def test_a_rank_that_was_lost_is_started_again(
    rank: str,
    code: int,
    causes: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-S", "-c", RANK + rank])
    for name, value in {"RUN_RESTARTS": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)  # what `launch` sets is put back
    assert launch.launch(2) == code
    said = capfd.readouterr().err.splitlines()
    assert len(said) == len(causes)
    for number, (line, cause) in enumerate(zip(said, causes, strict=True), start=1):
        assert line.endswith(f"{cause}: restart {number} of 3, from the last save")


MEET = """
import os, time

path = "/proc/self/fd/" + os.environ["RUN_STORE"]
with open(path, "ab") as file:
    file.write(os.environ["RANK"].encode())
while os.path.getsize(path) < 2:
    time.sleep(0.001)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="files without names are Linux's")
def test_ranks_meet_in_a_file_that_is_gone_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-S", "-c", MEET])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with launch.meeting_place() as (variables, descriptors):
        assert launch.launch_once(2, variables, descriptors) == (0, "")
    with launch.meeting_place() as (variables, _):
        monkeypatch.setenv(*variables.popitem())
        stores = [open_store(rank, 2, 2, timedelta(seconds=9)) for rank in range(2)]
        stores[0].set("address", "here")
        assert stores[1].get("address") == b"here"
        assert not [*tmp_path.iterdir()]
