"""A run of several processes that we start: it learns what one process learns, until one fails.

The command begins with the first test of all, and has the cores that other tests leave idle.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import SMOKE

from image_classifier.cli import main

BROKEN = """
import os, sys
from image_classifier.cli import main
from image_classifier.report import Report

count = Report.count

def fail_later(report, loss):
    if os.environ["RANK"] == "1" and report.row_step == 1:
        raise RuntimeError("the disk is on fire")
    count(report, loss)

Report.count = fail_later
sys.exit(main(["train", *sys.argv[1:]]))
"""


class Background:
    """A command that runs beside the tests, in a folder of its own."""

    def begin(self) -> Callable[[], None]:
        """Start it; what is to be called at the end."""
        self.temporary = TemporaryDirectory()
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
