"""The monitor reports what NVML says; a GPU that says nothing harms no run."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from image_classifier.runtime.distributed import World
from image_classifier.tracking.monitor import Monitor

UUIDS = ("aaaa", "bbbb", "cccc")  # of a machine's GPUs, as NVML numbers them


class Nvml(ModuleType):
    """A driver of three GPUs: the power of each is 100 W x its number; what is `lost` fails."""

    class NVMLError(Exception):
        """Of the driver."""

    def __init__(self) -> None:
        """All is well."""
        super().__init__("pynvml")
        self.lost: set[str] = set()
        self.millijoules = 5_000_000

    def __getattr__(self, name: str) -> object:
        """The function `name` of NVML."""

        def answer(handle: object = None, *_: object) -> object:
            if name in self.lost:
                raise self.NVMLError("GPU is lost")
            return {
                "nvmlInit": lambda: None,
                "nvmlDeviceGetHandleByUUID": lambda: UUIDS.index(handle.removeprefix("GPU-")),
                "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=90),
                "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(used=2**30),
                "nvmlDeviceGetPowerUsage": lambda: 100_000 * handle,
                "nvmlDeviceGetTemperature": lambda: 60 + handle,
                "nvmlDeviceGetTotalEnergyConsumption": lambda: self.millijoules,
            }[name]()

        if not name.startswith("nvml"):
            raise AttributeError(name)
        return answer


def test_the_first_process_reads_the_gpus_that_torch_sees_as_far_as_they_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    # To torch there are the second and the third, as by `CUDA_VISIBLE_DEVICES=1,2`.
    see = lambda number: SimpleNamespace(uuid=UUIDS[number + 1])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", see)
    first = World(torch.device("cuda", 0), 0, 2, 0, 2)
    monitor, other = Monitor(first), Monitor(World(torch.device("cuda", 1), 1, 2, 1, 2))
    nvml.millijoules += 7_000
    readings = {
        "device/utilisation": 0.9,
        "device/memory_bytes": 2 * 2**30,
        "device/power_watts": 300,
        "device/temperature_celsius": 62,
        "energy_joules": 14,
    }
    assert monitor.metrics() == readings
    nvml.lost = {"nvmlDeviceGetTotalEnergyConsumption"}
    del readings["energy_joules"]
    assert monitor.metrics() == readings
    nvml.lost = {"nvmlInit"}
    lost = Monitor(first)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing, cpu = Monitor(first), Monitor(World(torch.device("cpu")))
    assert "GPU is lost" in lost.note
    assert "pip install nvidia-ml-py" in missing.note
    assert [silent.metrics() for silent in (other, lost, missing, cpu)] == [{}] * 4
