"""GPU readings by NVML: utilization, memory, power, temperature and energy.

They need `pip install nvidia-ml-py`. Nothing is read on a CPU.
"""

from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch

from ..runtime.distributed import World

ENERGY = "energy_joules"
# How to read each value of one GPU, and how the values of several GPUs make one.
READINGS: dict[str, tuple[Callable[[Any, Any], float], Callable[[list[float]], float]]] = {
    "device/utilisation": (lambda nvml, g: nvml.nvmlDeviceGetUtilizationRates(g).gpu / 100, fmean),
    "device/memory_bytes": (lambda nvml, g: nvml.nvmlDeviceGetMemoryInfo(g).used, sum),
    "device/power_watts": (lambda nvml, g: nvml.nvmlDeviceGetPowerUsage(g) / 1000, sum),
    "device/temperature_celsius": (lambda nvml, g: nvml.nvmlDeviceGetTemperature(g, 0), max),
    ENERGY: (lambda nvml, g: nvml.nvmlDeviceGetTotalEnergyConsumption(g) / 1000, sum),
}


class Monitor:
    """Reads the GPUs of this machine. Its first process reads those of all its processes."""

    def __init__(self, world: World) -> None:
        """Find the GPUs; `note` says why they can't be read, where that is so."""
        self.nvml: Any = None
        self.gpus: list[Any] = []
        self.note, self.joules_at_start = "", 0.0
        if world.device.type != "cuda" or world.local_rank:
            return
        try:
            import pynvml
        except ImportError:
            self.note = "for the GPU's utilization and power: pip install nvidia-ml-py"
            return
        try:
            pynvml.nvmlInit()
            for number in range(world.local_size):  # by UUID: CUDA_VISIBLE_DEVICES renumbers
                uuid = torch.cuda.get_device_properties(number).uuid
                self.gpus.append(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except pynvml.NVMLError as error:
            self.gpus, self.note = [], f"the GPU's utilization and power are unknown: {error}"
        self.nvml = pynvml
        self.joules_at_start = self.metrics().get(ENERGY, 0.0)

    def metrics(self) -> dict[str, float]:
        """The readings by their names in `metrics.jsonl`; energy is since the start of the run.

        {} without a GPU; a reading that a GPU does not give is left out.
        """
        found = {}
        for name, (read, join) in READINGS.items() if self.gpus else ():
            with suppress(self.nvml.NVMLError):
                found[name] = round(join([float(read(self.nvml, gpu)) for gpu in self.gpus]), 4)
        if ENERGY in found:
            found[ENERGY] = round(found[ENERGY] - self.joules_at_start, 1)
        return found
