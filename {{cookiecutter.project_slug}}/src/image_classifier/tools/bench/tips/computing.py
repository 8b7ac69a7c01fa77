"""Tips on how the model is computed."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ....runtime.machine import keep_freed_memory, return_freed_memory
from .case import Case, NotHereError, Variants, need_gpu, with_knobs
from .trial import Trial, Variant


def mixed_precision(case: Case) -> Variants:
    """Compute convolutions and matrix products in 16 bits; weights stay float32.

    - Why: the units that multiply matrices are several times as fast at it, and activations take
      half of the memory and of the time to fetch them.
    - When it hurts: a CPU without AMX or AVX-512 BF16 is slower in bf16, and depthwise convolutions
      may be on any. A GPU before Ampere has no units for bf16, from Volta on it has them for fp16,
      which has so small a range that the loss must be scaled: that is done here.
    - Knob: `--precision bf16`, `fp16` or `fp32`; `auto` measures on a CPU which of fp32 and bf16
      trains your network faster, and takes what the generation of a GPU is made for.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html>,
      <https://arxiv.org/abs/1710.03740>
    """
    names = ("fp32", "bf16") if case.world.device.type == "cpu" else ("fp32", "bf16", "fp16")
    return {name: Variant(with_knobs(case.config, {"precision": name})) for name in names}


def channels_last(case: Case) -> Variants:
    """Keep the channels of a pixel beside each other in memory.

    - Why: the fast kernels for convolutions want it, and turn everything around and back if it is
      not so. Decoded images have this order anyway.
    - When it hurts: a layer that can't do it turns its input around. Some networks, and float32 on
      a GPU without TF32, are faster without.
    - Knob: `--compute.no-channels-last`
    - Source: <https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html>
    """
    return {
        name: Variant(with_knobs(case.config, {"compute.channels_last": value}))
        for name, value in (("contiguous", False), ("channels_last", True))
    }


def torch_compile(case: Case) -> Variants:
    """Compile the model: fewer kernels, and what lies between convolutions fused into one.

    - Why: norms, ReLUs and additions fetch and store all activations for next to no arithmetic, and
      each kernel costs a launch. A small model on a fast GPU does hardly anything else.
    - When it hurts: compiling takes half a minute and more at the start of a run, and again where
      the shape of its input changes. A model that branches on values of tensors breaks into pieces.
    - Knob: `--compute.compile`
    - Source: <https://docs.pytorch.org/tutorials/intermediate/torch_compile_tutorial.html>
    """
    return {
        name: Variant(with_knobs(case.config, {"compute.compile": value}))
        for name, value in (("eager", False), ("compiled", True))
    }


def fused_optimizer(case: Case) -> Variants:
    """Update all weights by a few kernels.

    - Why: a plain loop launches several kernels for each weight, and a network has hundreds.
      `foreach` makes one of each kind for many weights, `fused` one for the whole update.
    - When it hurts: `foreach` needs memory for intermediate results; `fused` has all of the update
      in one place, so there is nothing to change in it.
    - Knob: none, `fused=True` is always asked for.
    - Source: <https://docs.pytorch.org/docs/stable/optim.html>
    """
    return {
        "for-loop": Variant(case.config, unfuse(foreach=False)),
        "foreach": Variant(case.config, unfuse(foreach=True)),
        "fused": Variant(case.config),
    }


def unfuse(foreach: bool) -> Callable[[Trial], None]:
    """The same optimizer, in another implementation."""

    def change(trial: Trial) -> None:
        optimizer = trial.state.optimizer
        for group in optimizer.param_groups:
            group |= {"fused": False, "foreach": foreach}
        optimizer._step_supports_amp_scaling = False  # or fp16's scaler would leave it to it

    return change


def cudnn_benchmark(case: Case) -> Variants:
    """Let cuDNN try its algorithms for each convolution, and keep the fastest.

    - Why: which is fastest depends on shapes, formats and the GPU; rules only guess.
    - When it hurts: each new shape of an input is tried again, which takes seconds: it must not
      change from step to step. Two runs may take different algorithms and round otherwise.
    - Knob: `--compute.no-cudnn-benchmark`; `--deterministic` turns it off.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html>
    """
    need_gpu(case)
    if case.config.deterministic:
        raise NotHereError("--deterministic forbids it")
    return {
        name: Variant(with_knobs(case.config, {"compute.cudnn_benchmark": value}))
        for name, value in (("off", False), ("on", True))
    }


def tf32(case: Case) -> Variants:
    """Let float32 products round their inputs to 19 bits on a GPU.

    - Why: tensor cores then compute them, several times as fast, from Ampere on.
    - When it hurts: where products must be exact to float32's last bits, as in linear algebra.
      Training of networks does not notice. What is computed in bf16 gains nothing.
    - Knob: `--compute.no-tf32`
    - Source: <https://docs.pytorch.org/docs/stable/notes/cuda.html>
    """
    need_gpu(case)
    if torch.cuda.get_device_capability(case.world.device) < (8, 0):
        raise NotHereError("needs a GPU of the Ampere generation or later")
    config = with_knobs(case.config, {"precision": "fp32"})
    return {
        name: Variant(with_knobs(config, {"compute.tf32": value}))
        for name, value in (("off", False), ("on", True))
    }


def data_parallel(case: Case) -> Variants:
    """Use several GPUs by a process for each, DistributedDataParallel, and not by threads.

    - Why: DataParallel is one process. It copies the model to all GPUs in each step, takes turns
      for Python's lock, and gathers everything on the first GPU. DDP's processes keep the model,
      and exchange gradients while backward still computes others.
    - When it hurts: each process has its own copy of what Python holds.
    - Knob: `--run.processes`, one for each GPU by default.
    - Source: <https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html>
    """
    if case.num_gpus < 2 or case.world.device.type != "cuda":
        raise NotHereError("needs 2 GPUs")
    config = with_knobs(case.whole, {"compute.compile": False})
    return {
        "DataParallel": Variant(config, use_threads),
        f"DDP, {case.num_gpus} processes": Variant(config, processes=case.num_gpus),
    }


def use_threads(trial: Trial) -> None:
    """Divide each batch between all GPUs in one process."""
    trial.learner = nn.DataParallel(trial.learner)


def keep_memory(case: Case) -> Variants:
    """Let the process keep the memory that it frees, on a CPU.

    - Why: glibc returns blocks of 32 MB and more to the kernel as soon as they are freed, and
      activations are such blocks. Each step then asks for them again, and the kernel fills every
      page with zeros first.
    - When it hurts: the process never gets smaller, so others on the machine have less.
    - Knob: none, it is always done on a CPU with glibc. From outside, for any program:
      `GLIBC_TUNABLES=glibc.malloc.mmap_threshold=...`.
    - Source: <https://man7.org/linux/man-pages/man3/mallopt.3.html>
    """
    if case.world.device.type != "cpu":
        raise NotHereError("needs training on a CPU; torch keeps the memory of a GPU")
    if platform.libc_ver()[0] != "glibc":
        raise NotHereError("needs glibc")
    return {
        "returned": Variant(case.config, return_memory),
        "kept": Variant(case.config, settle),
    }


def return_memory(trial: Trial) -> None:
    """Let glibc do during a round as it does by itself."""

    @contextmanager
    def around() -> Iterator[None]:
        return_freed_memory()
        try:
            yield
        finally:
            keep_freed_memory()

    trial.around = around
    settle(trial)


def settle(trial: Trial) -> None:
    """Do not count the first step of a round, which has to ask for what the other gave back."""
    trial.settling_steps = 1
