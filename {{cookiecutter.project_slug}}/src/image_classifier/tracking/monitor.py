"""What NVML says of the GPUs: utilisation, memory, power, temperature and energy.

It needs `pip install nvidia-ml-py`. Nothing is read on a CPU.
"""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch

from ..runtime.distributed import World

UTILISATION, MEMORY = "device/utilisation", "device/memory_bytes"
POWER, TEMPERATURE = "device/power_watts", "device/temperature_celsius"
ENERGY = "energy_joules"
# How to read each value of one GPU, and how the values of several GPUs make one.
READINGS: dict[str, tuple[Callable[[Any, Any], float], Callable[[list[float]], float]]] = {
    UTILISATION: (lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100, fmean),
    MEMORY: (lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used, sum),
    POWER: (lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000, sum),
    TEMPERATURE: (lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, 0), max),  # 0: the chip's
    ENERGY: (lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000, sum),
}
IN_PROGRESS_LINE = {UTILISATION: "{:.0%}", POWER: "{:.0f} W", TEMPERATURE: "{:.0f}C"}


class Monitor:
    """Reads the GPUs of this machine. Its first process reads those of all its processes."""

    def __init__(self, world: World) -> None:
        """Find the GPUs; `note` says why they can't be read, where that is so."""
        self.nvml: Any = None
        self.gpus: list[Any] = []
        self.note = ""
        self.joules_at_start = 0.0
        if world.device.type == "cuda" and world.local_rank == 0:
            try:
                import pynvml
            except ImportError:
                self.note = "for the GPU's utilisation and power: pip install nvidia-ml-py"
                return
            self.nvml = pynvml
            try:
                pynvml.nvmlInit()
                for number in range(world.local_size):  # by UUID: CUDA_VISIBLE_DEVICES renumbers
                    uuid = torch.cuda.get_device_properties(number).uuid
                    self.gpus.append(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
            except pynvml.NVMLError as error:
                self.gpus, self.note = [], f"the GPU's utilisation and power are unknown: {error}"
        self.joules_at_start = self.read(ENERGY) or 0.0

    def read(self, name: str) -> float | None:
        """The reading `name` over all GPUs; None without GPUs, or if one does not give it."""
        read, join = READINGS[name]
        try:
            values = [float(read(self.nvml, gpu)) for gpu in self.gpus]
        except self.nvml.NVMLError:
            return None
        return round(join(values), 4) if values else None

    def metrics(self) -> dict[str, float]:
        """The readings by their names in `metrics.jsonl`; energy is since the start of the run.

        {} without a GPU; a reading that a GPU does not give is left out.
        """
        readings = {name: self.read(name) for name in READINGS}
        found = {name: value for name, value in readings.items() if value is not None}
        if ENERGY in found:
            found[ENERGY] = round(found[ENERGY] - self.joules_at_start, 1)
        return found

    def phrase(self, readings: dict[str, float]) -> str:
        """Readings as the progress line shows them, such as `gpu 97% 412 W 61C`; or ""."""
        parts = [
            words.format(readings[name])
            for name, words in IN_PROGRESS_LINE.items()
            if name in readings
        ]
        return " ".join(["gpu", *parts]) if parts else ""
