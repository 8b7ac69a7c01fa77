"""Ranks of one run: how they start, meet, agree and part."""

import gc
import json
import os
import re
import signal
import sys
import tempfile
import time
import warnings
import weakref
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest
import torch
import torch.distributed as dist
from conftest import (
    SMOKE,
    changed,
    is_alive,
    job_of,
    logged,
    losses,
    run_alone,
    run_ranks,
    start,
    train_in_file,
    train_until,
    wait_for,
)
from test_faults import NO_MEMORY, lack_memory
from test_resume import assert_same, final
from torch import nn

from image_classifier import parallel
from image_classifier import train as train_module
from image_classifier.checkpoints import pretrained
from image_classifier.checkpoints import saving as checkpoint
from image_classifier.config import (
    ComputeConfig,
    Config,
    RunConfig,
)
from image_classifier.data import splits
from image_classifier.data.autotune import check_batch_size
from image_classifier.data.datasets.source import Source
from image_classifier.errors import (
    EXIT_OUT_OF_MEMORY,
    UserError,
    is_peer_failure,
)
from image_classifier.extensions import find_tools
from image_classifier.presets import shapes
from image_classifier.runtime import (
    consensus,
    distributed,
    launch,
    platform,
)
from image_classifier.runtime.distributed import World
from image_classifier.runtime.files import read_object
from image_classifier.runtime.signals import Signals, StoppedError
from image_classifier.train import train

CPU = World(torch.device("cpu"))


def heard_warnings():
    """Which of two warnings are heard beside DDP: its own of a GPU, and another."""
    compute = ComputeConfig(device="cpu")
    with distributed.join_world(compute) as world, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallel.Replicas(compute, world).wrap(nn.Linear(2, 2))
        for text in ("Grad strides do not match bucket view strides. This", "Another"):
            warnings.warn(text, stacklevel=1)
        return [str(warning.message) for warning in said]


def test_ranks_do_not_warn_of_strides_that_mean_nothing():
    assert run_ranks(2, heard_warnings) == [["Another"], ["Another"]]


def finds_another():
    """Whether there is an address in the store of this attempt; leave one there."""
    store = distributed.open_store(0, 2, 1, timedelta(seconds=20))
    is_there = store.check(["address"])
    store.set("address", "of a rank that is gone by then")
    return is_there


@pytest.fixture
def nodes():
    """What torchrun's agents tell ranks on two nodes; its store serves all attempts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    told |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield told
    del store


def test_ranks_on_two_nodes_learn_as_one_process_and_meet_at_each_attempt(
    config, trained_once, nodes
):
    run_ranks(2, train, config, **nodes)
    assert losses(config.run.dir) == pytest.approx(losses(trained_once), rel=1e-3)
    attempts = [nodes | {"TORCHELASTIC_RESTART_COUNT": number} for number in "112"]
    assert [run_ranks(1, finds_another, **told) for told in attempts] == [[False], [True], [False]]


def on_own_disk(work, config):
    """What `work` returns with a run folder of this rank's own."""
    return work(changed(config, run__dir=config.run.dir + os.environ["RANK"]))


def test_nodes_without_a_shared_disk_resume_from_the_first(config, trained_once, nodes):
    first, second = (Path(config.run.dir + rank) for rank in "01")
    run_alone(train_until, changed(config, run__dir=str(second), optim__lr=0.1), 5)  # another run
    assert run_ranks(2, on_own_disk, starved, config, **nodes)[1] == EXIT_OUT_OF_MEMORY
    assert read_object(second / "micro_batch.json")["micro_batch"] == 4
    attempt = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert run_ranks(2, on_own_disk, starved, config, **nodes, **attempt) == [0, 0]
    assert losses(first) == pytest.approx(losses(trained_once), rel=1e-3)


def refusal_of_other_images(config):
    """What a rank says where each machine has another number of images."""
    with pytest.raises(UserError, match="images on") as error:
        train(changed(config, data__limit=64 - int(os.environ["RANK"])))
    return str(error.value)


def test_nodes_with_other_images_are_refused(config, nodes):
    first, second = run_ranks(2, refusal_of_other_images, config, **nodes)
    assert first.startswith("train: the 64 images on ")
    assert second.startswith("train: the 63 images on ")


