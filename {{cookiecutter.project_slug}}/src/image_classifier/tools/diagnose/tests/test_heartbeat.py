"""A rank that is gone is named by those that are left."""

import json
import re
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import after_each_step, run_ranks, wait_for

from image_classifier.errors import FaultError
from image_classifier.runtime.distributed import World
from image_classifier.tools.diagnose import heartbeat
from image_classifier.train import train


def left_alone(config):
    """Train, and be killed if this is rank 1."""
    heartbeat.BEAT_SECONDS = 0.1

    def die(log, _):
        if log.world.rank == 1 and log.step_done == 3:
            time.sleep(0.3)
            signal.raise_signal(signal.SIGKILL)

    after_each_step(pytest.MonkeyPatch(), die)
    with suppress(FaultError):
        train(config)


def test_a_rank_that_was_killed_is_named_with_its_place(config):
    with pytest.raises(EOFError):
        run_ranks(2, left_alone, config)
    found = json.loads(Path(config.run.dir, "status.json").read_text())
    assert found["state"] == "failed"
    account = r"no answer from rank 1 on .*which has ended.* at test_heartbeat.py:"
    assert re.search(account, found["message"])


def test_a_rank_that_waits_for_others_says_so_and_one_that_is_done_says_that(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "is_peer_failure", lambda error: "peer" in str(error))
    share = lambda hosts, own: hosts.__setitem__(slice(None), [own] * len(hosts))  # noqa: E731
    monkeypatch.setattr(heartbeat.dist, "all_gather_object", share)
    run = SimpleNamespace(dir=str(tmp_path))
    world = World(torch.device("cpu"), rank=1, size=2)
    setup = SimpleNamespace(world=world, config=SimpleNamespace(run=run))
    own, of_peer = ValueError("own"), RuntimeError("peer")
    for error, kind, how in ((of_peer, heartbeat.LostError, "waits"), (own, ValueError, "left")):
        with pytest.raises(kind), heartbeat.watch(setup, SimpleNamespace(step=5)):
            raise error
        (row,) = heartbeat.rows_of(tmp_path / "heartbeats")
        assert (row["rank"], row["step"], row["how"]) == (1, 5, how)
    (tmp_path / "heartbeats").unlink()
    (tmp_path / "heartbeats").mkdir()  # as if the disk were full: what others said is raised
    with pytest.raises(RuntimeError, match="peer"), heartbeat.watch(setup, SimpleNamespace(step=5)):
        raise of_peer


@pytest.mark.parametrize(
    ("rank", "hows", "named"),
    [
        (0, ("waits", "waits", None), [2]),  # the run folder is not shared, and rank 2 is gone
        (1, ("waits", "waits", None), []),  # which rank 0 tells
        (2, (None, None, "waits"), [0, 1]),  # seen from there
        (0, ("waits", "waits", "waits"), [2]),  # it is shared, and nothing but the network is gone
        (2, ("waits", "waits", "waits"), [0, 1]),
        (0, ("waits", "runs", "waits"), [1]),
        (0, ("waits", "waits", "left"), None),  # rank 2 has told
    ],
)
def test_a_machine_that_is_lost_is_named(rank, hows, named, tmp_path):
    hosts, path = ["node-a", "node-a", "node-b"], tmp_path / "heartbeats"
    about = {"process": 1, "step": 5, "line": "train.py:9 in train", "time": time.time()}
    rows = [{"rank": n, "host": hosts[n], "how": how} | about for n, how in enumerate(hows)]
    texts = (json.dumps(row).encode() if row["how"] else b"" for row in rows)
    path.write_bytes(b"".join((text + b"\n").rjust(heartbeat.ROW_BYTES, b"\0") for text in texts))
    account = heartbeat.account_of(path, World(torch.device("cpu"), rank, 3), hosts)
    if named:
        assert re.findall(r"rank (\d) on", account) == [str(other) for other in named]
        seen = re.findall(r"last seen [01] s ago after step 5", account)
        assert len(seen) == sum(bool(hows[other]) for other in named)
        lost = f"or without {hosts[named[0]]}" if hosts[named[0]] != hosts[rank] else "to resume"
        assert account.endswith(lost)
    else:
        assert account == (named if named is None else "")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux")
def test_of_a_process_on_this_machine_it_is_said_whether_it_is_there():
    def fate(host):
        return re.search(r"\(process \d+, (.*?)\)", heartbeat.describe(1, host, row))[1]

    here = socket.gethostname()
    with subprocess.Popen(["sleep", "60"]) as process:
        row = {"process": process.pid, "step": 5, "line": "train.py:9 in train", "time": 0.0}
        assert (fate(here), fate("elsewhere")) == ("which hangs", "on another machine")
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: fate(here) == "which is stopped")
        process.kill()
    assert fate(here) == "which has ended"


def test_what_an_earlier_run_on_another_machine_left_is_no_answer(tmp_path):
    about = {"process": 1, "step": 5, "line": "train.py:9 in train", "time": time.time()}
    rows = ({"rank": 0, "host": "a", "how": "waits"}, {"rank": 1, "host": "old", "how": "left"})
    (tmp_path / "beats").write_text("".join(json.dumps(row | about) + "\n" for row in rows))
    world = World(torch.device("cpu"), rank=0, size=2)
    account = heartbeat.account_of(tmp_path / "beats", world, ["a", "b"])
    assert account.startswith("no answer from rank 1 on b (that machine is down,")


def test_rows_of_ranks_are_those_that_are_whole(damaged, tmp_path):
    row = dict.fromkeys(("rank", "host", "process", "step", "line", "time", "how"), 1)
    path = tmp_path / "heartbeats"
    path.write_bytes(damaged + b"\n" + json.dumps(row).encode() + b"\n")
    assert heartbeat.rows_of(path) == [row]
