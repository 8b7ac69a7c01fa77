"""What limits the speed of a run is said after each epoch."""

import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import changed

from image_classifier.config import Config
from image_classifier.data.datasets.source import Source
from image_classifier.runtime.distributed import World
from image_classifier.tools.monitor import bottleneck
from image_classifier.tools.monitor.gpu import Gpus
from image_classifier.tracking import Speed
from image_classifier.train import train

LOADING = "Loading is the limit: 100 images/s, while the model could take 200. Try "
MODEL = "The model is the limit: 100 images/s"
CPU, GPU = World(torch.device("cpu"), size=2), World(torch.device("mps"))
SHARED = World(torch.device("cpu"), size=2, local_size=2)  # two processes on one machine
HOUR = {"total_steps": 11250, "batch_size": 32, "world": CPU}  # at 100 images/s
IDLE, DECODED = (SimpleNamespace(num_filled=count, busy_seconds=4.0) for count in (0, 300))


@pytest.mark.parametrize(
    ("waited", "recipe", "known", "said"),
    [
        (0.5, "", {"where": "device"}, f"{LOADING}a smaller --data.image-size."),
        (0.5, "", {"workers": 1}, f"{LOADING}`prepare` (smaller images) or --data.workers"),
        (0.5, "raw", {"workers": 1}, f"{LOADING}--data.workers 2 (now 1)."),
        (0.5, "raw", {}, f"{LOADING}more CPU cores, or a smaller --data.image-size."),
        (0.5, "raw", {"workers": 1, "world": SHARED}, f"{LOADING}more CPU cores, or a smaller"),
        (0.05, "", {}, f"{MODEL}. Try a smaller --model.name or --data.image-size."),
        (0.05, "", {"world": GPU}, f"{MODEL}. Try --compute.compile."),
        (0.05, "", {"loader": DECODED}, f"{MODEL}, while loading could give 300. Try a smaller"),
    ],
)
def test_what_is_slow_is_named_with_the_option_to_try(monkeypatch, waited, recipe, known, said):
    monkeypatch.setattr(bottleneck, "num_cores", lambda: 2)
    data = {"where": "stream", "workers": 2, "loader": IDLE} | HOUR | known
    data = SimpleNamespace(source=SimpleNamespace(paths=[], recipe=recipe), **data)
    speed = Speed(step=10, image_size=32, images_per_second=100.0, waited=waited)
    judge = bottleneck.open_judge(Config(), data, Gpus(CPU))
    found, _, advice = judge(speed).partition(" Try ")
    assert f"{found} Try {advice}".startswith(said)
    assert judge(speed) == found  # the advice comes once


def test_new_advice_is_given_when_something_else_limits_a_run():
    data = SimpleNamespace(where="device", **HOUR)
    judge = bottleneck.open_judge(Config(), data, Gpus(CPU))
    speeds = [Speed(1, 32, 100.0, waited=waited) for waited in (0.0, 0.5, 0.0, 0.5)]
    assert ["Try" in judge(speed) for speed in speeds] == [True, True, False, False]


def test_no_other_start_is_advised_for_the_last_minutes_of_a_run():
    data = SimpleNamespace(where="device", **HOUR)
    judge = bottleneck.open_judge(Config(), data, Gpus(CPU))
    said = [judge(Speed(step, 32, 100.0, waited=0.0)) for step in (9500, 9300)]
    assert ["Try" in line for line in said] == [False, True]


def test_what_the_model_may_gain_by_is_what_it_does_not_use_yet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    data = SimpleNamespace(world=World(torch.device("cuda", 0)))
    slow = changed(Config(), precision="fp32", compute__channels_last=False)
    advice = "--precision bf16 or --compute.channels-last"
    assert bottleneck.faster_model(slow, data) == f"{advice} or --compute.compile"
    if hasattr(slow.compute, "parallel"):  # of the tool fsdp, which compiles nothing
        assert bottleneck.faster_model(changed(slow, compute__parallel="fsdp"), data) == advice


LAUNCHING = "Kernel launch overhead is the limit: 100 images/s, GPU utilization 27%. Try "


BY_LOADING = f"{LOADING}a smaller --data.image-size."


@pytest.mark.parametrize(
    ("percent", "waited", "said"),
    [
        (97, 0.5, f"{MODEL}. Try --compute.compile."),
        (60, 0.5, BY_LOADING),
        (math.nan, 0.5, BY_LOADING),
    ],
)
def test_a_busy_gpu_is_the_limit_though_its_host_waits_for_images(
    monkeypatch, percent, waited, said
):
    gpus = SimpleNamespace(utilization=lambda: percent / 100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    world = World(torch.device("cuda", 0))
    data = {"where": "device", "steps_per_epoch": 500} | HOUR | {"world": world}
    judge = bottleneck.open_judge(Config(), SimpleNamespace(**data), gpus)
    assert judge(Speed(1, 32, 100.0, waited=waited)) == said


@pytest.mark.parametrize(
    ("percent", "num_steps", "compiled", "free", "said"),
    [
        (27, 500, False, 9, f"{LAUNCHING}a larger --data.batch-size or --compute.compile."),
        (27, 500, True, 9, f"{LAUNCHING}a larger --data.batch-size."),
        (27, 500, False, 3, f"{LAUNCHING}--compute.compile."),
        (27, 500, True, 3, f"{LAUNCHING}a CPU with faster cores."),
        (80, 500, False, 9, f"{MODEL}. Try --compute.compile."),
        (27, 1, False, 9, f"{MODEL}. Try --compute.compile."),  # in a third of a second
        (math.nan, 500, False, 9, f"{MODEL}. Try --compute.compile."),  # it can't be read
    ],
)
def test_a_gpu_that_waits_for_its_kernels_is_told_from_a_slow_model(
    monkeypatch, percent, num_steps, *, compiled, free, said
):
    gpus = SimpleNamespace(utilization=lambda: percent / 100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1)
    monkeypatch.setattr(bottleneck, "device_memory_bytes", lambda _: free)
    world = World(torch.device("cuda", 0))
    data = {"where": "device", "steps_per_epoch": num_steps} | HOUR | {"world": world}
    config = changed(Config(), compute__compile=compiled)
    judge = bottleneck.open_judge(config, SimpleNamespace(**data), gpus)
    assert judge(Speed(1, 32, 100.0, waited=0.0)).startswith(said)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_small_batches_on_a_gpu_are_limited_by_launching(config, capsys):
    pytest.importorskip("pynvml")
    config = changed(config, compute__device="cuda", data__batch_size=2, data__limit=4096)
    train(changed(config, epochs=1, run__log_every_steps=100))
    said = capsys.readouterr().out
    time.sleep(bottleneck.READING_SECONDS)
    if Gpus(World(torch.device("cuda"))).utilization() > 0:
        pytest.skip("other programs use the GPU")
    assert "Kernel launch overhead is the limit: " in said


def test_waiting_for_slow_images_is_measured(config, monkeypatch, capsys):
    read = Source.read
    monkeypatch.setattr(Source, "read", lambda *which: time.sleep(0.008) or read(*which))
    train(changed(config, epochs=1, data__where="stream", data__workers=0, data__limit=48))
    rate = re.search(r"Loading is the limit: (\d+) images/s, while", capsys.readouterr().out)[1]
    assert 4 < int(rate) <= 125  # a machine that has other things to do is slower
