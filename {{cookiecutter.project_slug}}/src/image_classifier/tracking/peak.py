"""What a device can compute at the most, which what a run does compute is a share of."""

import re
import time
from dataclasses import dataclass
from functools import cache

import torch

from ..precision import Precision

MEASURING_SECONDS = 0.1
# Dense products (datasheets often show twice as much, for matrices half full of zeros), in 1e12
# operations a second: 16-bit factors with sums in float32, TF32, float32. By the whole name, as
# a laptop's chip, a "Ti" or a part of a GPU (MIG) is another one, and is measured.
DATASHEETS: dict[str, tuple[float, float, float]] = {
    # https://images.nvidia.com/data-center/a100/a100-datasheet.pdf
    r"A100.*": (312, 156, 19.5),
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    r"H100 80GB HBM3": (989, 494.5, 67),
    r"H100 PCIe": (756, 378, 51),
    # https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200
    r"H200": (989, 494.5, 67),
    # https://www.nvidia.com/en-us/data-center/l4
    r"L4": (121, 60, 30.3),
    # https://www.nvidia.com/en-us/data-center/l40s
    r"L40S": (362, 183, 91.6),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf
    r"A10": (125, 62.5, 31.2),
    # https://www.nvidia.com/en-us/data-center/tesla-t4 (neither bf16 nor TF32)
    r"T4": (65, 8.1, 8.1),
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    r"V100-SXM2.*": (125, 15.7, 15.7),
    r"V100-PCIE.*": (112, 14, 14),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    r"GeForce RTX 3090": (71, 35.6, 35.6),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    r"GeForce RTX 4090": (165.2, 82.6, 82.6),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    r"GeForce RTX 5090": (209.5, 104.8, 104.8),
}
NO_BF16 = ("T4", "V100")  # what they make of it, only a measurement says


@dataclass(frozen=True)
class Peak:
    """Operations a second, a multiplication and an addition being two, and who says so."""

    flops: float
    origin: str


def find_peak(precision: Precision) -> Peak | None:
    """The peak of the device in the number format of the run: a datasheet's, or measured.

    None where neither can be had.
    """
    device, dtype, tf32 = precision.device, precision.dtype, True
    if device.type == "cuda":
        flops = datasheet(torch.cuda.get_device_name(device), dtype, tf32)
        if flops is not None:
            return Peak(flops, "the datasheet")
    try:
        flops = product_flops(device, dtype, tf32, torch.get_num_threads())
    except RuntimeError:  # no memory for it, or no such product: a run can do without
        return None
    return Peak(flops, "a product measured here")


def datasheet(name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """Operations a second of the GPU of that name, if its datasheet is known."""
    name = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    known = [row for pattern, row in DATASHEETS.items() if re.fullmatch(pattern, name)]
    if not known or "MIG" in name or (dtype == torch.bfloat16 and name.startswith(NO_BF16)):
        return None
    column = 0 if dtype != torch.float32 else 1 if tf32 else 2
    return known[0][column] * 1e12


@cache
def product_flops(
    device: torch.device,
    dtype: torch.dtype,
    tf32: bool,  # noqa: ARG001 - each has its own answer
    threads: int,  # noqa: ARG001
) -> float:
    """Operations a second of a large matrix product, the best of a few; once in a process.

    On a CPU it is computed by as many threads as the run has.
    """
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.linspace(-1, 1, size * size, device=device, dtype=dtype).view(size, size)
    best = float("inf")
    end = time.perf_counter() + MEASURING_SECONDS
    while best == float("inf") or time.perf_counter() < end:
        finish(device)
        began = time.perf_counter()
        matrix @ matrix
        finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was asked to."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
