"""What a run says of its speed and its cost: the limit, FLOPs, readings of the GPU."""

import json
import re
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed
from torch import nn

from image_classifier.config import Config
from image_classifier.data.datasets.source import Source
from image_classifier.models.resnet9 import ResNet9
from image_classifier.precision import Precision
from image_classifier.runtime.distributed import World
from image_classifier.tracking import (
    RunLogger,
    bottleneck,
    logger,
)
from image_classifier.tracking.flops import (
    count_flops,
    datasheet,
    find_peak,
)
from image_classifier.tracking.monitor import Monitor
from image_classifier.train import train

LOADING = "Loading is the limit: 100 images/s, while the model could take 200. Try "
MODEL = "The model is the limit: 100 images/s"


@pytest.mark.parametrize(
    ("waited", "known", "said"),
    [
        (0.5, {"where": "device"}, f"{LOADING}less of --augment."),
        (0.5, {"workers": 1}, f"{LOADING}`prepare`, which stores the images smaller or "),
        (0.5, {"workers": 1, "recipe": "raw"}, f"{LOADING}--data.workers 2 (now 1)."),
        (0.5, {"recipe": "raw"}, f"{LOADING}more CPU cores, or a smaller --data.image-size."),
        (0.05, {}, f"{MODEL}. Try --compute.compile."),
        (0.05, {"ceiling": 150.0}, f"{MODEL}, while loading could give 300. Try --compute."),
    ],
)
def test_what_is_slow_is_named_with_the_option_to_try(
    monkeypatch: pytest.MonkeyPatch, waited: float, known: dict, said: str
) -> None:
    monkeypatch.setattr(bottleneck, "num_cores", lambda: 2)
    source = SimpleNamespace(paths=[], recipe=known.pop("recipe", ""))
    two = replace(World(torch.device("cpu")), size=2)
    usual = {"where": "stream", "workers": 2, "ceiling": None, "world": two, "source": source}
    data = SimpleNamespace(**usual | known)
    assert bottleneck.verdict(Config(), data, 100.0, waited).startswith(said)


def test_the_first_step_is_not_in_the_speed_as_it_compiles(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, seconds = ResNet9.forward, [0.0]

    def forward_slowly_at_first(model: ResNet9, images: torch.Tensor) -> torch.Tensor:
        seconds[0] += 100 if seconds[0] == 0 else 1
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_slowly_at_first)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _: None)
    monkeypatch.setattr(logger.time, "monotonic", lambda: seconds[0])
    train(changed(config, epochs=1, compute__compile=True, run__log_every_steps=1))
    rows = map(json.loads, Path(config.run.dir, "metrics.jsonl").read_text().splitlines())
    first, row, *_ = (row for row in rows if "train/loss" in row)
    assert "train/images_per_second" not in first
    assert row["train/images_per_second"] == 16  # a step each second, of 16 images
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert most / 2 < row["memory_bytes"] <= most
    said = capsys.readouterr().out
    assert "  The model is the limit: 16 images/s. " in said
    assert " 1 process, " in said
    assert ", fp32; as --precision says; seed 0: " in said
    assert "  ETA 0:00\n" in said


def test_waiting_for_slow_images_is_measured(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Source.read

    def read_slowly(*arguments: object) -> torch.Tensor:
        time.sleep(0.008)
        return read(*arguments)

    monkeypatch.setattr(Source, "read", read_slowly)
    config = changed(config, epochs=1, data__where="stream", data__workers=0)
    train(changed(config, data__limit=48))
    rate = re.search(r"Loading is the limit: (\d+) images/s, while", capsys.readouterr().out)[1]
    assert 4 < int(rate) <= 125  # a machine that has other things to do is slower


def test_flops_are_those_by_hand_and_counting_changes_nothing() -> None:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(4 * 64, 10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert count_flops(model, 8) == 2 * (64 * 3 * 9 * 4 + 256 * 10)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


def test_attention_is_counted_although_frozen_weights_have_a_kernel_of_their_own() -> None:
    tokens = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Flatten(2), nn.Unflatten(2, (16, 12)))
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    model = nn.Sequential(tokens, nn.Flatten(0, 1), layer)
    trained = count_flops(model, 8)
    assert trained > 2 * 16 * 12 * (4 * 12 + 2 * 24)
    assert count_flops(model.requires_grad_(False), 8) == trained


def test_small_images_and_frozen_layers_cost_less(config: Config) -> None:
    log = SimpleNamespace(config=config, world=SimpleNamespace(size=2))
    log.forward_flops, log.peak_flops, log.unfreeze_step = 100, 1000, 4
    for log.step_done, log.image_size, mfu in ((4, 32, 0.5), (5, 32, 1.5), (5, 16, 0.375)):
        assert RunLogger.mfu(log, rate=10) == mfu


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 156),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, None),
    ],
)
def test_a_datasheet_is_that_of_the_very_gpu(
    name: str, dtype: torch.dtype, teraflops: float | None
) -> None:
    assert datasheet(name, dtype) == (teraflops and pytest.approx(teraflops * 1e12))


def test_a_device_without_a_datasheet_is_measured(config: Config) -> None:
    flops, source = find_peak(Precision("fp32", config.compute, config.optim, torch.device("cpu")))
    assert 1e8 < flops < 1e15
    assert "measured" in source


UUIDS = ("aaaa", "bbbb", "cccc")  # of a machine's GPUs, as NVML numbers them


def test_the_first_process_reads_the_gpus_that_torch_sees_as_far_as_they_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(*_: object) -> None:
        raise OSError("GPU is lost")

    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: UUIDS.index(uuid.removeprefix("GPU-")),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=90),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=2**30),
        nvmlDeviceGetPowerUsage=lambda gpu: 100_000 * gpu,
        nvmlDeviceGetTemperature=lambda gpu, _: 60 + gpu,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: 5_000_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    # To torch there are the second and the third, as by `CUDA_VISIBLE_DEVICES=1,2`.
    see = lambda number: SimpleNamespace(uuid=UUIDS[number + 1])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", see)
    first = World(torch.device("cuda", 0), 0, 2, 0, 2)
    monitor, other = Monitor(first), Monitor(World(torch.device("cuda", 1), 1, 2, 1, 2))
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda _: 5_007_000
    readings = {
        "device/utilisation": 0.9,
        "device/memory_bytes": 2 * 2**30,
        "device/power_watts": 300,
        "device/temperature_celsius": 62,
        "energy_joules": 14,
    }
    assert monitor.metrics() == readings
    nvml.nvmlDeviceGetTotalEnergyConsumption = lose
    del readings["energy_joules"]
    assert monitor.metrics() == readings
    nvml.nvmlInit = lose
    lost = Monitor(first)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing, cpu = Monitor(first), Monitor(World(torch.device("cpu")))
    assert "GPU is lost" in lost.note
    assert "pip install nvidia-ml-py" in missing.note
    assert [silent.metrics() for silent in (other, lost, missing, cpu)] == [{}] * 4
