"""`reproduce` prints the command that trains the same, and tells what differs today."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import SMOKE, changed, losses, write_photo

from image_classifier.cli import main
from image_classifier.runtime import machine, run_dir
from image_classifier.tools.config_file import (
    reproduce as reproducing,
)

FLAGS = "--run.trackers --run.dir"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_dir, "git", lambda *_: None)


@pytest.fixture
def reproduced(capsys):
    """A function from a run folder to the lines that `reproduce` prints."""

    def lines_of(folder):
        capsys.readouterr()
        assert main(["reproduce", folder]) == 0
        return capsys.readouterr().out.splitlines()

    return lines_of


def change(path, **values):
    """Change values in a JSON file."""
    path = Path(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_its_command_trains_the_same(reproduced):
    assert main(["train", *SMOKE.split(), "--run.dir", "runs/a b"]) == 0
    line, _, differences = reproduced("runs/a b")
    assert differences == "the same"
    assert line == (
        "python train.py smoke --epochs 1 --data.limit 192 --optim.warmup-epochs 0"
        f" --run.log-every-steps 1 {FLAGS} 'runs/a b-again'"
    )
    assert main(["train", *shlex.split(line)[2:]]) == 0
    assert losses("runs/a b-again") == losses("runs/a b")


@pytest.mark.parametrize("metric", ["top1", "loss"])
def test_the_metric_that_decides_is_told_unless_it_is_the_usual_one(config, metric):
    _, knobs = reproducing.flags_for(changed(config, run__best_by=metric))
    assert knobs.get("run.best_by", "top1") == metric


def test_images_of_several_labels_are_the_same_today(reproduced):
    words = f"{SMOKE} --model.task multi-label --run.dir runs/a"
    assert main(["train", *words.split()]) == 0
    assert reproduced("runs/a")[2:] == ["the same"]


def test_what_differs_today_is_told(reproduced):
    assert main(["train", *SMOKE.split(), "--run.dir", "runs/a"]) == 0
    path = "runs/a/environment.json"
    change(path, pillow="1.2.3\x1b[2J", cuda="9.0", processes=16, threads=7)
    change(path, commit="abc", changed="M a")
    there = json.loads(Path(path).read_text())
    told = reproduced("runs/a")[2:]
    assert [line.partition(":")[0] for line in told] == [
        *("pillow", "cuda", "processes", "threads", "commit", "changed"),
    ]
    assert told[0].endswith(r" now, 1.2.3\x1b[2J in the run")
    assert told[2] == "processes: 1 now, 16 in the run"
    assert told[4] == "commit: none now, abc in the run"
    old = {"python": there["python"]}  # as of older runs, which wrote down less
    Path(path).write_text(json.dumps(old))
    assert reproduced("runs/a")[2:] == ["the same"]
    Path(path).unlink()
    shutil.rmtree("runs/a/checkpoints")
    assert reproduced("runs/a")[2:] == [
        "environment: not known, as there is no readable environment.json",
        "images: not known, as there is no checkpoint",
    ]


def test_a_share_of_the_cores_is_no_other_cpu(reproduced, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with monkeypatch.context() as beside_others:
        beside_others.setattr(machine, "num_cores", lambda: 1)  # as of `repeat --at-once`
        assert main(["train", *SMOKE.split(), "--run.dir", "runs/a"]) == 0
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    assert reproduced("runs/a")[2:] == ["the same"]


def test_processes_threads_and_any_gpu_are_those_that_a_run_would_have(config, monkeypatch):
    monkeypatch.setattr(reproducing, "num_threads", lambda processes: 8 // processes)
    own = changed(config, run__processes=4, compute__device="cuda")  # which need not be here
    now = reproducing.environment_today(own)
    assert (now["processes"], now["threads"]) == (4, 2)


def test_code_that_no_commit_has_is_told(reproduced, monkeypatch):
    monkeypatch.setattr(run_dir, "git", lambda *_: "M a.py\n M b.py")
    assert main(["train", *SMOKE.split(), "--run.dir", "runs/a"]) == 0
    assert reproduced("runs/a")[2:] == [
        "changed: no commit has these files as they were: M a.py;  M b.py"
    ]


def test_other_images_are_told(reproduced, photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "own")
    words = f"{SMOKE} --data.name folder --data.root {root} --data.limit 0 --data.batch-size 4"
    assert main(["train", *words.split(), "--run.dir", "runs/a"]) == 0
    assert reproduced("runs/a")[2:] == ["the same"]
    write_photo(root / "train/ant/0.jpg", 99, size=(60, 90))
    assert reproduced("runs/a")[2:] == [
        "images: training images were replaced under the same names"
    ]
    (root / "train/ant/0.jpg").unlink()
    assert reproduced("runs/a")[2:] == ["images: the training images have changed"]
    shutil.move(root / "train/ant", root / "train/cat")
    assert reproduced("runs/a")[2:] == ["images: their classes have changed"]
    shutil.rmtree(root)
    (line,) = reproduced("runs/a")[2:]
    assert line.startswith("images: --data.root ")


def test_a_folder_without_a_run_is_refused_in_a_line(refusal, tmp_path):
    assert "cannot read the config file 'a/config.json'" in refusal("reproduce", "a")
    (tmp_path / "config.json").write_text('{"epochs": 1}')
    assert "is not the config of a run" in refusal("reproduce", ".")
    (tmp_path / "config.json").write_text('{"epochs": 1, "model.tower": 3}')
    assert "there is no --model.tower" in refusal("reproduce", ".")
