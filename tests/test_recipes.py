"""Published recipes train: a step on small images, one on large ones, a test on larger ones."""

import json

import pytest
from image_classifier.cli import main

TINY = "--data.name shapes --data.root data --data.limit 16 --data.batch-size 8 --data.workers 0"
TINY += " --epochs 1 --optim.warmup-epochs 0 --run.log-every-steps 1 --run.processes 1"
TINY += " --run.trackers --compute.device cpu --precision fp32"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        (
            "imagenet_rn50_16",
            "--data.image-size 96 --augment.min-size 64 --data.test-size 128 --epochs 2"
            " --run.evaluate-every-epochs 2",
        ),
        ("imagenet_vit_s", "--data.image-size 64 --data.test-size 96"),
    ],
)
def test_a_recipe_for_imagenet_trains(tmp_path, preset, words):
    folder = ["--run.dir", str(tmp_path / "run")]
    assert main(["train", preset, *f"{TINY} {words}".split(), *folder]) == 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["train/loss"] for row in map(json.loads, rows) if "train/loss" in row]
    assert len(losses) >= 2
    assert losses[0] == pytest.approx(2.3, abs=0.7)  # of ten classes, not yet known
    assert "val/top1" in json.loads(rows[-1])
