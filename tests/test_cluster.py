"""The script for SLURM clusters, among stand-ins for srun and scontrol; no cluster is here."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, SMOKE, losses, processes_with
from image_classifier.cli import main

COMMANDS = {
    # Starts its command as Slurm does: in a session of its own, where signals of a step go.
    "srun": """#!/bin/bash
printf '%s\\0' "$@" > srun.txt
while [[ $1 == -* ]]; do shift; done
STEP=$PWD setsid --wait "$@"
""",
    "scontrol": """#!/bin/bash
printf '%s\\n' "$*" >> scontrol.txt
[[ $1 == show ]] && printf 'node7\\nnode8\\n'
exit "${REFUSED:-0}"
""",
    # In place of the project's Python: a run that ends as it is told.
    "python": """#!/bin/bash
printf '%s\\0' "$@" > python.txt
[[ $STATE ]] && mkdir -p "$RUN" && echo "{\\"state\\": \\"$STATE\\"}" > "$RUN/status.json"
exit "$CODE"
""",
}
# A training process: what signals reach it, it tells, and it ends as an interrupted run does.
RANK = """
import os, pathlib, signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda number, frame: got.append(number))
os.write(1, b"ready\\n")  # at once: `print` of two processes may mix
while not got:
    time.sleep(0.05)
time.sleep(0.5)  # it saves
os.write(1, f"got {got}\\n".encode())
if os.environ["RANK"] == "0":
    status = pathlib.Path(sys.argv[-1], "status.json")
    status.parent.mkdir(parents=True, exist_ok=True)
    status.write_text('{"state": "interrupted"}')
time.sleep(1)  # and leaves with the others: torchrun stops them when the first has gone
sys.exit(128 + got[0])
"""
HOSTILE = ["a b", "it's", '"', "$(touch owned)", "`touch owned`", "; touch owned", "*", "\\", "-n"]
RUN = Path("runs/slurm-4242")
RETURNS = "interrupted and saved: job 4242 goes back to the queue\n"


@pytest.fixture
def job(here):
    """A function that starts the script with some arguments, as job 4242, in an empty folder."""
    Path("bin").mkdir()
    for name, text in COMMANDS.items():
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)
    Path("train.py").write_text(RANK)
    environment = {"PYTHON": f"{here}/bin/python", "RUN": RUN, "STATE": "done", "CODE": "0"}
    environment |= {"PATH": f"{here}/bin:{os.environ['PATH']}", "TMPDIR": str(here)}
    environment |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "-", "SLURM_JOB_ID": "4242"}

    def start(*arguments, **variables):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = ["bash", PROJECT / "slurm.sh", *arguments]
        return subprocess.Popen(command, env=os.environ | environment | variables, **streams)

    return start


def ended(job):
    """Of a job that ends by itself: its exit code, what it said, and what it asked of scontrol."""
    said, _ = job.communicate(timeout=60)
    asked = Path("scontrol.txt")
    return job.returncode, said, asked.read_text().splitlines() if asked.exists() else []


def words(name):
    """The arguments that a stand-in was called with."""
    return Path(f"{name}.txt").read_text().split("\0")[:-1]


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
    assert ended(job("smoke", STATE=state, CODE=code, REFUSED=refused)) == ends
    # An attempt without progress, which leaves the state as it was, does not return for ever.
    again = ended(job("smoke", STATE="", CODE="2", SLURM_RESTART_COUNT="1"))
    assert again == (2, "", ends[2])


@pytest.mark.parametrize("folder", ["runs/" + " ".join(HOSTILE), "runs/"])
def test_arguments_arrive_as_they_were_given(folder, job):
    given = ["smoke", *HOSTILE, "", "--run.dir", folder]
    code, _, asked = ended(job(*given, STATE="interrupted", CODE="1", RUN=folder))
    assert (code, asked) == (0, ["requeue 4242"])
    passed = words("python")
    assert passed[passed.index("train.py") + 1 :] == [*given, "--run.dir", folder]
    assert not Path("owned").exists()


def test_the_run_folder_is_the_same_when_the_job_returns(job):
    ended(job("smoke", "--run.fresh"))
    first = words("python")
    ended(job("smoke", "--run.fresh", SLURM_RESTART_COUNT="2"))
    assert first[-4:] == ["smoke", "--run.fresh", "--run.dir", str(RUN)]
    assert words("python")[-3:] == ["--run.dir", str(RUN), "--run.no-fresh"]


def test_nodes_meet_at_the_first_of_them_and_one_node_opens_no_port(job):
    ended(job(SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="4"))
    several = words("python")
    for name, value in (("rdzv-endpoint", "node7:24242"), ("nnodes", "2"), ("nproc-per-node", "4")):
        assert several[several.index(f"--{name}") + 1] == value
    ended(job())
    alone = words("python")
    meeting = Path(alone[alone.index("--rdzv-endpoint") + 1]).parent
    assert "store_type=file" in alone
    assert not meeting.exists()  # and nothing is left of it
    assert {"--kill-on-bad-exit=0", "--wait=120"} <= set(words("srun"))


def test_it_says_where_it_is_to_be_called(job):
    Path("train.py").unlink()
    code, said, _ = ended(job())
    assert (code, said.count("\n")) == (2, 1)


def test_a_job_of_two_processes_learns_what_one_learns(job):
    code = f"import runpy; runpy.run_path({str(PROJECT / 'train.py')!r}, run_name='__main__')"
    Path("train.py").write_text(code)
    options = f"{SMOKE} --run.trackers --run.log-every-steps 1 --compute.device cpu".split()
    code, said, asked = ended(job(*options, PYTHON=sys.executable, SLURM_GPUS_ON_NODE="2"))
    assert (code, asked) == (0, []), said
    assert "2 processes" in said
    assert said.count("top-1") == 2  # the other rank is quiet
    assert '"state": "done"' in (RUN / "status.json").read_text()  # in these words: see slurm.sh
    assert main(["train", *options, "--run.dir", "runs/alone", "--run.processes", "1"]) == 0
    assert losses(RUN) == pytest.approx(losses("runs/alone"), rel=1e-4)


@pytest.mark.parametrize(
    ("number", "is_cancelled", "ends"),
    [
        (signal.SIGUSR1, False, (0, ["requeue 4242"])),
        (signal.SIGTERM, False, (0, ["requeue 4242"])),
        (signal.SIGTERM, True, (-signal.SIGTERM, [])),  # as scancel does: the step and the script
    ],
)
def test_each_process_gets_a_signal_once_and_what_is_cancelled_does_not_return(
    number, is_cancelled, ends, job
):
    running = job("smoke", PYTHON=sys.executable, SLURM_GPUS_ON_NODE="2")
    for _ in range(2):
        next(line for line in running.stdout if line == "ready\n")
    for process in processes_with(f"STEP={Path.cwd()}\0"):  # all, whatever their session
        os.kill(int(process.name), number)
    if is_cancelled:
        running.terminate()
    code, said, asked = ended(running)
    assert (code, asked) == ends, said
    assert said.count(f"got [{number:d}]\n") == 2
    assert '"interrupted"' in (RUN / "status.json").read_text()
