"""Two machines: network namespaces, each with a name, an address and a run folder of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import PROJECT, logged, losses
from image_classifier.cli import main
from image_classifier.tracking.logger import RunLogger

TIMEOUT, GRACE = 10, 25  # seconds: of --run.timeout-seconds, and for torchrun to end after it
# With so small a learning rate, sums in another order stay sums in another order: at a larger one
# their difference grows a thousandfold in ten steps.
RUN = "smoke --epochs 500 --data.limit 64 --data.batch-size 64 --optim.lr 0.001 --run.trackers"
RUN += " --run.evaluate-every-epochs 4 --run.log-every-steps 1 --compute.device cpu --run.dir run"
TORCHRUN = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 0"
# As Debian installs a machine: it knows its own name only, and by that an address of its loopback.
ENTER = 'hostname "$0"; echo "127.0.1.1 $0" > hosts; mount --bind hosts /etc/hosts; exec "$@"'


class Node:
    """A machine: `address` on the network of both."""

    def __init__(self, name, address, folder):
        self.name, self.address, self.folder, self.agent = name, address, folder, None
        self.space, self.device = f"pretuned-{os.getpid()}-{name}", f"pt{os.getpid()}{name[-1]}"
        folder.mkdir()

    def ip(self, *words):
        """Change the network of this machine."""
        subprocess.run(["ip", "-n", self.space, *words], check=True)

    def start(self, words):
        """Start torchrun here."""
        words = words.replace("ADDRESS", self.address).replace("NODE", self.name[-1]).split()
        command = ["ip", "netns", "exec", self.space, "unshare", "--uts", "--mount"]
        command += ["bash", "-c", ENTER, self.name, sys.executable, *TORCHRUN.split(), *words]
        command += [PROJECT / "train.py", *RUN.split(), "--run.timeout-seconds", str(TIMEOUT)]
        environment = os.environ | {"PYTHONPATH": str(PROJECT / "src")}
        with Path(self.folder, "said.txt").open("w") as file:
            self.agent = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=file, stderr=file
            )

    def kill(self):
        """Kill all processes of this machine at once."""
        command = ["ip", "netns", "pids", self.space]
        pids = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.agent:
            self.agent.wait()

    def wait_for_step(self, step):
        """Wait until the run has done so many steps since it was started or resumed."""
        rows, end = self.folder / "run/metrics.jsonl", time.monotonic() + 240
        while not (rows.exists() and logged(rows.parent)[-1:] and last_step(rows.parent) >= step):
            assert self.agent.poll() is None, Path(self.folder, "said.txt").read_text()
            assert time.monotonic() < end
            time.sleep(0.1)

    def ended(self):
        """The lines with which the rank here ended by itself, in time."""
        assert self.agent.wait(TIMEOUT + GRACE) == 1  # of torchrun, for any exit code of a rank
        said = Path(self.folder, "said.txt").read_text().splitlines()
        return [line for line in said if line.startswith(("rank", "failed"))]


@pytest.fixture
def nodes(tmp_path):
    """Two machines with a cable between them."""
    made = [Node(f"node{n}", f"10.77.0.{n + 1}", tmp_path / f"node{n}") for n in (0, 1)]
    one, other = made
    try:
        for node in made:
            command = ["ip", "netns", "add", node.space]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        ends = ["type", "veth", "peer", "name", other.device, "netns", other.space]
        one.ip("link", "add", one.device, *ends)
        for node in made:
            node.ip("link", "set", "lo", "up")
            node.ip("addr", "add", f"{node.address}/24", "dev", node.device)
            node.ip("link", "set", node.device, "up")
        yield made
    finally:
        for node in made:
            with suppress(subprocess.CalledProcessError):
                node.kill()
            subprocess.run(["ip", "netns", "del", node.space], check=False, capture_output=True)


def last_step(folder):
    """How many steps a run has logged."""
    return max((row["step"] for row in logged(folder)), default=0)


def train_alone(monkeypatch, until):
    """Train in one process, and end after a step as after Ctrl-C."""

    def stop(log, *done):
        step(log, *done)
        if log.step_done == until:
            raise KeyboardInterrupt

    step = RunLogger.step
    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "step", stop)
        assert main(["train", *RUN.split(), "--run.processes", "1"]) == 130


def line(lost):
    """What a rank says of the other node."""
    return (
        f"rank {1 - lost}: no answer from rank {lost} on node{lost} (that machine is down, or its "
        "network, or its run failed). What was saved is kept. Run the same command to resume on "
        f"all machines, or without node{lost}"
    )


@pytest.mark.skipif(not shutil.which("ip"), reason="iproute2 makes the networks")
def test_a_run_outlives_a_dead_node_and_a_cut_cable_and_learns_the_same(nodes, monkeypatch):
    one, other = nodes
    monkeypatch.chdir(one.folder)
    for node in nodes:
        node.start(
            "--local-addr ADDRESS --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 "
            f"--rdzv-conf is_host={int(node is one)}"
        )
    one.wait_for_step(6)
    other.kill()
    assert one.ended() == [line(lost=1)]

    killed_at = last_step("run")
    for node in nodes:  # torchrun's static rendezvous, which ends too where the store is cut off
        node.start("--node-rank NODE --master-addr 10.77.0.1")
    one.wait_for_step(killed_at + 6)
    assert not Path(other.folder, "run/checkpoints").exists()  # it got the one of the first node
    one.ip("link", "set", one.device, "down")  # no packet tells that a connection is closed
    assert [one.ended(), other.ended()] == [[line(lost=1)], [line(lost=0)]]

    cut_at = last_step("run")
    train_alone(monkeypatch, until=cut_at + 6)
    shutil.move("run", "resumed")
    train_alone(monkeypatch, until=cut_at + 6)
    assert losses("resumed") == pytest.approx(losses("run"), rel=1e-3)
