"""Readings of the GPUs, by a stand-in for NVML and by the real one."""

import math
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, logged

from image_classifier.runtime.distributed import World
from image_classifier.runtime.platform import install_command
from image_classifier.tools.monitor.gpu import Gpus
from image_classifier.train import train


def test_the_first_process_reads_the_gpus_that_torch_sees_as_far_as_they_can_be_read(monkeypatch):
    lost = OSError("GPU is lost")
    nvml = Mock(NVMLError=OSError)
    nvml.nvmlInit.side_effect = [None, lost]
    nvml.nvmlDeviceGetHandleByUUID = ["GPU-a", "GPU-b", "GPU-c"].index
    nvml.nvmlDeviceGetUtilizationRates.return_value.gpu = 90
    nvml.nvmlDeviceGetMemoryInfo.return_value.used = 2**30
    nvml.nvmlDeviceGetPowerUsage = lambda gpu: 100_000 * gpu
    nvml.nvmlDeviceGetTemperature = lambda gpu, _: 60 + gpu
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = [0, 5000, 7000, 12_000, lost]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    # To torch there are the second and the third, as by `CUDA_VISIBLE_DEVICES=1,2`.
    see = lambda number: SimpleNamespace(uuid="bc"[number])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", see)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = World(torch.device("cuda", 0), size=4, local_size=4)
    gpus = Gpus(world)
    readings = {"device/utilization": 0.9, "device/memory_bytes": 2 * 2**30}
    readings |= {"device/power_watts": 300, "device/temperature_celsius": 62}
    assert gpus.read() == readings | {"energy_joules": 14}  # since the start
    assert gpus.read() == readings
    assert gpus.utilization() == 0.9
    nvml.nvmlDeviceGetUtilizationRates.side_effect = lost
    assert math.isnan(gpus.utilization())
    unreadable = Gpus(world)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = Gpus(world)
    cpu = Gpus(World(torch.device("cpu")))
    assert "GPU is lost" in unreadable.note
    assert install_command("nvidia-ml-py") in missing.note
    for silent in (unreadable, missing, cpu):
        assert silent.read() == {}
        assert math.isnan(silent.utilization())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_power_temperature_and_energy_are_logged(config):
    pytest.importorskip("pynvml")
    train(changed(config, compute__device="cuda", epochs=20))
    *_, last = (row for row in logged(config.run.dir) if "train/loss" in row)
    assert 5 < last["device/power_watts"] < 2000
    assert 10 < last["device/temperature_celsius"] < 110
    assert last["energy_joules"] > 0
