"""What a project's own tests leave out, as it starts many processes or takes long."""

import json
from pathlib import Path

import pytest
from conftest import python

SMOKE = "smoke --run.trackers --epochs 1 --optim.warmup-epochs 0 --data.limit 192"
SMOKE += " --run.log-every-steps 1 --compute.device cpu"
HELP = """
import contextlib, io, sys
sys.path.insert(0, "src")
from image_classifier.cli import main
from image_classifier.presets import PRESETS

sys.argv = ["train.py"]
for name in PRESETS:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            main(["train", name, "--help"])
    except SystemExit as stop:
        print(name, stop.code, f"train.py {name} " in said.getvalue())
"""


def losses(folder: Path) -> list[float]:
    """The losses that a run logged."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row.get("train/loss") or row["val/loss"] for row in rows]


def test_processes_started_by_torchrun_learn_what_one_learns(tmp_path: Path) -> None:
    alone, torchrun = tmp_path / "alone", tmp_path / "torchrun"
    words = [*SMOKE.split(), "--run.dir"]
    python("train.py", *words, str(alone), "--run.processes", "1")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    said = python(*launcher, "train.py", *words, str(torchrun))
    assert said.count("top-1") == 2  # other ranks are quiet
    assert losses(torchrun) == pytest.approx(losses(alone), rel=1e-4)
    assert json.loads((torchrun / "status.json").read_text())["state"] == "done"


def test_every_preset_answers_help() -> None:
    lines = python("-c", HELP).splitlines()
    assert len(lines) >= 10
    assert all(line.endswith(" 0 True") for line in lines), lines
