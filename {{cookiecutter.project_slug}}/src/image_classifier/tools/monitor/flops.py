"""FLOPs: what an image costs, and the share of the device's peak that a run uses (MFU)."""

import re
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from ...precision import Precision
from ...runtime.machine import leave_tracer_out
from ...tracking import Setup, Speed, blank_logits

# The gradients of a layer's inputs and of its weights cost a forward pass each.
TRAINING_PASSES = 3
# In the name of what makes a weight, as LoRA does, once for all images; none within another.
PARAMETRIZED = r"((?!\.parametrizations\.).)*\.parametrizations\.\w+"
MEASURING_SECONDS = 0.1
# Rows of a matrix, and products between two waits, to measure a device by its kind: on a fast GPU
# a product of 4096 rows takes 0.1 ms, to launch it and wait 0.03.
PRODUCTS = {"cpu": (1024, 1), "cuda": (8192, 10), "mps": (4096, 1)}
# Dense products (datasheets often show twice as much, for sparse matrices) in TFLOP/s: in 16 bits
# with float32 sums, and in TF32, or in float32 where a GPU has no TF32. By the whole name: a
# laptop's chip, a "Ti" or a part of a GPU (MIG) is another one.
DATASHEETS: dict[str, tuple[float, float]] = {
    # https://images.nvidia.com/data-center/a100/a100-datasheet.pdf
    r"A100.*": (312, 156),
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    r"H100 80GB HBM3": (989, 494.5),
    r"H100 PCIe": (756, 378),
    r"H100 NVL": (835, 417.5),
    # https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200
    r"H200": (989, 494.5),
    # https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703
    r"B200": (2250, 1125),
    # https://www.nvidia.com/en-us/data-center/l4
    r"L4": (121, 60),
    # https://www.nvidia.com/en-us/data-center/l40s
    r"L40S": (362, 183),
    # https://www.nvidia.com/en-us/data-center/tesla-t4 (neither bf16 nor TF32)
    r"T4": (65, 8.1),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    r"GeForce RTX 3090": (71, 35.6),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    r"GeForce RTX 4090": (165.2, 82.6),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    r"GeForce RTX 5090": (209.5, 104.8),
}


def open_mfu(setup: Setup) -> tuple[str, Callable[[Speed], float] | None]:
    """What an image of full size costs, in words, and MFU; nothing where no FLOPs are counted."""
    full_size = setup.config.data.image_size
    flops = count_flops(setup.model, full_size, setup.config.data.channels)
    if not flops:
        return "", None
    peak, source = find_peak(setup.precision)
    note = (
        f"an image: {flops / 1e9:.3g} GFLOP forward, "
        f"{TRAINING_PASSES * flops / 1e9:.3g} in training; "
        f"peak of the device: {peak / 1e12:.3g} TFLOP/s ({source})"
    )

    def mfu(speed: Speed) -> float:
        """Model FLOPs utilization, https://arxiv.org/abs/2204.02311; FLOPs grow with the area."""
        image_flops = flops * TRAINING_PASSES * (speed.image_size / full_size) ** 2
        return speed.images_per_second * image_flops / (peak * setup.world.size)

    return note, mfu


def count_flops(model: nn.Module, image_size: int, channels: int = 3) -> int:
    """FLOPs of a forward pass of one image; a multiplication and an addition are two."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils import flop_counter

    leave_tracer_out(flop_counter._FlopCounterMode)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    # torch 2.11 counts nothing for the CPU's kernel of attention.
    with sdpa_kernel(SDPBackend.MATH), flop_counter.FlopCounterMode(display=False) as counter:
        try:
            model.requires_grad_(False)  # a weight that a layer takes would need a gradient
            blank_logits(model, image_size, channels)
        finally:
            for weight in learned:
                weight.requires_grad_()
    counts = counter.get_flop_counts()
    of_batch = [counts[name] for name in counts if re.fullmatch(PARAMETRIZED, name)]
    return counter.get_total_flops() - sum(sum(found.values()) for found in of_batch)


def find_peak(precision: Precision) -> tuple[float, str]:
    """The peak of the device in FLOP/s in the number format of the run, and where that is from."""
    device = precision.device
    dtype = precision.dtype
    if device.type == "cuda" and (flops := datasheet(torch.cuda.get_device_name(device), dtype)):
        return flops, "datasheet"
    return matmul_flops(device, dtype), "measured with a matrix product"


def datasheet(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of the GPU of that name, if its datasheet is known."""
    name = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    known = [row for pattern, row in DATASHEETS.items() if re.fullmatch(pattern, name)]
    return known[0][dtype == torch.float32] * 1e12 if known and "MIG" not in name else None


@cache
def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product: the best of a few, measured once per process."""
    size, count = PRODUCTS[device.type]
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    product = matrix @ matrix  # the first one also loads a library
    seconds: list[float] = []
    while sum(seconds) < MEASURING_SECONDS:
        product[0, 0].item()  # waits for the device
        began = time.perf_counter()
        for _ in range(count):
            torch.matmul(matrix, matrix, out=product)
        product[0, 0].item()
        seconds.append(time.perf_counter() - began)
    return count * 2 * size**3 / min(seconds)
