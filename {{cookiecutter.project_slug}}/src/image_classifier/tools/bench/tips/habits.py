"""Tips on what to do in a step or around it, and what things cost."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from ....data import Batch
from .case import Case, Variants, need_gpu, with_knobs
from .trial import Trial, Variant

# Functions that make a tensor from nothing, of those that augmentation uses.
MAKERS = (torch.rand, torch.arange, torch.zeros, torch.full, torch.tensor, torch.empty)


def on_device(case: Case) -> Variants:
    """Create tensors on the device, instead of on the CPU and then copied.

    - Why: a copy from ordinary memory waits until the device is through with all before it, so the
      two no longer work at the same time.
    - When it hurts: random draws are others on each kind of device.
    - Knob: none, it is always done; by hand `torch.rand(size, device=device)` in place of
      `torch.rand(size).to(device)`.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html>
    """
    need_gpu(case)
    return {
        "created on the CPU": Variant(case.config, create_on_cpu),
        "on the device": Variant(case.config),
    }


class CreatedOnCPU(TorchFunctionMode):
    """Creates tensors on the CPU, whatever device is asked for, and copies them there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Call a function of torch."""
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in MAKERS and device is not None:
            rest = {k: v for k, v in kwargs.items() if k not in ("device", "generator")}
            return func(*args, **rest).to(device)
        return func(*args, **kwargs)


def create_on_cpu(trial: Trial) -> None:
    """Make what augmentation draws on the CPU."""
    augment = trial.augment

    def slow_augment(batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        with CreatedOnCPU():
            return augment(batch, step)

    trial.augment = slow_augment


def item(case: Case) -> Variants:
    """Read no value back in a step: no `.item()`, `.cpu()`, `print(loss)` or `if loss > x`.

    - Why: the CPU sends work ahead of the device. To read a value it waits until the device has
      caught up, and then the device waits for more work.
    - When it hurts: what is only read every so many steps is known later: a loss that is not a
      number, too.
    - Knob: `--run.log-every-steps`; losses are added up on the device in between.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html>
    """
    return {
        "loss.item() in each step": Variant(case.config, read_loss),
        "values stay where they are": Variant(case.config),
    }


def read_loss(trial: Trial) -> None:
    """Read the loss back after each step."""
    trial.after_step = trial.loss.item


def empty_cache(case: Case) -> Variants:
    """Do not call `torch.cuda.empty_cache()` in each step, as some do against running out.

    - Why: torch keeps the memory that it frees to use it again. Emptied, it waits for the device
      and asks the driver for all of it anew; and out of memory is out of memory all the same.
    - When it hurts: between phases of different shapes, emptying it once may help.
    - Knob: none, it is never called in training; `--optim.accumulate` is what saves memory.
    - Source: <https://docs.pytorch.org/docs/stable/notes/cuda.html>
    """
    need_gpu(case)
    return {"in each step": Variant(case.config, empty), "never": Variant(case.config)}


def empty(trial: Trial) -> None:
    """Give the GPU's memory back after each step."""
    trial.after_step = torch.cuda.empty_cache


def inference_mode(case: Case) -> Variants:
    """Evaluate without recording what gradients would need.

    - Why: recorded activations are kept until the end of the forward pass, which takes memory and
      the time to get it. `inference_mode` also leaves out the count of versions that `no_grad` has.
    - When it hurts: tensors made in inference mode can't take part in training afterwards.
    - Knob: none, it is always done; timed here as forward passes without training.
    - Source: <https://docs.pytorch.org/docs/stable/notes/autograd.html>
    """
    contexts = {
        "neither": nullcontext,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    return {name: Variant(case.config, evaluate_in(context)) for name, context in contexts.items()}


def evaluate_in(context: Callable[[], AbstractContextManager]) -> Callable[[Trial], None]:
    """Forward passes over a batch that is there, in place of steps."""

    def change(trial: Trial) -> None:
        images = trial.data.sample(trial.data.batch_size)
        model = trial.state.model.eval()

        def batches(start: int, stop: int) -> Iterator[Tensor]:
            return iter([images] * (stop - start))

        def step(images: Tensor) -> None:
            with trial.state.precision.autocast():
                logits = model(trial.normalize(images))
            trial.loss += logits.detach().amax()

        trial.around, trial.batches, trial.step = context, batches, step

    return change


def deterministic(case: Case) -> Variants:
    """What it costs that two runs on a GPU are the same to the last bit.

    - Why: to tell an effect from chance, or to find the step in which a run went wrong.
    - When it hurts: sums must be made in a fixed order, so some kernels are slower, and cuDNN may
      not try which is fastest. On a CPU runs repeat anyway.
    - Knob: `--deterministic`
    - Source: <https://docs.pytorch.org/docs/stable/notes/randomness.html>
    """
    return {
        name: Variant(with_knobs(case.config, {"deterministic": value}), is_choice=False)
        for name, value in (("off", False), ("on", True))
    }


def profiler(case: Case) -> Variants:
    """What it costs to record a trace.

    - Why: a trace shows what each operation takes, and where the device has nothing to do.
    - When it hurts: while it records, every operation costs more on the CPU, so a step that is
      bound by the CPU looks worse than it is; and it takes memory.
    - Knob: `--profile` records 5 steps near the start of a run, and costs nothing after.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html>
    """
    return {"off": Variant(case.config), "recording": Variant(case.config, record)}


def record(trial: Trial) -> None:
    """Record each round as `--profile` does."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or else it tells of each round
    activities = [ProfilerActivity.CPU]
    if trial.world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    trial.around = lambda: profile(
        activities=activities,
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        acc_events=True,
    )