JOB = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
JOB |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
LEFT_OVER = [
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE='4' without RANK, MASTER_ADDR, MASTER_PORT, which is no"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK='0' WORLD_SIZE='2' without MASTER_ADDR"),
    ({"RANK": ""}, "RANK='', which is no rank of a job: unset"),
    ({"RANK": "1"}, "RANK='1', which"),
    ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1', which"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0', which"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two', which"),
    (JOB | {"RANK": "4"}, "RANK='4' WORLD_SIZE='4'"),
    (JOB | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE='8', which"),
    (JOB | {"MASTER_ADDR": ""}, "without MASTER_ADDR, which"),
    (JOB | {"LOCAL_WORLD_SIZE": "4", "MASTER_PORT": ""}, "without MASTER_PORT, which"),
    (JOB | {"MASTER_PORT": "http"}, "MASTER_PORT='http', which"),
    (JOB | {"MASTER_PORT": "70000"}, "MASTER_PORT='70000', which"),
]


@pytest.mark.parametrize(("variables", "said"), LEFT_OVER)
def test_variables_that_another_program_left_are_named(monkeypatch, variables, said):
    monkeypatch.setattr(os, "environ", variables)
    with pytest.raises(UserError, match=re.escape(said)) as error:
        distributed.join_world(Config().compute).__enter__()
    assert "\n" not in str(error.value)


def test_processes_that_a_launcher_does_not_start_are_refused(monkeypatch):
    work = Mock()
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(UserError, match=r"^--run.processes 2 needs no launcher: unset RANK"):
        launch.run_in_processes(work, RunConfig(processes=2), Config().compute)
    work.assert_not_called()
    monkeypatch.setattr(os, "environ", dict(JOB))
    for processes in ("auto", 2, 4):  # those of this machine, of all
        assert launch.run_in_processes(work, RunConfig(processes=processes), Config().compute) == 0


