"""A run of several processes that we start: it learns what one process learns, until one fails.

The command begins with the first test of all, and has the cores that other tests leave idle.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import SMOKE

from image_classifier.cli import main
from image_classifier.runtime.distributed import open_store
from image_classifier.runtime.launch import (
    launch_once,
    meeting_place,
)

BROKEN = """
import os, sys
from image_classifier.cli import main
from image_classifier.runtime.distributed import open_store
from image_classifier.runtime.launch import (
    launch_once,
    meeting_place,
)
from image_classifier.tracking.logger import RunLogger

step = RunLogger.step

def fail_later(log, *arguments):
    if os.environ["RANK"] == "1" and log.row_step == 1:
        raise RuntimeError("the disk is on fire")
    step(log, *arguments)

RunLogger.step = fail_later
sys.exit(main(["train", *sys.argv[1:]]))
"""


class Background:
    """A command that runs beside the tests, in a folder of its own."""

    def begin(self) -> Callable[[], None]:
        """Start it; what is to be called at the end."""
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        (self.folder / "broken.py").write_text(BROKEN)
        words = ["broken.py", *SMOKE.split(), "--run.processes", "2", "--run.dir", "broken"]
        with open("/dev/full", "w") as full_disk:  # which is no reason to end
            self.process = subprocess.Popen(
                ["nice", sys.executable, *words],
                cwd=self.folder,
                stdout=full_disk,
                stderr=subprocess.PIPE,
                text=True,
            )
        return self.close

    def result(self) -> tuple[int, str]:
        """Exit code and what was complained of, when it has ended."""
        _, complaint = self.process.communicate(timeout=600)  # beside whatever else is at work
        return self.process.returncode, complaint

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.communicate()
        self.temporary.cleanup()


BACKGROUND = Background()
begin = BACKGROUND.begin  # which `conftest.py` calls before the first test


def losses(folder: Path) -> list[float]:
    """The losses that a run logged."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row.get("train/loss") or row["val/loss"] for row in rows]


def test_processes_started_by_ourselves_learn_what_one_learns_until_one_fails(
    tmp_path: Path,
) -> None:
    assert main(["train", *SMOKE.split(), "--run.dir", str(tmp_path)]) == 0
    code, complaint = BACKGROUND.result()
    assert code == 1
    assert "RuntimeError: the disk is on fire" in complaint
    assert "failed on rank 1" in complaint
    assert complaint.count("No space left on device; the run goes on") == 1
    assert complaint.count("Traceback") == 1
    found = losses(BACKGROUND.folder / "broken")
    assert found == pytest.approx(losses(tmp_path)[:1], rel=1e-4)


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
    with meeting_place() as (variables, descriptors):
        assert launch_once(2, variables, descriptors) == (0, "")
    with meeting_place() as (variables, _):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        stores = [open_store(rank, 2, 2, timedelta(seconds=9)) for rank in range(2)]
        stores[0].set("address", "here")
        assert stores[1].get("address") == b"here"
        assert not [*tmp_path.iterdir()]


def test_stores_of_jobs_that_were_killed_with_torchrun_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "0")
    old, new, other = f"store-none-{dead.pid}-29500-0", f"store-a-{dead.pid}-1-0", "store-of-mine"
    alive = f"store-none-{os.getpid()}-29500-1"
    for name in (old, new, other, alive):
        (tmp_path / name).touch()
        if name != new:
            os.utime(tmp_path / name, (0, 0))
    open_store(0, 1, 1, timedelta(seconds=9))
    assert {new, other, alive} == {path.name for path in tmp_path.iterdir()} - {
        f"store-none-{os.getppid()}-0-0"
    }
