"""GPU readings by NVML: utilization, memory, power, temperature and energy.

They need the library nvidia-ml-py. Nothing is read on a CPU.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch

from ...runtime.distributed import World
from ...runtime.platform import install_command

ENERGY = "energy_joules"
# How to read each value of one GPU, and how the values of several GPUs make one.
READINGS: dict[str, tuple[Callable[[Any, Any], float], Callable[[list[float]], float]]] = {
    "device/utilization": (lambda nvml, g: nvml.nvmlDeviceGetUtilizationRates(g).gpu / 100, fmean),
    "device/memory_bytes": (lambda nvml, g: nvml.nvmlDeviceGetMemoryInfo(g).used, sum),
    "device/power_watts": (lambda nvml, g: nvml.nvmlDeviceGetPowerUsage(g) / 1000, sum),
    "device/temperature_celsius": (lambda nvml, g: nvml.nvmlDeviceGetTemperature(g, 0), max),
    ENERGY: (lambda nvml, g: nvml.nvmlDeviceGetTotalEnergyConsumption(g) / 1000, sum),
}


class Gpus:
    """The GPUs of all processes on this machine; a note says why they can't be read."""

    def __init__(self, world: World) -> None:
        """Open NVML where the run is on GPUs."""
        self.gpus: list[Any] = []
        self.note = ""
        self.joules_at_start = 0.0
        if world.device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            self.note = f"for the GPU's utilization and power: {install_command('nvidia-ml-py')}"
            return
        self.nvml = pynvml
        # With a GPU to each task of a cluster, a rank sees its own alone.
        seen = min(world.local_size, torch.cuda.device_count())
        # CUDA's numbers and those of NVML may differ: CUDA_VISIBLE_DEVICES renumbers.
        uuids = [torch.cuda.get_device_properties(number).uuid for number in range(seen)]
        try:
            pynvml.nvmlInit()
            self.gpus = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
        except pynvml.NVMLError as error:
            self.note = f"the GPU's utilization and power are unknown: {error}"
        self.joules_at_start = self.read().get(ENERGY, 0.0)

    def read(self) -> dict[str, float]:
        """The readings by their names in `metrics.jsonl`; energy is since the last start."""
        found = {}
        for name, (read, join) in READINGS.items() if self.gpus else ():
            with suppress(self.nvml.NVMLError):  # a GPU does not give all of them
                found[name] = round(join([float(read(self.nvml, gpu)) for gpu in self.gpus]), 4)
        if ENERGY in found:
            found[ENERGY] = round(found[ENERGY] - self.joules_at_start, 1)
        return found

    def utilization(self) -> float:
        """Share of the last second at most in which kernels ran on rank 0's; nan if unknown.

        Kernels of other programs count, too. A part of a GPU (MIG) has no reading.
        """
        if self.gpus:
            with suppress(self.nvml.NVMLError):
                return self.nvml.nvmlDeviceGetUtilizationRates(self.gpus[0]).gpu / 100
        return math.nan
