"""Tips on how a loop is written: the rows that `bench` has with this tool.

Training follows all of them and no option switches them, so each is compared with a run that is
changed to do without.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from ...config import Config
from ...data import Augmented, Batch
from ...optim import build_optimizer
from ..bench.timed_run import Setup, TimedRun, Variant, Variants, with_knobs
from .gpu import MultiProcessRun, on_gpu
from .loading import non_blocking, persistent_workers, pin_memory, shared_batches, uint8

# Functions that create tensors, of those that augmentation uses.
CREATORS = (torch.rand, torch.arange, torch.zeros, torch.full, torch.tensor, torch.empty)


def fused_optimizer(setup: Setup) -> Variants:
    """Update all weights with a few kernels."""
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
    # fp16's scaler must not leave unscaling to it; else nobody needs to wait for the device.
    optimizer._step_supports_amp_scaling = not run.state.precision.scaler.is_enabled()


def set_to_none(setup: Setup) -> Variants:
    """Drop the gradients after each step, instead of filling them with zeros."""

    def fill(run: TimedRun) -> None:
        weights = list(run.state.model.parameters())
        gradients = [torch.zeros_like(weight) for weight in weights]

        def fill_with_zeros() -> None:
            torch._foreach_zero_(gradients)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient

        run.after_step = fill_with_zeros

    return {"filled with zeros": Variant(setup.config, fill), "None": Variant(setup.config)}


def conv_bias(setup: Setup) -> Variants:
    """Give convolutions no bias before a norm, which has one of its own."""

    def add_biases(run: TimedRun) -> None:
        parts = [part for network in run.networks for part in network.modules()]
        convs = [part for part in parts if isinstance(part, nn.Conv2d) and part.bias is None]
        if not convs:
            raise ValueError("no convolution is without a bias")
        for conv in convs:
            conv.bias = nn.Parameter(conv.weight.new_zeros(conv.out_channels))
        run.state.optimizer = build_optimizer(run.config.optim, run.state.model)

    return {"bias": Variant(setup.config, add_biases), "no bias": Variant(setup.config)}


@on_gpu
def cudnn_benchmark(setup: Setup) -> Variants | str:
    """Let cuDNN try its algorithms for each convolution, and keep the fastest."""
    if setup.config.deterministic:
        return "--deterministic forbids it"
    return switched(setup.config, partial(setattr, torch.backends.cudnn, "benchmark"))


@on_gpu
def tf32(setup: Setup) -> Variants | str:
    """Let a GPU round the inputs of float32 products to 19 bits."""
    if torch.cuda.get_device_capability(setup.world.device) < (8, 0):
        return "needs a GPU of the Ampere generation or later"

    def switch(value: bool) -> None:
        torch.set_float32_matmul_precision("high" if value else "highest")
        torch.backends.cudnn.allow_tf32 = value

    return switched(with_knobs(setup.config, {"precision": "fp32"}), switch)


def switched(config: Config, switch: Callable[[bool], None]) -> Variants:
    """Off and on, by a switch of the process; each round restores it."""
    values = {"off": False, "on": True}
    return {name: Variant(config, lambda _, v=value: switch(v)) for name, value in values.items()}


def data_parallel(setup: Setup) -> Variants | str:
    """Use several GPUs with one process each (DistributedDataParallel), not with threads."""

    def use_threads(run: TimedRun) -> None:
        run.ddp_model = nn.DataParallel(run.ddp_model)

    count = torch.cuda.device_count()
    if count < 2 or setup.world.device.type != "cuda":
        return "needs 2 GPUs"
    whole = count * setup.config.data.batch_size
    config = with_knobs(setup.config, {"data.batch_size": whole, "compute.compile": False})
    share = with_knobs(config, {"data.workers": -(-config.data.workers // count)})  # of each
    return {
        "DataParallel": Variant(config, use_threads),
        f"DDP, {count} processes": Variant(share, start=partial(MultiProcessRun, size=count)),
    }


@on_gpu
def on_device(setup: Setup) -> Variants:
    """Create tensors on the device, instead of on the CPU to be copied."""

    def create_on_cpu(run: TimedRun) -> None:
        augment = run.augment

        def slow_augment(batch: Batch, step: int) -> Augmented:
            with CreateOnCPU():
                return augment(batch, step)

        run.augment = slow_augment

    slow = Variant(setup.config, create_on_cpu)
    return {"created on the CPU": slow, "on the device": Variant(setup.config)}


class CreateOnCPU(TorchFunctionMode):
    """Creates tensors on the CPU and copies them to the device that is asked for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Call a function of torch."""
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in CREATORS and device is not None:
            rest = {k: v for k, v in kwargs.items() if k not in ("device", "generator")}
            return func(*args, **rest).to(device)
        return func(*args, **kwargs)


def item(setup: Setup) -> Variants:
    """Read no value back in a step: no `.item()`, `.cpu()`, `print(loss)` or `if loss > x`."""
    slow = Variant(setup.config, lambda run: setattr(run, "after_step", run.loss.item))
    return {"loss.item() in each step": slow, "nothing is read": Variant(setup.config)}


@on_gpu
def empty_cache(setup: Setup) -> Variants:
    """Do not call `torch.cuda.empty_cache()` in each step, as some do against running out."""
    slow = Variant(setup.config, lambda run: setattr(run, "after_step", torch.cuda.empty_cache))
    return {"in each step": slow, "never": Variant(setup.config)}


def inference_mode(setup: Setup) -> Variants:
    """Evaluate without recording what gradients would need."""

    def evaluate_in(run: TimedRun, mode: Callable[[], AbstractContextManager]) -> None:
        images = run.data.sample(run.data.batch_size)
        model = run.state.model.eval()

        def step(images: Tensor) -> None:
            with run.state.precision.autocast():
                logits = model(run.normalize(images))
            run.loss += logits.detach().amax()

        run.around = mode
        run.train_on = step
        run.batches = lambda start, stop: repeat(images, stop - start)

    modes = {"neither": nullcontext, "no_grad": torch.no_grad}
    modes |= {"inference_mode": torch.inference_mode}
    return {n: Variant(setup.config, partial(evaluate_in, mode=mode)) for n, mode in modes.items()}


@on_gpu
def pinned_copy(setup: Setup) -> Variants:
    """Copy a batch to the GPU from page-locked memory; only the copy is timed."""

    def copy_only(run: TimedRun, pin: bool) -> None:
        batch = run.data.sample(run.data.batch_size).cpu()
        host = batch.pin_memory() if pin else batch
        run.batches = lambda start, stop: repeat(host, stop - start)
        run.train_on = lambda images: images.to(run.world.device, non_blocking=True)

    pins = {"pageable": False, "pinned": True}
    return {name: Variant(setup.config, partial(copy_only, pin=pins[name])) for name in pins}


def profiler(setup: Setup) -> Variants:
    """The price of recording a trace."""

    def record(run: TimedRun) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints a line in each round
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] * (run.world.device.type == "cuda")
        names = ("record_shapes", "profile_memory", "with_stack", "acc_events")
        run.around = lambda: profile(activities=activities, **dict.fromkeys(names, True))

    return {"off": Variant(setup.config), "recording": Variant(setup.config, record)}


TIPS = (
    fused_optimizer,
    set_to_none,
    conv_bias,
    cudnn_benchmark,
    tf32,
    data_parallel,
    persistent_workers,
    shared_batches,
    uint8,
    pin_memory,
    pinned_copy,
    non_blocking,
    on_device,
    item,
    empty_cache,
    inference_mode,
    profiler,
)
