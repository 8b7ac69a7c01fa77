"""What is said of the device is what it reports, and a device that reports nothing harms nobody."""

import os
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from image_classifier.config import Config
from image_classifier.data.loader import TrainData
from image_classifier.runtime.distributed import World
from image_classifier.tracking import monitor
from image_classifier.tracking.flops import Cost
from image_classifier.tracking.logger import Report
from image_classifier.tracking.monitor import (
    Meter,
    Monitor,
    Processor,
)
from image_classifier.tracking.peak import Peak

UUIDS = ("aaaa", "bbbb", "cccc")  # of a machine's GPUs, as NVML numbers them


class Nvml(ModuleType):
    """A driver of three GPUs: the power of each is 100 W x its number; it fails when told to."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """Of the driver."""

    def __init__(self) -> None:
        """All is well."""
        super().__init__("pynvml")
        self.lost: set[str] = set()  # functions that fail
        self.millijoules = 5_000_000

    def __getattr__(self, name: str) -> object:
        """The function `name` of NVML."""

        def answer(handle: object = None, *_: object) -> object:
            if name in self.lost:
                raise self.NVMLError("GPU is lost")
            if name == "nvmlDeviceGetHandleByUUID":
                kind, _, uuid = handle.partition("-")
                if kind != "GPU" or uuid not in UUIDS:
                    raise self.NVMLError("Not Found")
                return UUIDS.index(uuid)
            return {
                "nvmlInit": None,
                "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90),
                "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=2**30),
                "nvmlDeviceGetPowerUsage": 100_000 * (handle or 0),
                "nvmlDeviceGetTemperature": 60 + (handle or 0),
                "nvmlDeviceGetTotalEnergyConsumption": self.millijoules,
            }[name]

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
    device = torch.device("cuda", local_rank)
    return World(device, local_rank, count, local_rank, count)


@pytest.mark.usefixtures("nvml")
def test_it_is_the_gpus_that_torch_sees() -> None:
    one, both = Monitor(gpus()), Monitor(gpus(2))
    for looking in (one, both):
        looking.look()
    assert one.metrics() == {
        "device/utilisation": 0.9,
        "device/memory_bytes": 2**30,
        "device/power_watts": 100,
        "device/temperature_celsius": 61,
    }
    assert both.metrics()["device/power_watts"] == 300
    assert both.metrics()["device/temperature_celsius"] == 62
    assert both.phrase(both.metrics()) == "gpu 90% 300 W 62C"
    assert Monitor(gpus(2, local_rank=1)).devices == []  # the first process looks at both


def test_energy_is_counted_from_the_start_of_the_run(nvml: Nvml) -> None:
    looking = Monitor(gpus())
    looking.look()
    assert (looking.joules, type(looking.joules)) == (0, float)  # as ranks without a GPU have it
    nvml.millijoules += 7_000
    looking.look()
    assert looking.joules == pytest.approx(7)


def test_a_sensor_that_is_lost_on_the_way_is_left_out(nvml: Nvml) -> None:
    looking = Monitor(gpus())
    looking.look()
    nvml.lost = {"nvmlDeviceGetTemperature", "nvmlDeviceGetTotalEnergyConsumption"}
    looking.metrics()
    looking.look()
    assert "device/power_watts" in looking.metrics()
    nvml.lost |= {
        f"nvmlDeviceGet{what}" for what in ("UtilizationRates", "MemoryInfo", "PowerUsage")
    }
    looking.look()
    assert looking.metrics() == {}  # rather than what it was long ago
    assert looking.phrase({}) == ""


def test_without_its_library_or_driver_a_line_says_what_is_missing(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.lost = {"nvmlInit"}
    assert "GPU is lost" in Monitor(gpus()).note
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Monitor(gpus()) as looking:
        assert "pip install nvidia-ml-py" in looking.note
        assert looking.metrics() == {}


def test_energy_without_a_counter_is_power_times_time() -> None:
    meter = Meter()
    for second in range(5):
        meter.advance(second, None, watts=50.0)
    assert meter.joules == 200
    wrapping = Meter(wraps_at=100.0)
    for counter in (90.0, 95.0, 5.0):
        wrapping.advance(0, counter)
    assert wrapping.joules == 15


def test_energy_of_a_processor_is_that_of_its_packages_alone(tmp_path: Path) -> None:
    def set_counters(microjoules: int) -> None:
        for folder, name in {
            "intel-rapl:0": "package-0",
            "intel-rapl:0:0": "core",  # a part of it
            "intel-rapl:0:1": "dram",
            "intel-rapl:1": "psys",  # all of it again
        }.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "name").write_text(name + "\n")
            (tmp_path / folder / "max_energy_range_uj").write_text("1000000000\n")
            (tmp_path / folder / "energy_uj").write_text(f"{microjoules}\n")

    set_counters(10_000_000)
    processor = Processor(1, powercap=tmp_path)
    processor.read(0.0)
    set_counters(40_000_000)
    assert processor.read(2.0)["device/power_watts"] == 30
    assert processor.joules == 60


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's account of processes")
def test_a_cpu_that_computes_is_busy_and_one_that_waits_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "num_cores", lambda: 1)
    processor = Processor(1)
    processor.read(0.0)
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert 0.07 < processor.read(1.0)["device/utilisation"] < 0.3  # of a second, as it was told
    assert processor.read(2.0)["device/utilisation"] < 0.07


@pytest.mark.parametrize(("saved", "before"), [({"joules": 50.0}, 50.0), ({}, 0.0)])
def test_energy_adds_up_over_the_starts_of_a_run(
    config: Config, saved: dict[str, float], before: float
) -> None:
    Path(config.run.dir).mkdir()
    world = World(torch.device("cpu"))
    row = {"state": {"step": 3}, "report": {"loss": 0.0, "step": 3, **saved}}
    report = Report(config, world, TrainData(config, world), 8, row)
    report.monitor = SimpleNamespace(joules=7.0)
    assert report.state_dict()["joules"] == before + 7
    assert report.epoch_costs(1.0, report.joules()) == "; 7 J"  # what this start has taken
    report.cost, report.peak = Cost(1, 1, flops=10, activation_bytes=1), Peak(300.0, "")
    assert report.mfu(5.0) == 0.5
    assert report.epoch_costs(5.0, before + 2507) == "; 50% of the peak (MFU); 2.5 kJ"


@pytest.mark.usefixtures("nvml")
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")
def test_a_worker_that_is_forked_meanwhile_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "SAMPLE_SECONDS", 0.0001)
    with Monitor(gpus()) as looking, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(3):
            pid = os.fork()
            if not pid:
                torch.ones(10).numpy().copy()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert looking.metrics()
        thread = looking.thread
    assert not thread.is_alive()
