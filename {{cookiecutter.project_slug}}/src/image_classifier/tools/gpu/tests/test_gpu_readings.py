"""Readings of the GPUs, by a stand-in for NVML and by the real one."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed

from image_classifier.runtime.distributed import World
from image_classifier.tools.gpu.observer import open_observer
from image_classifier.train import train

UUIDS = ("aaaa", "bbbb", "cccc")  # of a machine's GPUs, as NVML numbers them


def open_on(world):
    """The observer of a run on `world`."""
    return open_observer(SimpleNamespace(world=world))


def test_the_first_process_reads_the_gpus_that_torch_sees_as_far_as_they_can_be_read(monkeypatch):
    def lose(*_):
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
    world = World(torch.device("cuda", 0), size=2, local_size=2)
    observer = open_on(world)
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda _: 5_007_000
    readings = {
        "device/utilisation": 0.9,
        "device/memory_bytes": 2 * 2**30,
        "device/power_watts": 300,
        "device/temperature_celsius": 62,
        "energy_joules": 14,
    }
    assert observer.metrics(None) == readings
    nvml.nvmlDeviceGetTotalEnergyConsumption = lose
    del readings["energy_joules"]
    assert observer.metrics(None) == readings
    nvml.nvmlInit = lose
    lost = open_on(world)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing, cpu = open_on(world), open_on(World(torch.device("cpu")))
    assert "GPU is lost" in lost.notes[0]
    assert "pip install nvidia-ml-py" in missing.notes[0]
    assert [silent.metrics(None) for silent in (lost, missing, cpu)] == [{}] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_power_temperature_and_energy_are_logged(config):
    pytest.importorskip("pynvml")
    train(changed(config, compute__device="cuda", epochs=20))
    rows = map(json.loads, Path(config.run.dir, "metrics.jsonl").read_text().splitlines())
    *_, last = (row for row in rows if "train/loss" in row)
    assert 5 < last["device/power_watts"] < 2000
    assert 10 < last["device/temperature_celsius"] < 110
    assert last["energy_joules"] > 0
