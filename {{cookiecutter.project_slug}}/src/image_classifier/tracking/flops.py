"""FLOPs: what an image costs, what the device can do, and the share of it that a run uses (MFU)."""

import time
from functools import cache

import torch
from torch import Tensor, nn

# The gradients of a layer's inputs and of its weights cost a forward pass each.
TRAINING_PASSES = 3
MEASURING_SECONDS = 0.1


def count_flops(model: nn.Module, image_size: int) -> int:
    """FLOPs of a forward pass of one image; a multiplication and an addition are two."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        blank_logits(model, image_size)
    return counter.get_total_flops()


@torch.no_grad()  # not inference_mode: training may use what a model keeps of this
def blank_logits(model: nn.Module, image_size: int) -> Tensor:
    """The logits of one blank image in evaluation, (1, classes); `model` stays as it was."""
    image = torch.zeros(1, 3, image_size, image_size, device=next(model.parameters()).device)
    was_training, fastpath = model.training, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its kernel hides operations from a counter
    try:
        return model.eval().forward(image)  # `forward` is not compiled: one image never comes again
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        model.train(was_training)


@cache
def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product: the best of a few, measured once per process."""
    # Several on a GPU, where waiting for one takes a tenth of its time.
    size, products = (1024, 1) if device.type == "cpu" else (4096, 8)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds: list[float] = []
    while sum(seconds[1:]) < MEASURING_SECONDS:  # the first one also loads a library
        began = time.perf_counter()
        for _ in range(products):
            result = matrix @ matrix
        result[0, 0].item()  # which waits for the device
        seconds.append(time.perf_counter() - began)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the run's own peak is logged
    return 2 * size**3 * products / min(seconds)
