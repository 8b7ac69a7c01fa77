"""The rows of this tool in `bench`: each way to write a loop trains, on the same images."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import changed, mixed

from image_classifier.data import TrainData
from image_classifier.extensions import of_tools
from image_classifier.runtime.distributed import World

TOOLS = "image_classifier.tools"
bench = pytest.importorskip(f"{TOOLS}.bench.bench").bench
Budget = pytest.importorskip(f"{TOOLS}.bench.measure").Budget
timed_run = pytest.importorskip(f"{TOOLS}.bench.timed_run")
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
        seen = []
        for variant in tip(setup).values():
            data = datasets.open(variant.config)
            run = timed_run.TimedRun(variant.config, CPU, data, variant.change)
            pairs = map(run.augment, run.batches(0, 2), (0, 1))
            seen.append([deepcopy(pair) for pair in pairs])  # as a later one may overwrite it
            assert run.run(1) > 0
            run.close()
        torch.testing.assert_close(seen[1:], seen[:-1])


def test_images_that_an_epoch_repeats_have_their_labels(config):
    pytest.importorskip(f"{TOOLS}.balance")
    config = changed(config, data__workers=0, data__balance="sampling")
    data = TrainData(changed(config, data__where="stream"), CPU)
    plain = loading.PlainDataset(data.loader.samples, as_float=False)
    _, label, index = plain[0, 3 * len(data) + 5]
    assert (label, index) == (data.source.labels[5], 5)


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
