"""A run of several processes, by torchrun and by ourselves: it learns what one process learns.

Their commands begin with the first test of all, and have the cores that other tests leave idle.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import SMOKE

from image_classifier.cli import main

PROJECT = Path(__file__).parent.parent
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
TORCHRUN = f"-m torch.distributed.run --nproc-per-node 2 '{PROJECT / 'train.py'}' {SMOKE}"
COMMANDS = {
    "torchrun": f"{TORCHRUN} --run.dir torchrun",
    "broken": f"broken.py {SMOKE} --run.processes 2 --run.dir broken",
}


class Background:
    """Commands that run beside the tests, in a folder of their own."""

    def begin(self) -> Callable[[], None]:
        """Start them; what is to be called at the end."""
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        (self.folder / "broken.py").write_text(BROKEN)
        self.processes = {
            name: subprocess.Popen(
                ["nice", sys.executable, *shlex.split(words)],
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, words in COMMANDS.items()
        }
        self.ended: dict[str, tuple[int, str, str]] = {}
        return self.close

    def result(self, name: str) -> tuple[int, str, str]:
        """Exit code and what was printed, on both streams, when a command has ended."""
        if name not in self.ended:
            said, complaint = self.processes[name].communicate(timeout=120)
            self.ended[name] = self.processes[name].returncode, said, complaint
        return self.ended[name]

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self.temporary.cleanup()


BACKGROUND = Background()
begin = BACKGROUND.begin  # which `conftest.py` calls before the first test


def losses(folder: Path) -> list[float]:
    """The losses that a run logged."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row.get("train/loss") or row["val/loss"] for row in rows]


def test_processes_started_by_torchrun_learn_what_one_learns(
    tmp_path: Path,
) -> None:
    assert main(["train", *SMOKE.split(), "--run.dir", str(tmp_path)]) == 0
    code, said, complaint = BACKGROUND.result("torchrun")
    assert code == 0, complaint
    assert said.count("top-1") == 2  # other ranks are quiet
    folder = BACKGROUND.folder / "torchrun"
    assert losses(folder) == pytest.approx(losses(tmp_path), rel=1e-4)
    assert json.loads((folder / "status.json").read_text())["state"] == "done"


def test_processes_started_by_ourselves_do_the_same_until_one_fails() -> None:
    code, _, complaint = BACKGROUND.result("broken")
    assert code == 1
    assert "RuntimeError: the disk is on fire" in complaint
    assert "failed on rank 1" in complaint
    assert complaint.count("Traceback") == 1
    BACKGROUND.result("torchrun")
    assert losses(BACKGROUND.folder / "broken") == losses(BACKGROUND.folder / "torchrun")[:1]
