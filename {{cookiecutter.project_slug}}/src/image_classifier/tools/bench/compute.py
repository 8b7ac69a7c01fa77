"""Tips on how the model is computed."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ...config import Config
from .setup import Setup, UnavailableError, Variant, Variants, need_gpu, off_and_on, with_knobs
from .timed_run import TimedRun


def mixed_precision(setup: Setup) -> Variants:
    """Compute convolutions and matrix products in 16 bits; weights stay float32.

    - Why: matrix units are several times as fast in 16 bits, and activations take half the memory.
    - When it hurts: bf16 is slower on a CPU without AMX or AVX-512 BF16. GPUs before Ampere have no
      bf16 units; from Volta on they have fp16 units, for which the loss is scaled.
    - Knob: `--precision bf16`, `fp16` or `fp32`; `auto` measures on a CPU, and goes by the
      generation of a GPU.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html>,
      <https://arxiv.org/abs/1710.03740>
    """
    names = ("fp32", "bf16") if setup.world.device.type == "cpu" else ("fp32", "bf16", "fp16")
    return {name: Variant(with_knobs(setup.config, precision=name)) for name in names}


def channels_last(setup: Setup) -> Variants:
    """Keep the channels of a pixel next to each other in memory.

    - Why: the fast kernels for convolutions want this layout, and convert from any other and back.
    - When it hurts: layers that do not support it convert their input; float32 on a GPU without
      TF32 may be faster without.
    - Knob: `--compute.no-channels-last`
    - Source: <https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html>
    """
    return off_and_on(setup.config, "compute.channels_last", "contiguous", "channels_last")


def torch_compile(setup: Setup) -> Variants:
    """Compile the model: fewer kernels, and operations between convolutions fused into one.

    - Why: norms, ReLUs and additions read and write all activations for little arithmetic, and each
      kernel launch costs time.
    - When it hurts: compiling takes half a minute or more at the start, and again where input
      shapes change.
    - Knob: `--compute.compile`
    - Source: <https://docs.pytorch.org/tutorials/intermediate/torch_compile_tutorial.html>
    """
    return off_and_on(setup.config, "compute.compile", "eager", "compiled")


def fused_optimizer(setup: Setup) -> Variants:
    """Update all weights with a few kernels.

    - Why: a plain loop launches several kernels per weight, `foreach` one of each kind for many
      weights, and `fused` one for the whole update.
    - When it hurts: `foreach` needs memory for intermediate results; a `fused` update can't be
      changed.
    - Knob: none, always `fused=True`.
    - Source: <https://docs.pytorch.org/docs/stable/optim.html>
    """
    return {
        "for-loop": Variant(setup.config, partial(unfuse, foreach=False)),
        "foreach": Variant(setup.config, partial(unfuse, foreach=True)),
        "fused": Variant(setup.config),
    }


def unfuse(run: TimedRun, foreach: bool) -> None:
    """Use another implementation of the same optimizer."""
    optimizer = run.state.optimizer
    for group in optimizer.param_groups:
        group |= {"fused": False, "foreach": foreach}
    # Only fused kernels read it on the device; the others refuse it.
    optimizer.register_step_pre_hook(lambda made, *_: setattr(made, "found_inf", None))
    optimizer._step_supports_amp_scaling = False  # or fp16's scaler would leave unscaling to it


def cudnn_benchmark(setup: Setup) -> Variants:
    """Let cuDNN try its algorithms for each convolution, and keep the fastest.

    - Why: which is fastest depends on shapes, formats and the GPU; cuDNN's rules only guess.
    - When it hurts: each new input shape is tried again, for seconds. Two runs may choose different
      algorithms, and round differently.
    - Knob: none, always on, unless `--deterministic`.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html>
    """
    need_gpu(setup)
    if setup.config.deterministic:
        raise UnavailableError("--deterministic forbids it")
    return switched(setup.config, lambda value: setattr(torch.backends.cudnn, "benchmark", value))


def tf32(setup: Setup) -> Variants:
    """Let a GPU round the inputs of float32 products to 19 bits.

    - Why: tensor cores then compute them several times as fast, from Ampere on.
    - When it hurts: where products must be exact, as in linear algebra; training is not affected,
      and bf16 gains nothing.
    - Knob: none, always on; in your code, `torch.set_float32_matmul_precision("highest")`.
    - Source: <https://docs.pytorch.org/docs/stable/notes/cuda.html>
    """
    need_gpu(setup)
    if torch.cuda.get_device_capability(setup.world.device) < (8, 0):
        raise UnavailableError("needs a GPU of the Ampere generation or later")

    def switch(value: bool) -> None:
        torch.set_float32_matmul_precision("high" if value else "highest")
        torch.backends.cudnn.allow_tf32 = value

    return switched(with_knobs(setup.config, precision="fp32"), switch)


def switched(config: Config, switch: Callable[[bool], None]) -> Variants:
    """Off and on, by a switch of the process; each round restores it."""
    values = {"off": False, "on": True}
    return {name: Variant(config, lambda _, v=value: switch(v)) for name, value in values.items()}


def data_parallel(setup: Setup) -> Variants:
    """Use several GPUs with one process each (DistributedDataParallel), not with threads.

    - Why: DataParallel copies the model to all GPUs in each step, shares Python's lock, and gathers
      on the first GPU. DDP exchanges gradients while backward still computes others.
    - When it hurts: each process has its own copy of Python's objects.
    - Knob: `--run.processes`, one per GPU by default.
    - Source: <https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html>
    """

    def use_threads(run: TimedRun) -> None:
        run.ddp_model = nn.DataParallel(run.ddp_model)

    count = torch.cuda.device_count() if setup.world.device.type == "cuda" else 0
    if count < 2:
        raise UnavailableError("needs 2 GPUs")
    whole = count * setup.config.data.batch_size
    config = with_knobs(setup.config, data__batch_size=whole, compute__compile=False)
    return {
        "DataParallel": Variant(config, use_threads),
        f"DDP, {count} processes": Variant(config, processes=count),
    }
