"""A run of several processes that we start: it learns what one process learns, until one fails.

The command begins with the first test of all, and has the cores that other tests leave idle.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SMOKE, losses

from image_classifier.cli import main
from image_classifier.runtime import launch

BROKEN = """
import os, sys
from image_classifier.cli import main
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

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.communicate()
        self.temporary.cleanup()


BACKGROUND = Background()
begin = BACKGROUND.begin  # which `conftest.py` calls before the first test


def test_processes_started_by_ourselves_learn_what_one_learns_until_one_fails(
    tmp_path: Path,
) -> None:
    assert main(["train", *SMOKE.split(), "--run.dir", str(tmp_path)]) == 0
    _, complaint = BACKGROUND.process.communicate(timeout=600)  # beside whatever else is at work
    assert BACKGROUND.process.returncode == 1
    assert "RuntimeError: the disk is on fire" in complaint
    assert "failed on rank 1" in complaint
    assert complaint.count("No space left on device; the run goes on") == 1
    assert complaint.count("Traceback") == 1
    found = losses(BACKGROUND.folder / "broken")
    assert found == pytest.approx(losses(tmp_path)[:1], rel=1e-4)


@pytest.mark.parametrize(
    ("rank", "code", "causes"),
    [
        ("sys.exit(75 * is_first)", 0, []),  # as often as it asks for it
        ("is_first and os.kill(os.getpid(), 9)", 0, ["ended by SIGKILL (out of memory?)"]),
        ("os.kill(os.getpid(), 9)", 128 + 9, ["ended by SIGKILL (out of memory?)"] * 3),
        ("sys.exit(74)", 74, ["a rank was lost"] * 3),
        ("sys.exit(2)", 2, []),
    ],
)
def test_a_rank_that_was_lost_is_started_again(
    rank: str,
    code: int,
    causes: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = f"import os, sys; is_first = os.environ['RUN_RESTARTS'] == '0'; {rank}"
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-S", "-c", script])
    for name, value in {"RUN_RESTARTS": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)  # what `launch` sets is put back
    assert launch.launch(2) == code
    said = capfd.readouterr().err.splitlines()
    assert len(said) == len(causes)
    for number, (line, cause) in enumerate(zip(said, causes, strict=True), start=1):
        assert line.endswith(f"{cause}: restart {number} of 3, from the last save")