@pytest.mark.parametrize(
    ("left_out", "found"),
    [
        ((), (1, 4, 1, 2)),
        (("LOCAL_WORLD_SIZE",), (1, 4, 1, 1)),  # as scripts for SLURM start ranks
        (("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), (0, 1, 0, 1)),
    ],
)
def test_a_rank_knows_its_place_in_the_job(monkeypatch, left_out, found):
    monkeypatch.setattr(os, "environ", {name: JOB[name] for name in JOB if name not in left_out})
    assert distributed.read_ranks() == found


@pytest.mark.skipif(sys.platform != "linux", reason="gloo chooses elsewhere")
def test_nodes_meet_over_the_network_that_reaches_the_first():
    assert platform.interface_to("127.0.0.1") == "lo"
    assert platform.interface_to("no.such.host.invalid") is None


def trained_with(config, **knobs):
    """Train as a rank, with these attributes of DDP; the number formats of what ranks added up."""
    dtypes, wrap, reduce = set(), parallel.Replicas.wrap, dist.all_reduce

    def wrapped(*arguments):
        model = wrap(*arguments)
        for name, value in knobs.items():
            setattr(model, name, value)
        return model

    parallel.Replicas.wrap = wrapped
    dist.all_reduce = lambda tensor, **more: dtypes.add(tensor.dtype) or reduce(tensor, **more)
    train(config)
    return dtypes


def test_to_broadcast_buffers_in_each_step_would_change_nothing(config, tmp_path):
    config = changed(config, model__name="resnet9", optim__ema_decay=0.9)
    other = changed(config, run__dir=str(tmp_path / "other"))
    run_ranks(2, trained_with, config)
    run_ranks(2, partial(trained_with, broadcast_buffers=True), other)
    assert_same(final(config), final(other))


def test_ranks_may_exchange_gradients_in_bf16(config, trained_once):
    config = changed(config, compute__gradient_dtype="bf16", optim__accumulate=2)
    assert all(torch.bfloat16 in dtypes for dtypes in run_ranks(2, trained_with, config))
    assert losses(config.run.dir) == pytest.approx(losses(trained_once), rel=0.02)


def opened(folder):
    """What two downloads hold; the error of one that fails, and if another rank is to report it."""

    def download(path):
        if not path.exists():
            path.touch(exist_ok=False)
            time.sleep(0.1)  # in which others would find half of it
            path.write_text("whole")
        return path

    whole = lambda split: download(folder / split).read_text()  # noqa: E731
    tempfile.tempdir = str(folder)  # where ranks that fail leave the file they met in
    splits.open_dataset = lambda _, split: SimpleNamespace(fitted=lambda *_: whole(split))
    pretrained.published_weights = lambda _: SimpleNamespace(url="https://host/w-0123.pth")
    torch.hub.get_dir = lambda: str(folder)
    torch.hub.download_url_to_file = lambda _, path, *__, **___: download(Path(path))
    data, task = Config().data, "single-label"
    join = distributed.join_world(Config().compute, 20)
    with pytest.raises((OSError, RuntimeError)) as error, join as world:  # noqa: PT012
        found = [splits.open_source(data, "val", world, task)]
        found.append(pretrained.download("resnet18", world).read_text())
        splits.open_source(data, "no/folder", world, task)
    return found, error.type, is_peer_failure(error.value)


def test_one_process_of_a_machine_downloads_while_the_others_wait(tmp_path):
    first, second = run_ranks(2, opened, tmp_path)
    assert first == (["whole", "whole"], FileNotFoundError, False)
    # Where it fails, nobody waits for ever, and one alone tells why.
    assert (second[0], second[2]) == (["whole", "whole"], True)


def patient():
    """What rank 1 prints while rank 0 looks at files for longer than a collective waits."""
    distributed.LINE_SECONDS, seconds = 0.2, 2.0
    Source.file_digests = property(lambda _: time.sleep(seconds + 1) or {})
    source = Source(torch.tensor([0, 1]), ("ant", "bee"), torch.zeros(2, 8, 8, 3).byte())
    with (
        distributed.join_world(Config().compute, seconds) as world,
        redirect_stdout(StringIO()) as printed,
    ):
        checkpoint.Checkpoints(Config(), world, source)
        with world.local_main_first("downloading"):
            pass
        assert world.all_true(True)
    return printed.getvalue()


def test_one_rank_may_look_at_files_for_longer_than_ranks_wait_for_each_other():
    printed = "rank 1 waits for another: looking at the training files\n"
    assert printed in run_ranks(2, patient)[1]


@pytest.mark.parametrize(("seconds_per_step", "interval"), [(0.01, 50), (3.0, 1)])
def test_ranks_tell_each_other_about_twice_a_second(monkeypatch, seconds_per_step, interval):
    ranks = consensus.AsyncConsensus(distributed.World(torch.device("cpu")), timeout_seconds=60)
    ranks.last = (0, 0.0)
    monkeypatch.setattr(consensus.time, "monotonic", lambda: 100 * seconds_per_step)
    assert ranks.interval(100) == interval


def test_ranks_that_resume_at_a_late_step_tell_each_other_as_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(consensus.time, "monotonic", lambda: now[0])
    alone = distributed.World(torch.device("cpu"))
    ranks = consensus.AsyncConsensus(alone, timeout_seconds=60, step=1000)
    now[0] = 3.0  # the first step takes as long
    assert ranks.interval(1001) == 1


def starved(config):
    """Train as a rank, and return the exit code; rank 1 has no memory for more than 4 images."""
    if os.environ["RANK"] == "1":
        lack_memory(pytest.MonkeyPatch(), most=4, first=6)
    if diagnose := find_tools("watcher").get("diagnose"):
        diagnose.heartbeat.BEAT_SECONDS = 0.05
    launch.GRACE_SECONDS = 0
    return launch.attempt(lambda: train(config))


def test_out_of_memory_on_one_rank_has_all_start_again_with_half_at_once(config, trained_once):
    assert run_ranks(2, starved, config)[1] == EXIT_OUT_OF_MEMORY
    assert run_ranks(2, starved, config) == [0, 0]
    left = json.loads(Path(config.run.dir, "micro_batch.json").read_text())
    assert left == {"micro_batch": 4, "was": 8, "step": 5}
    assert losses(config.run.dir) == pytest.approx(losses(trained_once), rel=1e-3)


def failing(error, output):
    """Train as a rank; rank 1 raises. Who leaves the group after an error waits, as in NCCL."""
    if os.environ["RANK"] == "1":
        lack_memory(pytest.MonkeyPatch(), most=0, first=2, error=error)
    tempfile.tempdir = str(output.parent)  # where ranks that fail leave the file they met in
    leave = dist.destroy_process_group
    dist.destroy_process_group = lambda: signal.pause() if sys.exc_info()[0] else leave()
    try:
        train_in_file([*SMOKE.split(), "--run.dir", f"{output}.run"], output)
    finally:
        signal.pause()  # as the destructor of the group may


def end_of_failing(error, folder):
    """The exit code of the second of two ranks, which raises, and what it said."""
    ranks = [start(failing, error, folder / rank["RANK"], rank=rank)[0] for rank in job_of(2)]
    ranks[1].join(timeout=20)
    code = ranks[1].exitcode
    for process in ranks:
        process.kill()
    return code, (folder / "1").read_text()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NO_MEMORY[0], EXIT_OUT_OF_MEMORY, "rank 1: out of memory at step 2 with micro-batch "),
        (UserError("planted"), 2, "error: planted"),
        (ZeroDivisionError("planted"), 1, "failed on rank 1"),
    ],
)
def test_a_rank_that_fails_ends_though_the_others_wait_for_it(error, code, said, tmp_path):
    ended_with, text = end_of_failing(error, tmp_path)
    assert ended_with == code
    assert said in text


