"""The monitor reports what NVML says; a GPU that says nothing harms no run."""

import sys
from types import SimpleNamespace

import pytest
import torch

from image_classifier.runtime.distributed import World
from image_classifier.tracking.monitor import Monitor

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
