"""GPU readings by NVML: utilization, memory, power, temperature and energy.

They need the library nvidia-ml-py. Nothing is read on a CPU.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from statistics import fmean
from types import ModuleType
from typing import Any

import torch

from ...runtime.platform import install_command
from ...tracking import Observer, Setup, Speed

UTILIZATION = "device/utilisation"
ENERGY = "energy_joules"
# How to read each value of one GPU, and how the values of several GPUs make one.
READINGS: dict[str, tuple[Callable[[Any, Any], float], Callable[[list[float]], float]]] = {
    UTILIZATION: (lambda nvml, g: nvml.nvmlDeviceGetUtilizationRates(g).gpu / 100, fmean),
    "device/memory_bytes": (lambda nvml, g: nvml.nvmlDeviceGetMemoryInfo(g).used, sum),
    "device/power_watts": (lambda nvml, g: nvml.nvmlDeviceGetPowerUsage(g) / 1000, sum),
    "device/temperature_celsius": (lambda nvml, g: nvml.nvmlDeviceGetTemperature(g, 0), max),
    ENERGY: (lambda nvml, g: nvml.nvmlDeviceGetTotalEnergyConsumption(g) / 1000, sum),
}


def observe(setup: Setup) -> Observer:
    """Read the GPUs of all processes on this machine; a note says why they can't be read."""
    world = setup.world
    if world.device.type != "cuda":
        return Observer()
    # With a GPU to each task of a cluster, a rank sees its own alone.
    seen = min(world.local_size, torch.cuda.device_count())
    try:
        nvml, gpus = open_gpus(range(seen))
    except LookupError as error:
        return Observer(notes=(str(error),))
    joules_at_start = read_gpus(nvml, gpus).get(ENERGY, 0.0)

    def metrics(_: Speed | None) -> dict[str, float]:
        """The readings; energy is since the start of the run."""
        found = read_gpus(nvml, gpus)
        if ENERGY in found:
            found[ENERGY] = round(found[ENERGY] - joules_at_start, 1)
        return found

    return Observer(metrics=metrics)


def gpu_utilization(device: torch.device) -> float:
    """Share of the last second at most in which kernels ran on a GPU; nan if NVML can't tell.

    Kernels of other programs count, too. A part of a GPU (MIG) has no reading.
    """
    try:
        nvml, gpus = open_gpus([device.index])
    except LookupError:
        return math.nan
    return read_gpus(nvml, gpus, [UTILIZATION]).get(UTILIZATION, math.nan)


def open_gpus(numbers: Iterable[int]) -> tuple[ModuleType, list[Any]]:
    """The module pynvml, and what it calls the GPUs that torch sees as `numbers`.

    By UUID, as CUDA's numbers and those of NVML may differ: CUDA_VISIBLE_DEVICES renumbers.

    Raises:
        LookupError: with the library to install, or NVML's reason.
    """
    try:
        import pynvml
    except ImportError:
        library = install_command("nvidia-ml-py")
        raise LookupError(f"for the GPU's utilization and power: {library}") from None
    try:
        pynvml.nvmlInit()
        uuids = [torch.cuda.get_device_properties(number).uuid for number in numbers]
        return pynvml, [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
    except pynvml.NVMLError as error:
        raise LookupError(f"the GPU's utilization and power are unknown: {error}") from error


def read_gpus(
    nvml: ModuleType, gpus: list[Any], names: Iterable[str] = READINGS
) -> dict[str, float]:
    """The readings by their names in `metrics.jsonl`, without those that a GPU does not give."""
    found = {}
    for name in names:
        read, join = READINGS[name]
        with suppress(nvml.NVMLError):
            found[name] = round(join([float(read(nvml, gpu)) for gpu in gpus]), 4)
    return found