def left_group():
    """Whether the process group outlives the block of it, of which nobody here has a reference."""
    with distributed.join_world(Config().compute) as world:
        assert world.all_true(True)  # all have joined before one leaves
        group = weakref.ref(dist.group.WORLD)
    gc.collect()
    return group() is not None


def test_a_rank_waits_at_its_end_for_no_thread_of_its_process_group():
    assert run_ranks(2, left_group) == [True, True]


def num_written(config):
    """How many checkpoints this rank writes in a run."""
    written = Mock(wraps=checkpoint.write_whole)
    checkpoint.write_whole = written
    train(config)
    return written.call_count


def test_rank_0_alone_writes_checkpoints(config):
    assert run_ranks(2, num_written, config) == [ANY, 0]
    assert Path(config.run.dir, "checkpoints", "last.pt").exists()


def launched(folder):
    """Start two ranks, which meet and write down their numbers, and wait for them."""
    tempfile.tempdir = str(folder.parent)  # where the killed ranks leave the file they met in
    for rank in job_of(2):
        if os.fork() == 0:
            signal.alarm(30)
            os.environ |= rank
            with distributed.join_world(Config().compute):
                (folder / f"{os.getpid()}").touch()
                signal.pause()
    signal.pause()


def test_ranks_end_with_what_launched_them(tmp_path):
    launcher, _ = start(launched, tmp_path)
    pids = wait_for(lambda: len(found := os.listdir(tmp_path)) == 2 and found)
    launcher.kill()
    wait_for(lambda: not any(map(is_alive, pids)))


def test_a_rank_that_lost_another_and_is_told_to_end_leaves_the_report_to_that():
    with pytest.raises(StoppedError, match=r"^$") as error, Signals():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] closed")
    assert error.value.code == 128 + signal.SIGTERM


RANK = """
import os, signal, sys, time
is_first, is_main = os.environ["RUN_RESTARTS"] == "0", os.environ["RANK"] == "0"

def hang():
    signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for seconds in (0.2, 0.2, 60):  # two at once would be one
        time.sleep(seconds), os.kill(os.getppid(), signal.SIGINT)
"""
KILLED = "ended by SIGKILL (out of memory?)"


@pytest.mark.parametrize(
    ("rank", "code", "cause", "restarts"),
    [
        ("sys.exit(73 * is_first)", 0, "", 0),  # as often as it asks for it
        ("is_first and os.kill(os.getpid(), 9)", 0, KILLED, 1),
        ("os.kill(os.getpid(), 9)", 128 + 9, KILLED, 3),
        ("sys.exit(74)", 74, "a rank was lost", 3),
        ("sys.exit(2)", 2, "", 0),
        # A signal to the launcher while its ranks start; a second Ctrl-C where one hangs.
        ("is_main and os.kill(os.getppid(), 15); time.sleep(60)", 128 + 15, "", 0),
        ("is_main and hang()", 128 + 2, "", 0),
    ],
)
def test_a_rank_that_was_lost_is_started_again(rank, code, cause, restarts, *, monkeypatch, capfd):
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-S", "-c", RANK + rank])
    monkeypatch.setenv("RUN_RESTARTS", "0")  # what `launch` sets is put back
    assert launch.launch(2) == code
    said = re.sub(r"rank . \(process \d+\) was ", "", capfd.readouterr().err).splitlines()
    assert said == [f"{cause}: restart {n + 1} of 3, from the last save" for n in range(restarts)]


@pytest.mark.skipif(sys.platform != "linux", reason="files without names are Linux's")
def test_ranks_meet_in_a_file_that_is_gone_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with launch.meeting_place() as (variables, _):
        monkeypatch.setenv(*variables.popitem())
        stores = [distributed.open_store(rank, 2, 2, timedelta(seconds=9)) for rank in (0, 1)]
        stores[0].set("address", "here")
        assert stores[1].get("address") == b"here"
        assert not [*tmp_path.iterdir()]


