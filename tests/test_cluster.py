"""The script for SLURM clusters, among stand-ins for srun and scontrol; no cluster is here."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PROJECT
from image_classifier.cli import main

SCRIPT = PROJECT / "slurm.sh"
# Starts its command as Slurm does: in a session of its own, where signals of a step go.
SRUN = """#!/bin/bash
printf '%s\\0' "$@" > srun.txt
while [[ $1 == -* ]]; do shift; done
setsid "$@" &
echo $! > step.txt
wait $!
"""
SCONTROL = """#!/bin/bash
printf '%s\\n' "$*" >> scontrol.txt
[[ $1 == show ]] && printf 'node7\\nnode8\\n'
exit "${REFUSED:-0}"
"""
# In place of the project's Python: a run that ends as it is told.
PYTHON = """#!/bin/bash
printf '%s\\0' "$@" > python.txt
if [[ -n $STATE ]]; then
    mkdir -p "$RUN"
    printf '{\\n  "state": "%s",\\n  "step": 7\\n}\\n' "$STATE" > "$RUN/status.json"
fi
exit "$CODE"
"""
# A training process: what signals reach it, it counts, and it ends as an interrupted run does.
RANK = """
import json, os, pathlib, signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda number, frame: got.append(number))
folder = pathlib.Path(sys.argv[sys.argv.index("--run.dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
rank = os.environ["RANK"]
(folder / f"ready{rank}").touch()
while not got:
    time.sleep(0.05)
time.sleep(0.5)  # it saves
(folder / f"got{rank}").write_text(json.dumps(got))
if rank == "0":
    (folder / "status.json").write_text('{\\n  "state": "interrupted",\\n  "step": 9\\n}\\n')
time.sleep(1)  # and leaves with the others: torchrun stops them when the first has gone
sys.exit(128 + got[0])
"""

Job = Callable[..., subprocess.Popen]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A function that starts the script with some arguments, as job 4242, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    commands = {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "train.py").write_text(RANK)

    def start(*arguments, **variables):
        slurm = {"JOB_ID": "4242", "JOB_NUM_NODES": "1", "JOB_NODELIST": "node[7-8]"}
        environment = {f"SLURM_{key}": value for key, value in slurm.items()}
        environment |= {"PYTHON": str(tmp_path / "bin/python"), "RUN": "runs/slurm-4242"}
        environment |= {"TMPDIR": str(tmp_path), "STATE": "done", "CODE": "0", **variables}
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            env=os.environ | environment | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def ended(job):
    """Exit code of a job that ends by itself, and what it said."""
    said, _ = job.communicate(timeout=60)
    return job.returncode, said


def asked():
    """What was asked of scontrol."""
    path = Path("scontrol.txt")
    return path.read_text().splitlines() if path.exists() else []


def words(name):
    """The arguments that a stand-in was called with."""
    return Path(f"{name}.txt").read_text().split("\0")[:-1]


RETURNS = "interrupted and saved: job 4242 goes back to the queue\n"


@pytest.mark.parametrize(
    ("state", "code", "refused", "ends"),
    [
        ("done", "0", "0", (0, "", [])),
        ("interrupted", "1", "0", (0, RETURNS, ["requeue 4242"])),
        ("interrupted", "1", "1", (1, RETURNS, ["requeue 4242"])),  # it may not go back
        *((state, "137", "0", (137, "", [])) for state in ("failed", "running", "")),
    ],
)
def test_only_an_interrupted_run_returns_to_the_queue(state, code, refused, ends, job):
    found = ended(job("smoke", STATE=state, CODE=code, REFUSED=refused))
    assert (*found, asked()) == ends


def test_an_attempt_without_progress_does_not_return_for_ever(job):
    ended(job("smoke", STATE="interrupted", CODE="1"))
    code, _ = ended(job("smoke", STATE="", CODE="2", SLURM_RESTART_COUNT="1"))  # as it was left
    assert code == 2
    assert asked() == ["requeue 4242"]


@pytest.mark.parametrize(
    "hostile",
    ["a b", "it's", '"', "$(touch owned)", "`touch owned`", "; touch owned", "*", "", "\\", "-n"],
)
def test_arguments_arrive_as_they_were_given(hostile, job):
    folder = f"runs/{hostile}"
    code, _ = ended(
        job("smoke", hostile, "--run.dir", folder, STATE="interrupted", CODE="1", RUN=folder)
    )
    assert code == 0
    passed = words("python")
    assert passed[passed.index("train.py") + 1 :][:4] == ["smoke", hostile, "--run.dir", folder]
    assert passed[-2:] == ["--run.dir", folder]
    assert asked() == ["requeue 4242"]
    assert not Path("owned").exists()


def test_the_run_folder_is_the_same_when_the_job_returns(job):
    ended(job("smoke", "--run.fresh"))
    first = words("python")
    ended(job("smoke", "--run.fresh", SLURM_RESTART_COUNT="2"))
    assert first[-4:] == ["smoke", "--run.fresh", "--run.dir", "runs/slurm-4242"]
    assert words("python")[-3:] == ["--run.dir", "runs/slurm-4242", "--run.no-fresh"]


def test_nodes_meet_at_the_first_of_them_and_one_node_opens_no_port(job):
    ended(job(SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="4"))
    several = words("python")
    assert several[several.index("--rdzv-endpoint") + 1] == "node7:24242"
    assert several[several.index("--nnodes") + 1] == "2"
    assert several[several.index("--nproc-per-node") + 1] == "4"
    ended(job())
    alone = words("python")
    meeting = Path(alone[alone.index("--rdzv-endpoint") + 1]).parent
    assert "store_type=file" in alone
    assert not meeting.exists()  # and nothing is left of it
    assert {"--kill-on-bad-exit=0", "--wait=120"} <= set(words("srun"))


def test_it_says_where_it_is_to_be_called(job):
    Path("train.py").unlink()
    code, said = ended(job())
    assert code == 2
    assert said.count("\n") == 1


def test_a_job_of_two_processes_learns_what_one_learns(job):
    code = f"import runpy; runpy.run_path({str(PROJECT / 'train.py')!r}, run_name='__main__')"
    Path("train.py").write_text(code)
    words = "smoke --run.trackers --epochs 1 --optim.warmup-epochs 0 --data.limit 192"
    words += " --run.log-every-steps 1 --compute.device cpu"
    training = job(*words.split(), PYTHON=sys.executable, SLURM_GPUS_ON_NODE="2")
    code, said = ended(training)
    assert code == 0, said
    assert "2 processes" in said
    assert said.count("top-1") == 2  # the other rank is quiet
    run = Path("runs/slurm-4242")
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert asked() == []
    assert main(["train", *words.split(), "--run.dir", "runs/alone", "--run.processes", "1"]) == 0
    assert losses(run) == pytest.approx(losses(Path("runs/alone")), rel=1e-4)


def losses(run):
    """The losses that a run logged."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row.get("train/loss") or row["val/loss"] for row in rows]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_each_process_of_training_gets_the_signal_once(number, job):
    running = job("smoke", PYTHON=sys.executable, SLURM_GPUS_ON_NODE="2")
    run = Path("runs/slurm-4242")
    wait_for(run / "ready0", run / "ready1")
    signal_step(number)
    code, said = ended(running)
    assert code == 0, said
    assert [json.loads((run / f"got{rank}").read_text()) for rank in (0, 1)] == [[number]] * 2
    assert asked() == ["requeue 4242"]


def test_what_is_cancelled_does_not_return(job):
    running = job("smoke", PYTHON=sys.executable)
    run = Path("runs/slurm-4242")
    wait_for(run / "ready0")
    signal_step(signal.SIGTERM)  # as scancel does: the step and the script
    running.terminate()
    running.communicate(timeout=60)
    wait_for(run / "status.json")
    assert running.returncode == -signal.SIGTERM
    assert asked() == []


def wait_for(*paths):
    """Return when all of the files are there."""
    for _ in range(600):
        if all(path.exists() for path in paths):
            return
        time.sleep(0.1)
    raise TimeoutError(paths)


def signal_step(number):
    """Send a signal to every process of the step, as Slurm does, whatever its session."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(pid)
    step = [int(Path("step.txt").read_text())]
    for pid in step:
        step += children.get(pid, [])
    for pid in step:
        os.kill(pid, number)
