"""What the device does, looked at about once a second, beside the loop: use, memory, power, heat.

A thread asks NVML, or the kernel about a CPU. Data workers are forked while it runs, which does no
harm: they ask neither, and take none of its locks.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..runtime.distributed import World
from ..runtime.machine import num_cores

SAMPLE_SECONDS = 1.0
PATIENCE_SECONDS = 5.0  # with a driver that hangs, at the end of a run
UTILISATION, MEMORY = "device/utilisation", "device/memory_bytes"
POWER, TEMPERATURE = "device/power_watts", "device/temperature_celsius"
# How the readings of several GPUs make one, and those of several moments.
OF_DEVICES: dict[str, Callable[[list[float]], float]] = {
    UTILISATION: fmean,
    MEMORY: sum,
    POWER: sum,
    TEMPERATURE: max,
}
OF_MOMENTS = OF_DEVICES | {MEMORY: max, POWER: fmean}
POWERCAP, PROC = Path("/sys/class/powercap"), Path("/proc")

Readings = dict[str, float]


class Monitor:
    """Looks at the devices of this machine that the run uses, while a block runs."""

    def __init__(self, world: World) -> None:
        """The first process of a machine looks at the devices of all of its processes."""
        self.world, self.note = world, ""
        self.devices: list[Gpu | Processor] = []
        self.moments: list[Readings] = []  # since they were last asked for
        self.last: Readings = {}
        self.lock = threading.Lock()
        self.is_over = threading.Event()
        self.thread: threading.Thread | None = None
        if world.local_rank == 0:
            self.devices, self.note = find_devices(world)

    def __enter__(self) -> "Monitor":
        """Begin to look."""
        if self.devices:
            self.look()
            self.thread = threading.Thread(target=self.look_on, daemon=True, name="monitor")
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look once more, and end."""
        self.is_over.set()
        if self.thread is not None:
            self.thread.join(PATIENCE_SECONDS)

    def look_on(self) -> None:
        """Look until the block is left, and then a last time."""
        while not self.is_over.wait(SAMPLE_SECONDS):
            self.look()
        self.look()

    def look(self) -> None:
        """Read all devices once."""
        now = time.monotonic()
        readings = [device.read(now) for device in self.devices]
        with self.lock:
            self.moments.append(join(readings, OF_DEVICES))

    @property
    def joules(self) -> float:
        """Energy that this machine's devices took since the block was entered; 0 if not known."""
        return float(sum(device.joules for device in self.devices))

    def metrics(self) -> Readings:
        """What was read since this was last called, or else what was read last."""
        with self.lock:
            moments, self.moments = self.moments, []
        if moments:
            self.last = join(moments, OF_MOMENTS)
        return self.last

    def phrase(self, readings: Readings) -> str:
        """Readings as a line of progress has them: `gpu 97% 412 W 61C`."""
        parts = [
            words.format(readings[name])
            for name, words in (
                (UTILISATION, "{:.0%}"),
                (POWER, "{:.0f} W"),
                (TEMPERATURE, "{:.0f}C"),
            )
            if name in readings
        ]
        kind = "cpu" if self.world.device.type == "cpu" else "gpu"
        return " ".join([kind, *parts]) if parts else ""


def join(readings: list[Readings], how: dict[str, Callable[[list[float]], float]]) -> Readings:
    """One of many readings, of what any of them has."""
    found = {name: [one[name] for one in readings if name in one] for name in how}
    return {name: round(how[name](values), 4) for name, values in found.items() if values}


def find_devices(world: World) -> "tuple[list[Gpu | Processor], str]":
    """What this machine's processes compute with, and a line on why it can't be looked at."""
    if world.device.type == "cpu":
        return ([Processor(world.local_size)] if PROC.exists() else []), ""
    if world.device.type != "cuda":
        return [], ""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [Gpu(pynvml, number) for number in range(world.local_size)], ""
    except ImportError:
        return [], "power and use of the GPU are not shown: pip install nvidia-ml-py"
    except pynvml.NVMLError as error:
        return [], f"power and use of the GPU are not shown: {error}"


class Meter:
    """Energy: of a counter as far as there is one, else power times time."""

    def __init__(self, wraps_at: float = 0.0) -> None:
        """A counter that `wraps_at` some number of joules begins again there."""
        self.joules, self.wraps_at = 0.0, wraps_at
        self.counter: float | None = None
        self.time: float | None = None

    def advance(self, now: float, counter: float | None, watts: float | None = None) -> None:
        """Take a reading, in joules or watts."""
        if counter is not None and self.counter is not None:
            risen = counter - self.counter
            self.joules += risen if risen >= 0 else max(0.0, risen + self.wraps_at)
        elif watts is not None and self.time is not None:
            self.joules += watts * (now - self.time)
        self.counter, self.time = counter, now


