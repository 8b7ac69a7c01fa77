"""Nothing that is printed ends a run or a verb's work, whatever becomes of the output."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from conftest import SMOKE, run_alone

from image_classifier.cli import commands, main
from image_classifier.errors import EXIT_DONE, EXIT_FAULT
from image_classifier.runtime.console import lasting_output

FULL = "cannot write to standard output: No space left on device"


@contextmanager
def printing_to(stream: TextIO) -> Iterator[None]:
    """A block in which standard output is `stream`, which can't be written to its end."""
    before, sys.stdout = sys.stdout, stream
    try:
        yield
    finally:
        sys.stdout = before
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or closing it fails
        stream.close()


VERBS = ("evaluate", "predict", "check", "")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb in {*commands(), ""}])
def test_a_verb_does_its_work_and_says_that_its_output_is_lost(
    verb: str,
    trained_once: Path,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, result = str(trained_once), tmp_path / "result.json"
    words = {
        "evaluate": [run, "--device", "cpu"],
        "predict": [run, str(photos / "val"), "--workers", "0", "--device", "cpu"],
        "check": ["--data.root", str(photos), "--json", str(result)],
        "": ["--help"],
    }[verb]
    with printing_to(open("/dev/full", "w")):
        assert main([verb, *words] if verb else words) == EXIT_FAULT
    assert capsys.readouterr().err == f"{FULL}\n"
    assert result.exists() == ("--json" in words)


class Disk(io.RawIOBase):
    """A file on a disk that has no space for a while."""

    def __init__(self) -> None:
        """With space."""
        self.content, self.is_full = b"", False

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: bytes) -> int:
        """Write it all, or nothing."""
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.content += bytes(data)
        return len(data)


def test_lines_appear_again_when_the_disk_has_space_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk()
    stream = io.TextIOWrapper(io.BufferedWriter(disk), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with lasting_output("") as output:
        for line, disk.is_full in (("a", False), ("b", True), ("c", True), ("é \udcff", False)):
            print(line, flush=True)
    assert sys.stdout is stream
    assert output.error is not None
    assert disk.content == rb"a b c \xe9 \udcff".replace(b" ", b"\n", 3) + b"\n"
    assert capsys.readouterr().err == f"{FULL}\n"


def train_without_output(folder: Path) -> tuple[int, str]:
    """Train where standard output is closed: the exit code, and what has its number then."""
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT), 2)
    os.close(1)
    sys.stdout = None
    words = [*SMOKE.split(), "--run.dir", str(folder / "run"), "--data.limit", "96"]
    return main(["train", *words]), os.readlink("/proc/self/fd/1")


def test_a_run_whose_output_is_closed_comes_to_its_end_and_no_file_takes_its_place(
    tmp_path: Path,
) -> None:
    assert run_alone(train_without_output, tmp_path) == (0, (EXIT_DONE, os.devnull))
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "done"
    assert (tmp_path / "said").read_text() == (
        "cannot write to standard output: Bad file descriptor; "
        "the run goes on, metrics.jsonl has all\n"
    )


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        (">/dev/full", f"{FULL}\n"),
        (">/dev/full 2>&1", ""),
        (">&-", "cannot write to standard output: Bad file descriptor\n"),
        ("<&- >&- 2>&-", ""),
    ],
)
def test_python_has_nothing_to_add_at_its_end(redirection: str, said: str) -> None:
    code = "import sys\nfrom image_classifier.cli import main\n"
    code += "sys.exit(main([]))"
    script = f'exec "$0" -c "$1" {redirection}'
    words = ["sh", "-c", script, sys.executable, code]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # so that something is left for the end
    done = subprocess.run(words, env=buffered, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_FAULT, "", said)


@pytest.mark.skipif("predict" not in commands(), reason="it was deleted")
def test_a_reader_that_has_seen_enough_ends_a_prediction_without_a_word(
    trained_once: Path,
    photos: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    receive, send = os.pipe()
    os.close(receive)
    words = [str(trained_once), str(photos), "--workers", "0", "--device", "cpu"]
    with printing_to(os.fdopen(send, "w")):
        assert main(["predict", *words, "--batch-size", "1"]) == EXIT_FAULT
    assert capsys.readouterr().err == ""
