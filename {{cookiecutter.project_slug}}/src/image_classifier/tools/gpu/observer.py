"""GPU readings by NVML: utilization, memory, power, temperature and energy.

They need the library nvidia-ml-py. Nothing is read on a CPU.
"""

from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from types import ModuleType
from typing import Any

import torch

from ...runtime.machine import nvml_handle
from ...runtime.platform import install_command
from ...tracking import Observer, Setup, Speed

ENERGY = "energy_joules"
# How to read each value of one GPU, and how the values of several GPUs make one.
READINGS: dict[str, tuple[Callable[[Any, Any], float], Callable[[list[float]], float]]] = {
    "device/utilisation": (lambda nvml, g: nvml.nvmlDeviceGetUtilizationRates(g).gpu / 100, fmean),
    "device/memory_bytes": (lambda nvml, g: nvml.nvmlDeviceGetMemoryInfo(g).used, sum),
    "device/power_watts": (lambda nvml, g: nvml.nvmlDeviceGetPowerUsage(g) / 1000, sum),
    "device/temperature_celsius": (lambda nvml, g: nvml.nvmlDeviceGetTemperature(g, 0), max),
    ENERGY: (lambda nvml, g: nvml.nvmlDeviceGetTotalEnergyConsumption(g) / 1000, sum),
}


def open_observer(setup: Setup) -> Observer:
    """Read the GPUs of all processes on this machine; a note says why they can't be read."""
    world = setup.world
    if world.device.type != "cuda":
        return Observer()
    try:
        import pynvml
    except ImportError:
        note = f"for the GPU's utilization and power: {install_command('nvidia-ml-py')}"
        return Observer(notes=(note,))
    try:
        pynvml.nvmlInit()
        # With a GPU to each task of a cluster, a rank sees its own alone.
        seen = min(world.local_size, torch.cuda.device_count())
        gpus = [nvml_handle(pynvml, number) for number in range(seen)]
    except pynvml.NVMLError as error:
        return Observer(notes=(f"the GPU's utilization and power are unknown: {error}",))
    joules_at_start = read_gpus(pynvml, gpus).get(ENERGY, 0.0)

    def metrics(_: Speed | None) -> dict[str, float]:
        """The readings; energy is since the start of the run."""
        found = read_gpus(pynvml, gpus)
        if ENERGY in found:
            found[ENERGY] = round(found[ENERGY] - joules_at_start, 1)
        return found

    return Observer(metrics=metrics)


def read_gpus(nvml: ModuleType, gpus: list[Any]) -> dict[str, float]:
    """The readings by their names in `metrics.jsonl`, without those that a GPU does not give."""
    found = {}
    for name, (read, join) in READINGS.items():
        with suppress(nvml.NVMLError):
            found[name] = round(join([float(read(nvml, gpu)) for gpu in gpus]), 4)
    return found
