"""The command line: quick to answer, one line for a mistake, the same run however it is started."""

import gzip
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SMOKE, write_photo
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto import event_pb2

from image_classifier import profiling
from image_classifier.cli import main
from image_classifier.config import (
    Config,
    UserError,
    flatten,
    unflatten,
)
from image_classifier.presets import PRESETS

PROJECT = Path(__file__).parent.parent


def test_help_comes_at_once_and_names_presets_and_knobs(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", PROJECT / "train.py", "--help"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert " torch" not in done.stderr  # which takes seconds
    for word in (*PRESETS, "--optim.lr", "peak learning rate", "--run.processes"):
        assert word in done.stdout


MISTAKES = {
    "smok": "no preset 'smok'; there are: smoke",
    "smoke --optim.lrr 1": "did you mean --optim.lr?",
    "smoke --optim.name sdg": "'sgd', 'adamw', 'muon'",
    "smoke --epochs many": "--epochs",
    "smoke --optim.lr": "--optim.lr",
    "smoke --epochs -1": "--epochs -1 is not in",
    "smoke --data.name cifr10": "did you mean cifar10?",
    "smoke --model.name resnt18": "did you mean resnet18",
    "smoke --data.batch-size 961": "more than there are training images: 960",
    "smoke --data.batch-size 10 --optim.accumulate 3": "take 9 or 12",
    "smoke --data.where device --augment.policy randaugment": "--data.where auto or stream",
    "smoke --epochs inf": "--epochs inf is not in",
    f"smoke --data.limit 1{'0' * 400}": "00 is not in 0 .. 1e+09",
    "smoke --model.name vit_b_32 --data.image-size 40": "vit_b_32 can't take images of",
    "smoke --optim.warmup-epochs 9": "longer than the run",
    "smoke --augment.mixup 0.2 --data.batch-size 15": "an even number",
    "smoke --precision fp16 --compute.device cpu": "bf16 or fp32",
    "smoke --run.dir /proc/nowhere": "cannot write to the run folder '/proc/nowhere'",
    "smoke --run.init-from nowhere.pt": "no checkpoint 'nowhere.pt'",
    "folder --data.root nowhere": "--data.root 'nowhere': there is no such folder",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("error: ")
    assert MISTAKES[words] in said


def test_a_bad_image_stops_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(24):
        split = "train" if number < 16 else "val"
        size = (40 + number, 30)
        write_photo(tmp_path / split / ("ant", "bee")[number % 2] / f"{number}.jpg", number, size)
    (tmp_path / "train" / "ant" / "4.jpg").write_bytes(b"<html>")
    words = "folder --data.root . --data.image-size 32 --data.batch-size 8 --model.name resnet9"
    for workers in ("0", "1"):
        assert main(["train", *words.split(), "--data.workers", workers]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said == [
            "error: cannot read image 'train/ant/4.jpg': not a JPEG, PNG, WEBP, BMP, GIF, TIFF file"
        ]


def test_evaluate_repeats_the_result_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMOKE.split()]) == 0
    rows = map(json.loads, Path("runs/smoke/metrics.jsonl").read_text().splitlines())
    best = max(row["val/top1"] for row in rows if "val/top1" in row)
    capsys.readouterr()
    assert main(["evaluate", "runs/smoke"]) == 0
    assert f"top-1 {best:.2%}" in capsys.readouterr().out
    assert main(["evaluate", "runs/smoke", "--split", "test"]) == 0
    assert main(["evaluate", "runs/nowhere"]) == 2


def read_events(path: Path) -> Iterator[event_pb2.Event]:
    """What TensorBoard finds in a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        yield from EventFileLoader(str(path)).Load()


def test_a_run_folder_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "SKIPPED_STEPS", 1)
    monkeypatch.setattr(profiling, "RECORDED_STEPS", 1)  # as each takes half a second to write
    monkeypatch.setenv("WANDB_API_KEY", "planted")
    words = "smoke --data.limit 96 --data.batch-size 24 --epochs 2 --profile"
    assert main(["train", *words.split()]) == 0
    folder = Path("runs/smoke")
    for path in folder.rglob("*.*"):
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            assert b"planted" not in file.read(), path
    config = unflatten(json.loads((folder / "config.json").read_text()))
    assert config.data.limit == 96
    environment = json.loads((folder / "environment.json").read_text())
    assert environment.keys() >= {"torch", "device", "threads", "commit"}
    (events,) = (folder / "tensorboard").glob("events*")  # one run, with all that belongs to it
    values = [value for event in read_events(events) for value in event.summary.value]
    assert {"train/loss", "val/top1", "confusion"} <= {value.tag for value in values}
    plugins = {value.metadata.plugin_data.plugin_name for value in values}
    assert {"scalars", "images", "hparams"} <= plugins
    assert (folder / "profile" / "trace.json.gz").stat().st_size > 1000
    said = capsys.readouterr().out
    assert all(f"  {phase} " in said for phase in ("wait for data", "forward", "optimizer"))
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-2])
    assert row.keys() >= {"step", "epoch", "train/loss", "train/images_per_second", "train/mfu"}
    assert re.search(r"an image: [\d.]+ MFLOP forward", said)
    assert re.search(r"bound: .*; \d+% of the peak \(MFU\)", said)
    assert "MFU" in (folder / "report.html").read_text()


def test_a_config_survives_being_written_down() -> None:
    for preset in PRESETS.values():
        assert unflatten(json.loads(json.dumps(flatten(preset())))) == preset()


def test_a_config_that_contradicts_itself_is_refused_when_it_is_built() -> None:
    with pytest.raises(UserError, match="longer than the run"):
        Config(epochs=0.5)