def test_between_two_exchanges_no_rank_acts_on_what_it_knows_alone(monkeypatch):
    monkeypatch.setattr(consensus.dist, "new_group", Mock())
    ranks = consensus.AsyncConsensus(World(CPU.device, size=2), timeout_seconds=60)
    ranks.next_step = 10
    assert ranks.max(9, signal.SIGTERM, 7) == [0, 0]


def test_ranks_give_up_on_each_other_after_the_time_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(consensus.dist, "new_group", group := Mock())
    consensus.AsyncConsensus(World(CPU.device, size=2), timeout_seconds=7)
    assert group.call_args.kwargs["timeout"] == timedelta(seconds=7)


def meet(folder):
    """Meet in a file in a folder, and part."""
    tempfile.tempdir = str(folder)
    with distributed.join_world(Config().compute) as world:
        return world.all_true(bool(os.listdir(folder)))


def test_ranks_that_met_in_a_file_leave_none_behind(tmp_path):
    assert run_ranks(2, meet, tmp_path) == [True, True]
    assert os.listdir(tmp_path) == []


def test_an_exchange_needs_no_clock_that_moves(monkeypatch):
    monkeypatch.setattr(consensus.dist, "new_group", Mock())
    monkeypatch.setattr(consensus.time, "monotonic", lambda: 1.0)
    assert consensus.AsyncConsensus(World(CPU.device, size=2), 60).interval(1) >= 1


@pytest.mark.parametrize("name", launch.RESTART_COUNTS)
def test_a_job_that_starts_again_goes_on_though_it_was_to_start_over(monkeypatch, name):
    for other in launch.RESTART_COUNTS:
        monkeypatch.delenv(other, raising=False)
    fresh = RunConfig(fresh=True)
    assert launch.of_this_start(fresh).fresh
    monkeypatch.setenv(name, "0")
    assert launch.of_this_start(fresh).fresh
    monkeypatch.setenv(name, "1")
    assert not launch.of_this_start(fresh).fresh


def test_there_is_a_process_for_each_gpu_unless_another_number_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    run = RunConfig()
    found = {d: launch.num_processes(run, ComputeConfig(device=d)) for d in ("auto", "cuda", "cpu")}
    assert found == {"auto": 4, "cuda": 4, "cpu": 1}
    assert launch.num_processes(replace(run, processes=3), ComputeConfig(device="cpu")) == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert launch.num_processes(run, ComputeConfig()) == 1


TOLD_TO_END = """
import os, signal, sys, time
is_first, is_main = os.environ["RUN_RESTARTS"] == "0", os.environ["RANK"] == "0"

def fail(code):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.5), is_main and os.kill(os.getppid(), 15)
    time.sleep(0.1), sys.exit(code * is_first)
"""


@pytest.mark.parametrize("code", [73, 74])
def test_a_job_that_was_told_to_end_is_not_started_again(code, monkeypatch, capfd):
    words = [sys.executable, "-S", "-c", TOLD_TO_END + f"fail({code})"]
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setenv("RUN_RESTARTS", "0")
    assert launch.launch(2) == 128 + 15
    assert capfd.readouterr().err == ""


def test_a_job_that_is_to_start_over_does_so_though_its_first_start_began_nothing(
    config, monkeypatch
):
    for name in launch.RESTART_COUNTS:
        monkeypatch.delenv(name, raising=False)
    train(changed(config, epochs=1))
    num_rows = len(logged(config.run.dir))
    fresh = changed(config, epochs=1, run__fresh=True)
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "TrainData", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(fresh)
    monkeypatch.setenv(launch.RESTART_COUNTS[0], "1")
    again = replace(fresh, run=launch.of_this_start(fresh.run))
    assert again.run.fresh
    train(again)
    assert not launch.of_this_start(fresh.run).fresh
    assert len(logged(config.run.dir)) == num_rows


def told():
    """What a rank hears of two numbers that both ranks told, 1000 and its own."""
    with distributed.join_world(Config().compute, 20) as world:
        ranks = consensus.AsyncConsensus(world, 20)
        found = [ranks.max(step, 1000, world.rank) for step in (1, 2)]
        ranks.finish()
        return found


def test_ranks_hear_the_largest_number_of_any():
    assert run_ranks(2, told) == [[[0, 0], [1000, 1]]] * 2


@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16, 32])
def test_the_first_command_trains_on_as_many_gpus_as_machines_have(processes):
    check_batch_size(shapes().data.batch_size, 20_000, processes, accumulate=1)
