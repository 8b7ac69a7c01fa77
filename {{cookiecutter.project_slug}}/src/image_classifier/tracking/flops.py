"""FLOPs: what an image costs, what the device can do, and the share of it that a run uses (MFU)."""

import re
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from ..augment import build_size
from ..config import Config
from ..precision import Precision

# The gradients of a layer's inputs and of its weights cost a forward pass each.
TRAINING_PASSES = 3
MEASURING_SECONDS = 0.1
# Dense products (datasheets often show twice as much, for sparse matrices) in TFLOP/s: in 16 bits
# with float32 sums, and in TF32, or in float32 where a GPU has no TF32. By the whole name: a
# laptop's chip, a "Ti" or a part of a GPU (MIG) is another one.
DATASHEETS: dict[str, tuple[float, float]] = {
    # https://images.nvidia.com/data-center/a100/a100-datasheet.pdf
    r"A100.*": (312, 156),
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    r"H100 80GB HBM3": (989, 494.5),
    r"H100 PCIe": (756, 378),
    # https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200
    r"H200": (989, 494.5),
    # https://www.nvidia.com/en-us/data-center/l4
    r"L4": (121, 60),
    # https://www.nvidia.com/en-us/data-center/l40s
    r"L40S": (362, 183),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf
    r"A10": (125, 62.5),
    # https://www.nvidia.com/en-us/data-center/tesla-t4 (neither bf16 nor TF32)
    r"T4": (65, 8.1),
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    r"V100-SXM2.*": (125, 15.7),
    r"V100-PCIE.*": (112, 14),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    r"GeForce RTX 3090": (71, 35.6),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    r"GeForce RTX 4090": (165.2, 82.6),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    r"GeForce RTX 5090": (209.5, 104.8),
}
NO_BF16 = ("T4", "V100")  # datasheets do not give their bf16


def count_flops(model: nn.Module, image_size: int) -> int:
    """FLOPs of a forward pass of one image; a multiplication and an addition are two."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        blank_forward(model, 1, image_size)
    return counter.get_total_flops()


def blank_forward(
    model: nn.Module, batch_size: int, image_size: int, training: bool = False
) -> Tensor:
    """The logits of blank images, (batch_size, classes); evaluation leaves `model` as it was."""
    device = next(model.parameters()).device
    was_training, fastpath = model.training, torch.backends.mha.get_fastpath_enabled()
    model.train(training)
    torch.backends.mha.set_fastpath_enabled(False)  # its kernel hides operations from a counter
    try:
        with torch.no_grad():  # not inference_mode: training may use what a model keeps of this
            # `forward` is not compiled: a batch of this size never comes again.
            return model.forward(torch.zeros(batch_size, 3, image_size, image_size, device=device))
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        model.train(was_training)


def build_training_flops(
    config: Config, forward_flops: int, unfreeze_step: int, steps_per_epoch: int, total_steps: int
) -> Callable[[int], float]:
    """FLOPs that an image costs in training, as a function of the step.

    They grow with the area of the images. A layer that is frozen, as all but the last one are
    before `unfreeze_step`, has no backward pass.

    Args:
        config: for the image size and its growth.
        forward_flops: of an image of full size.
        unfreeze_step: the first step in which all layers learn.
        steps_per_epoch: of the run.
        total_steps: of the run.
    """
    full_size = config.data.image_size
    size_at = build_size(config.augment, full_size, steps_per_epoch, total_steps)

    def training_flops_at(step: int) -> float:
        passes = 1 if step < unfreeze_step else TRAINING_PASSES
        return forward_flops * passes * (size_at(step) / full_size) ** 2

    return training_flops_at


def find_peak(precision: Precision) -> tuple[float, str]:
    """The peak of the device in FLOP/s in the number format of the run, and where that is from."""
    device, dtype = precision.device, precision.dtype
    if device.type == "cuda":
        flops = datasheet(torch.cuda.get_device_name(device), dtype)
        if flops is not None:
            return flops, "datasheet"
    return matmul_flops(device, dtype), "measured with a matrix product"


def datasheet(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of the GPU of that name, if its datasheet is known."""
    name = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    known = [row for pattern, row in DATASHEETS.items() if re.fullmatch(pattern, name)]
    if not known or "MIG" in name or (dtype == torch.bfloat16 and name.startswith(NO_BF16)):
        return None
    return known[0][dtype == torch.float32] * 1e12


@cache
def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product: the best of a few, measured once per process."""
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds: list[float] = []
    while sum(seconds[1:]) < MEASURING_SECONDS:  # the first one also loads a library
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # which waits for the device
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def amount(number: float) -> str:
    """A number in three digits with its prefix: 3627132928 -> `3.63 G`."""
    letters = ["", "k", "M", "G", "T", "P"]
    while number >= 999.5 and len(letters) > 1:
        number /= 1000
        del letters[0]
    return f"{number:.3g} {letters[0]}"
