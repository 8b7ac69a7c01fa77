"""What the system may refuse a run that reads photographs: shared memory, and a place to write."""

import json
import shlex
import sys

import pytest
from conftest import run, write_photos

# A batch is 1.2 MB, and so the ring of one process alone more than there is.
WORDS = "--data.image-size 224 --data.batch-size 8 --model.name resnet9 --model.width 8"
WORDS += " --augment.crop resized --epochs 1 --optim.warmup-epochs 0 --run.trackers"
WORDS += " --data.where stream --data.workers 2 --compute.device cpu --data.prefetch-batches 8"
IN_OWN_MOUNTS = ("unshare", "--mount", "sh", "-c")


def test_4_megabytes_of_shared_memory_and_a_dataset_that_cannot_be_written_are_enough(tmp_path):
    try:
        run(*IN_OWN_MOUNTS, "mount -t tmpfs tmpfs /mnt")
    except (AssertionError, FileNotFoundError):
        pytest.skip("this user may not mount: only root may, and not in every container")
    disk, run_folder = tmp_path / "disk", tmp_path / "run"
    write_photos(disk / "photos", 32, 8)
    train = f"train.py folder --data.root {disk}/photos --run.dir {run_folder} --run.processes 2"
    commands = (
        "mount -t tmpfs -o size=4m tmpfs /dev/shm",
        # Neither among the images nor beside them, where the cache would be.
        f"mount --bind {disk} {disk}",
        f"mount -o remount,bind,ro {disk}",
        f"! touch {disk}/x 2>/dev/null",
        shlex.join([sys.executable, *train.split(), *WORDS.split()]),
    )
    run(*IN_OWN_MOUNTS, " && ".join(commands))
    assert json.loads((run_folder / "status.json").read_text())["state"] == "done"
    assert {path.name for path in disk.iterdir()} == {"photos"}
