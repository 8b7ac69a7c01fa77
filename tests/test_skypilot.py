"""The file for SkyPilot, among stand-ins for a cloud's machine; no cloud is here."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import PROJECT

TASK = yaml.safe_load((PROJECT / "sky.yaml").read_text())
# In place of torchrun: a run that finds what an earlier one left, and saves.
TORCHRUN = """#!/bin/bash
printf '%s\\0' "$@" > torchrun.txt
RUN=runs/$SKYPILOT_TASK_ID
mkdir -p "$RUN/checkpoints"
cat "$RUN/checkpoints/last.pt" > found.txt
printf saved > "$RUN/checkpoints/last.pt"
printf half > "$RUN/checkpoints/.last.pt.0123abcd.tmp"
printf '{}' > "$RUN/status.json"
exit "$CODE"
"""


@pytest.fixture
def machine(here):
    """A function that runs the task on a new machine: its rank, and the exit code of torchrun."""

    def ended(rank, code=0):
        folder = here / f"machine{len(list(here.iterdir()))}"
        (folder / ".venv/bin").mkdir(parents=True)
        (folder / ".venv/bin/torchrun").write_text(TORCHRUN)
        (folder / ".venv/bin/torchrun").chmod(0o755)
        told = {"TASK_ID": "sky-1_a-b", "NODE_RANK": str(rank), "NODE_IPS": "10.0.0.7\n10.0.0.8"}
        told |= {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "4"}
        environment = {f"SKYPILOT_{name}": value for name, value in told.items()}
        environment |= {"ARGUMENTS": "smoke --optim.lr 0.3", "CODE": str(code)}
        script = TASK["run"].replace("/bucket", str(here / "bucket"))
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=os.environ | environment, check=False
        )
        assert done.returncode == code
        return folder

    return ended


def test_skypilot_knows_every_field():
    # https://docs.skypilot.co/en/latest/reference/yaml-spec.html
    task = {"name", "workdir", "num_nodes", "resources", "envs", "file_mounts", "setup", "run"}
    assert TASK.keys() == task
    assert TASK["resources"].keys() == {"accelerators", "use_spot", "job_recovery"}
    assert TASK["resources"]["job_recovery"].keys() == {"max_restarts_on_errors"}
    assert [mount.keys() for mount in TASK["file_mounts"].values()] == [{"name", "mode"}]


def test_machines_meet_at_the_first(machine):
    words = Path(machine(1), "torchrun.txt").read_text().split("\0")[:-1]
    pairs = dict(zip(words[:12:2], words[1:12:2], strict=True))
    assert pairs == {
        **{"--nnodes": "2", "--nproc-per-node": "4", "--node-rank": "1"},
        **{"--master-addr": "10.0.0.7", "--master-port": "29400", "--max-restarts": "0"},
    }
    run = "train.py smoke --optim.lr 0.3 --run.dir runs/sky-1_a-b --run.no-fresh"
    assert " ".join(words[12:]) == run


def test_a_machine_resumes_from_what_the_one_before_it_left_in_the_bucket(machine, here):
    machine(1)
    assert not (here / "bucket").exists()  # only the first writes there
    assert Path(machine(0, code=1), "found.txt").read_text() == ""
    assert Path(machine(0), "found.txt").read_text() == "saved"
    kept = [path.name for path in (here / "bucket").rglob("*") if path.is_file()]
    assert sorted(kept) == ["last.pt", "status.json"]  # and nothing unfinished


# Leaves checkpoints that are folders: a new one, one that is half written, and none from before.
SHARDED = """
rm -rf "$RUN"/checkpoints/step_00000004
mkdir -p "$RUN"/checkpoints/step_0000000$CODE{,.partial}
printf whole > "$RUN/checkpoints/step_0000000$CODE/run.json"
exit "$CODE"
"""


def test_checkpoints_of_sharded_weights_come_along_and_go_as_the_run_deletes_them(
    machine, here, monkeypatch
):
    sharded = TORCHRUN.replace('exit "$CODE"\n', SHARDED)
    monkeypatch.setitem(globals(), "TORCHRUN", sharded)
    machine(0, code=4)
    folders = here / "bucket/sky-1_a-b/checkpoints"
    assert [path.name for path in folders.glob("step_*")] == ["step_00000004"]
    found = machine(0, code=5)
    assert (found / "runs/sky-1_a-b/checkpoints/step_00000005/run.json").read_text() == "whole"
    assert [path.name for path in folders.glob("step_*")] == ["step_00000005"]