class Gpu:
    """One GPU, or a part of one (MIG), as NVML shows it."""

    def __init__(self, nvml: Any, number: int) -> None:  # noqa: ANN401 - a module
        """The one that is `cuda:number` to torch."""
        self.nvml, self.handle = nvml, find_handle(nvml, torch.cuda.get_device_properties(number))
        self.meter = Meter()

    @property
    def joules(self) -> float:
        """Energy since it was first read."""
        return self.meter.joules

    def read(self, now: float) -> Readings:
        """Each value that its driver gives; a sensor that is lost is left out."""
        nvml, handle = self.nvml, self.handle
        asked = {
            UTILISATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            MEMORY: lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            TEMPERATURE: lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
        }
        readings: Readings = {}
        for name, ask in asked.items():
            with contextlib.suppress(nvml.NVMLError):
                readings[name] = float(ask())
        self.meter.advance(now, readings.pop("joules", None), readings.get(POWER))
        return readings


def find_handle(nvml: Any, properties: Any) -> Any:  # noqa: ANN401 - a module, and what torch gives
    """NVML's handle of a GPU of torch's, which `CUDA_VISIBLE_DEVICES` may have numbered otherwise.

    Raises:
        NVMLError: if there is none.
    """
    for kind in ("GPU", "MIG"):
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{properties.uuid}")
    place = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}"
    return nvml.nvmlDeviceGetHandleByPciBusId(f"{place}:{properties.pci_device_id:02x}.0")


class Processor:
    """This process and its data workers; the energy is that of all processors of the machine."""

    def __init__(self, local_size: int, proc: Path = PROC, powercap: Path = POWERCAP) -> None:
        """Of one of `local_size` processes, which share the cores."""
        self.proc, self.cores = proc, num_cores() / local_size
        self.counters = {path: Meter(wrap) for path, wrap in energy_counters(powercap)}
        self.last: dict[int, float] | None = None  # seconds of computing by process
        self.time = 0.0

    @property
    def joules(self) -> float:
        """Energy since it was first read."""
        return sum(meter.joules for meter in self.counters.values())

    def read(self, now: float) -> Readings:
        """The share of our cores that was busy since it was last read, and our memory."""
        readings: Readings = {}
        before, seconds = self.joules, now - self.time
        for path, meter in self.counters.items():
            meter.advance(now, energy(path))
        spent = self.seconds_of_computing()
        if self.last is not None and seconds > 0:
            busy = sum(spent[pid] - self.last.get(pid, 0.0) for pid in spent)
            readings[UTILISATION] = min(1.0, max(0.0, busy / seconds / self.cores))
            if self.joules > before:
                readings[POWER] = (self.joules - before) / seconds
        self.last, self.time = spent, now
        with contextlib.suppress(OSError):
            pages = int((self.proc / "self/statm").read_text().split()[1])
            readings[MEMORY] = float(pages * os.sysconf("SC_PAGE_SIZE"))
        return readings

    def seconds_of_computing(self) -> dict[int, float]:
        """Of this process and of its children that live."""
        return {pid: seconds for pid, seconds in self.family() if seconds is not None}

    def family(self) -> Iterator[tuple[int, float | None]]:
        """Process numbers, and the seconds each has computed for."""
        me = os.getpid()
        children: list[str] = []
        with contextlib.suppress(OSError):  # a kernel without this list
            children = (self.proc / f"{me}/task/{me}/children").read_text().split()
        for pid in (me, *map(int, children)):
            with contextlib.suppress(OSError):  # it has just ended
                fields = (self.proc / f"{pid}/stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])  # utime and stime of proc(5)
                yield pid, ticks / os.sysconf("SC_CLK_TCK")


def energy_counters(powercap: Path) -> list[tuple[Path, float]]:
    """The counters of RAPL that this user may read, and the joules at which each wraps.

    Of processors and their memory; `core` and `uncore` are parts of a processor, and `psys` has all
    of it again. Since 2020 most systems let root alone read them.
    """
    found = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            name = (folder / "name").read_text().strip()
            wraps_at = int((folder / "max_energy_range_uj").read_text()) / 1e6
            if name.startswith(("package", "dram")) and energy(folder) is not None:
                found.append((folder, wraps_at))
    return found


def energy(folder: Path) -> float | None:
    """What a counter stands at, in joules, if it can be read."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "energy_uj").read_text()) / 1e6
    return None
