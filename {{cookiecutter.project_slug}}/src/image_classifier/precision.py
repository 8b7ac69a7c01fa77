"""Mixed precision: the number format of the arithmetic, and the optimizer's step in it."""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import ComputeConfig, OptimConfig
from .errors import UserError
from .runtime.distributed import local_part
from .runtime.phases import phase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# In fewer, cuDNN does not win back the seconds for which it times its algorithms for each shape: on
# an H200 12 s at the start of EfficientNet-Lite0 at 224 pixels, and 9 ms in each step of 16 images.
STEPS_FOR_TUNING = 2000
REMEMBERED = 1000  # steps whose norms of gradients are kept until somebody asks for them


class Precision:
    """Automatic mixed precision: weights stay float32, matrix products use fewer bits.

    https://arxiv.org/abs/1710.03740
    """

    def __init__(
        self,
        name: str,
        compute: ComputeConfig,
        optim: OptimConfig,
        device: torch.device,
        steps: int = 0,
    ) -> None:
        """Compute in `name`: fp32 (TF32 on a GPU), bf16 or fp16; `settle` replaces auto.

        On a GPU, a run of many `steps` begins with a search for the fastest convolutions. A
        network that does not train has none, and leaves that to the run whose teacher it may be.

        Raises:
            UserError: for fp16 without a CUDA device.
        """
        if name == "fp16" and device.type != "cuda":
            raise UserError(f"--precision fp16 needs a CUDA GPU; on {device.type} use bf16 or fp32")
        self.name = name
        self.dtype = DTYPES[name]
        self.device = device
        self.clip_norm = optim.clip_norm
        # Weights and the norms of their gradients, (weights,) on the device, step by step.
        self.recent: deque[tuple[list[nn.Parameter], Tensor]] = deque(maxlen=REMEMBERED)
        self.skipped_in_a_row = 0  # steps that updated nothing, as of the last `find_skipped`
        layout = torch.channels_last if compute.channels_last else torch.contiguous_format
        self.memory_format = layout
        # Gradients underflow in fp16 unless the loss is scaled up.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        torch.set_float32_matmul_precision("high")  # TF32: products of 19-bit inputs, on a GPU
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = True
            if steps:
                is_exact = torch.are_deterministic_algorithms_enabled()
                torch.backends.cudnn.benchmark = steps >= STEPS_FOR_TUNING and not is_exact

    @cached_property
    def found_inf_and_scale(self) -> tuple[Tensor, Tensor]:
        """For a step without a GradScaler: room for whether to skip it, and 1. On the device."""
        return torch.tensor((0.0, 1.0), device=self.device).unbind()

    def place(self, model: nn.Module) -> nn.Module:
        """`model` on the device; its filters of images in the memory format, no others have one."""
        model = model.to(self.device)
        for weight in (*model.parameters(), *model.buffers()):
            if weight.ndim == 4:
                weight.data = weight.data.to(memory_format=self.memory_format)
        return model

    def autocast(self) -> AbstractContextManager:
        """A block whose forward pass runs in this precision."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, scaled in fp16, to those of the weights."""
        with phase("backward"):
            self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients, update the weights, and clear the gradients.

        Where one gradient is inf or nan, nothing is updated. The host does not wait for that if the
        optimizer is fused, as it is but on Apple's GPUs: it reads `found_inf` on the device.
        """
        with phase("optimizer"):
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            weights = [weight for weight in weights if weight.grad is not None]
            if self.clip_norm:
                self.scaler.unscale_(optimizer)
            norms = gradient_norms(weights, self.device)
            self.recent.append((weights, norms))
            if self.clip_norm:
                norm = torch.linalg.vector_norm(norms)
                nn.utils.clip_grads_with_norm_(weights, self.clip_norm, norm)
            if self.scaler.is_enabled():
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                found_inf, scale = self.found_inf_and_scale
                # What GradScaler does; the scale is 1.
                torch._amp_foreach_non_finite_check_and_unscale_([norms], found_inf.zero_(), scale)
                if getattr(optimizer, "_step_supports_amp_scaling", False):
                    optimizer.found_inf = found_inf
                    optimizer.step()
                elif not found_inf:
                    optimizer.step()
            for weight in weights:  # what `zero_grad` does, without a note for a profiler
                weight.grad = None

    def find_skipped(self) -> list[tuple[int, list[nn.Parameter]]]:
        """The steps since the last call that updated nothing: (steps since then, weights).

        Those weights have gradients that were inf or nan. Waits for the device.
        """
        recent = [*self.recent]
        found = []
        self.recent.clear()
        if recent and torch.cat([norms for _, norms in recent]).isfinite().all():
            recent = []
            self.skipped_in_a_row = 0
        for done, (weights, norms) in enumerate(recent, start=1):
            pairs = zip(weights, norms.isfinite().tolist(), strict=True)
            harmed = [weight for weight, is_finite in pairs if not is_finite]
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if harmed else 0
            if harmed:
                found.append((len(recent) - done, harmed))
        return found


def gradient_norms(weights: list[nn.Parameter], device: torch.device) -> Tensor:
    """The norm of the gradient of each of `weights`: (weights,) on `device`, same on every rank.

    It is inf or nan if one of its numbers is. Norms only read: the check of GradScaler, which also
    writes, takes 6 x as long for large networks on a CPU.
    """
    gradients = [weight.grad for weight in weights]
    norms = torch._foreach_norm([*map(local_part, gradients)])
    norms = torch.stack([norm.to(device) for norm in norms])
    if hasattr(gradients[0], "to_local"):  # FSDP: each rank has a part of each
        dist.all_reduce(norms.square_())
        norms.sqrt_()
    return norms
