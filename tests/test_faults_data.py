"""What the system may refuse a run that reads photographs: shared memory, and a place to write."""

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
from conftest import PROJECT
from PIL import Image

WORDS = "--data.image-size 32 --data.batch-size 8 --model.name resnet9 --model.width 8"
WORDS += " --augment.crop resized --epochs 1 --optim.warmup-epochs 0 --run.trackers"
WORDS += " --data.where stream --data.workers 2 --compute.device cpu --data.prefetch-batches 8"


def in_own_mounts(*commands):
    """Run commands of a shell that see mounts of their own."""
    script = " && ".join(commands)
    command = ["unshare", "--mount", "sh", "-c", script]
    return subprocess.run(command, cwd=PROJECT, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module", autouse=True)
def may_mount():
    """Only root may, and not in every container."""
    try:
        allowed = in_own_mounts("mount -t tmpfs tmpfs /mnt").returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this user may not mount")


@pytest.fixture
def photos(tmp_path):
    """32 photographs to train on, and 8 for validation, in a folder that holds nothing else."""
    chance = np.random.default_rng(0)
    for number in range(40):
        split = "train" if number < 32 else "val"
        path = tmp_path / "disk" / "photos" / split / ("ant", "bee")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(path)
    return tmp_path / "disk" / "photos"


def training(photos, run, *words):
    """The command of a training on `photos` that ends in `run`."""
    command = f"train.py folder --data.root {photos} --run.dir {run} {WORDS}".split()
    return shlex.join([sys.executable, *command, *words])


def test_4_megabytes_of_shared_memory_and_a_dataset_that_cannot_be_written_are_enough(
    photos, tmp_path
):
    disk = shlex.quote(str(photos.parent))
    # A batch is 1.2 MB, and so the ring of one process alone more than there is.
    large = ("--data.image-size", "224", "--run.processes", "2")
    done = in_own_mounts(
        "mount -t tmpfs -o size=4m tmpfs /dev/shm",
        # Neither among the images nor beside them, where the cache would be.
        f"mount --bind {disk} {disk}",
        f"mount -o remount,bind,ro {disk}",
        f"! touch {disk}/x 2>/dev/null",
        training(photos, tmp_path / "run", *large),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
    assert {path.name for path in photos.parent.iterdir()} == {"photos"}
