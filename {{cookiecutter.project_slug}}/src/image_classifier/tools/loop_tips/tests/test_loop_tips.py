"""The rows of this tool in `bench`: each way to write a loop trains, on the same images."""

import json
import os
import signal
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed, mixed, wait_for

from image_classifier.data import TrainData
from image_classifier.extensions import of_tools
from image_classifier.runtime.distributed import World

TOOLS = "image_classifier.tools"
bench = pytest.importorskip(f"{TOOLS}.bench.bench").bench
Budget = pytest.importorskip(f"{TOOLS}.bench.measure").Budget
timed_run = pytest.importorskip(f"{TOOLS}.bench.timed_run")
gpu = pytest.importorskip(f"{TOOLS}.loop_tips.gpu")
loading = pytest.importorskip(f"{TOOLS}.loop_tips.loading")
tips = pytest.importorskip(f"{TOOLS}.loop_tips.tips")

CPU = World(torch.device("cpu"))
TINY = Budget(row_seconds=0, round_seconds=0, rounds=(2, 2), warmup_seconds=0)
LOADING = (loading.persistent_workers, loading.shared_batches, loading.uint8)


def test_a_plain_dataloader_brings_the_same_images(config):
    config = changed(config, data__workers=0)
    setup = timed_run.Setup(config, CPU, TrainData(config, CPU))
    datasets = timed_run.DatasetCache(CPU)
    for tip in LOADING:
        seen, restarts = [], []
        for variant in tip(setup).values():
            data = datasets.open(variant.config)
            run = timed_run.TimedRun(variant.config, CPU, data, variant.change)
            pairs = map(run.augment, run.batches(0, 2), (0, 1))
            seen.append([deepcopy(pair) for pair in pairs])  # as a later one may overwrite it
            assert run.run(1) > 0
            restarts.append(run.restarts_workers)
            run.close()
        assert restarts == [tip is loading.persistent_workers, False]
        torch.testing.assert_close(seen[1:], seen[:-1])


def test_images_that_an_epoch_repeats_have_their_labels(config):
    pytest.importorskip(f"{TOOLS}.balance")
    config = changed(config, data__workers=0, data__balance="sampling")
    data = TrainData(changed(config, data__where="stream"), CPU)
    plain = loading.PlainDataset(data.loader.samples, as_float=False)
    _, label, index = plain[0, 3 * len(data) + 5]
    assert (label, index) == (data.source.labels[5], 5)


def test_processes_share_the_workers_of_one(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for workers, share in ((16, 2), (3, 1), (0, 0)):
        config = changed(config, data__workers=workers)
        setup = timed_run.Setup(config, World(torch.device("cuda", 0)), data=None)
        found = tips.data_parallel(setup).values()
        assert [variant.config.data.workers for variant in found] == [workers, share]
        assert {variant.config.data.batch_size for variant in found} == {8 * 16}


def test_what_training_does_is_the_variant_that_nothing_is_changed_of(config):
    config = changed(config, data__workers=0)
    setup = timed_run.Setup(config, World(torch.device("cuda", 0)), data=None)
    usual = {
        tips.fused_optimizer: "fused",
        tips.set_to_none: "None",
        tips.conv_bias: "no bias",
        tips.on_device: "on the device",
        tips.item: "nothing is read",
        tips.empty_cache: "never",
        tips.profiler: "off",
        tips.shared_batches: "shared",
    }
    for tip, name in usual.items():
        changes = {name: variant.change for name, variant in tip(setup).items()}
        assert [name for name in changes if changes[name] is None] == [name]


@pytest.mark.parametrize("foreach", [False, True])
def test_the_optimizer_is_not_fused_where_that_is_compared(config, foreach):
    run = timed_run.TimedRun(config, CPU, TrainData(config, CPU))
    tips.unfuse(run, foreach=foreach)
    (way,) = {(group["fused"], group["foreach"]) for group in run.state.optimizer.param_groups}
    assert way == (False, foreach)


def test_processes_take_as_long_as_the_slowest():
    done = [Future() for _ in range(3)]
    for future, seconds in zip(done, (1.0, 3.0, 2.0), strict=True):
        future.set_result(seconds)
    ranks = [SimpleNamespace(submit=lambda *_, own=own: own) for own in done]
    assert gpu.MultiProcessRun.run(SimpleNamespace(ranks=ranks), 1) == 3.0


def test_of_processes_that_wait_for_one_that_failed_none_stays(config, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # or it knows another one already
    run = gpu.MultiProcessRun(changed(config, data__limit=32, compute__device="cpu"), 2)
    assert run.run(1) > 0
    processes = [process for rank in run.ranks for process in rank._processes.values()]
    try:
        assert [*tmp_path.glob("store-*")]
        first, second = (process.pid for process in processes)
        os.kill(first, signal.SIGSTOP)  # as one that waits in a kernel of NCCL
        found = ThreadPoolExecutor(1).submit(run.run, 1)
        time.sleep(1)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            found.result(timeout=20)
        run.close()
        wait_for(lambda: not any(process.is_alive() for process in processes))
        assert not [*tmp_path.glob("store-*")]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_row_works_or_says_what_it_needs(on_photos, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    knobs = {"compute__device": device, "run__processes": 1, "data__where": "stream"}
    if "augment.policy" in of_tools():  # as most presets for photographs have
        knobs["augment__policy"] = "trivialaugment"
    config = changed(on_photos, data__workers=0, **mixed(mixup=0.2), **knobs)
    names = [tip.__name__ for tip in tips.TIPS if device == "cuda" or tip not in LOADING]
    bench(config, config, "python train.py smoke", names, TINY)
    for row in json.loads(Path(config.run.dir, "bench.json").read_text())["rows"]:
        assert row["reason"] in {"", "needs a GPU", "needs 2 GPUs"}
        assert not row["reason"] or device == "cpu" or row["name"] == "data_parallel"
        assert row["reason"] or len(row["variants"]) >= 2
        for variant in row["variants"]:
            assert not variant["failure"], (row["name"], variant)
