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


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """To torch there are the second and the third, as by `CUDA_VISIBLE_DEVICES=1,2`."""
    driver = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=UUIDS[number + 1])
    )
    return driver


def gpus(count: int = 1, local_rank: int = 0) -> World:
    """A process of `count`, each with a GPU."""
    return World(torch.device("cuda", local_rank), local_rank, count, local_rank, count)


def test_the_first_process_reads_the_gpus_that_torch_sees(nvml: Nvml) -> None:
    one, both = Monitor(gpus()), Monitor(gpus(2))
    assert one.metrics() == {
        "device/utilisation": 0.9,
        "device/memory_bytes": 2**30,
        "device/power_watts": 100,
        "device/temperature_celsius": 61,
        "energy_joules": 0,
    }
    assert both.phrase(both.metrics()) == "gpu 90% 300 W 62C"
    assert Monitor(gpus(2, local_rank=1)).metrics() == {}
    nvml.millijoules += 7_000
    assert [monitor.metrics()["energy_joules"] for monitor in (one, both)] == [7, 14]


def test_a_reading_that_fails_is_left_out(nvml: Nvml) -> None:
    monitor = Monitor(gpus())
    nvml.lost = {"nvmlDeviceGetTemperature", "nvmlDeviceGetTotalEnergyConsumption"}
    assert monitor.phrase(monitor.metrics()) == "gpu 90% 100 W"
    assert "energy_joules" not in monitor.metrics()


def test_without_a_gpu_its_library_or_driver_there_are_no_readings(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.lost = {"nvmlInit"}
    lost = Monitor(gpus())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing, cpu = Monitor(gpus()), Monitor(World(torch.device("cpu")))
    assert "GPU is lost" in lost.note
    assert "pip install nvidia-ml-py" in missing.note
    assert cpu.note == ""
    for monitor in (lost, missing, cpu):
        assert (monitor.metrics(), monitor.phrase({})) == ({}, "")
