"""Tips on what to do in a training step, and the price of some tools."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from ...data import Batch
from .setup import Setup, Variant, Variants, need_gpu, off_and_on
from .timed_run import TimedRun

# Functions that create tensors, of those that augmentation uses.
CREATORS = (torch.rand, torch.arange, torch.zeros, torch.full, torch.tensor, torch.empty)


def on_device(setup: Setup) -> Variants:
    """Create tensors on the device, instead of on the CPU to be copied.

    - Why: a copy from ordinary memory waits until the device has finished all earlier work.
    - When it hurts: random numbers differ between kinds of devices.
    - Knob: none, always on; by hand, `torch.rand(size, device=device)` in place of
      `torch.rand(size).to(device)`.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html>
    """

    def create_on_cpu(run: TimedRun) -> None:
        augment = run.augment

        def slow_augment(batch: Batch, step: int) -> tuple[Tensor, Tensor]:
            with CreateOnCPU():
                return augment(batch, step)

        run.augment = slow_augment

    need_gpu(setup)
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
    """Read no value back in a step: no `.item()`, `.cpu()`, `print(loss)` or `if loss > x`.

    - Why: to read a value, the CPU waits until the device has caught up, and then the device waits
      for more work.
    - When it hurts: values that are read every few steps are known later, a loss of NaN too.
    - Knob: `--run.log-every-steps`; losses are summed on the device in between.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html>
    """

    def read_loss(run: TimedRun) -> None:
        run.after_step = run.loss.item

    slow = Variant(setup.config, read_loss)
    return {"loss.item() in each step": slow, "nothing is read": Variant(setup.config)}


def empty_cache(setup: Setup) -> Variants:
    """Do not call `torch.cuda.empty_cache()` in each step, as some do against running out.

    - Why: it waits for the device and asks the driver for all memory anew, and saves none in the
      end.
    - When it hurts: between phases of different shapes, emptying it once may help.
    - Knob: none, training never calls it; `--optim.accumulate` saves memory.
    - Source: <https://docs.pytorch.org/docs/stable/notes/cuda.html>
    """

    def empty(run: TimedRun) -> None:
        run.after_step = torch.cuda.empty_cache

    need_gpu(setup)
    return {"in each step": Variant(setup.config, empty), "never": Variant(setup.config)}


def inference_mode(setup: Setup) -> Variants:
    """Evaluate without recording what gradients would need.

    - Why: recorded activations take memory, and time to allocate it. `inference_mode` also saves
      the version counters of `no_grad`.
    - When it hurts: tensors made in inference mode can't take part in training afterwards.
    - Knob: none, always on; timed here as forward passes without training.
    - Source: <https://docs.pytorch.org/docs/stable/notes/autograd.html>
    """
    modes = {"neither": nullcontext, "no_grad": torch.no_grad}
    contexts = modes | {"inference_mode": torch.inference_mode}
    return {name: Variant(setup.config, evaluate_in(mode)) for name, mode in contexts.items()}


def evaluate_in(context: Callable[[], AbstractContextManager]) -> Callable[[TimedRun], None]:
    """Make forward passes over one batch in place of training steps."""

    def change(run: TimedRun) -> None:
        images = run.data.sample(run.data.batch_size)
        model = run.state.model.eval()

        def batches(start: int, stop: int) -> Iterator[Tensor]:
            return iter([images] * (stop - start))

        def step(images: Tensor) -> None:
            with run.state.precision.autocast():
                logits = model(run.normalize(images))
            run.loss += logits.detach().amax()

        run.around, run.batches, run.step = context, batches, step

    return change


def deterministic(setup: Setup) -> Variants:
    """The price of bit-identical runs on a GPU.

    - Why: to tell an effect from chance, or to find the step in which a run went wrong.
    - When it hurts: sums in a fixed order need slower kernels, and cuDNN may not try which
      algorithm is fastest. On a CPU, runs are reproducible anyway.
    - Knob: `--deterministic`
    - Source: <https://docs.pytorch.org/docs/stable/notes/randomness.html>
    """
    return off_and_on(setup.config, "deterministic", is_choice=False)


def profiler(setup: Setup) -> Variants:
    """The price of recording a trace.

    - Why: a trace shows how long each operation takes, and where the device is idle.
    - When it hurts: every recorded operation costs more on the CPU, so a step that the CPU limits
      looks worse than it is.
    - Knob: `--profile` records 5 steps near the start of a run, and costs nothing after.
    - Source: <https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html>
    """

    def record(run: TimedRun) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints a line in each round
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] * (run.world.device.type == "cuda")
        names = ("record_shapes", "profile_memory", "with_stack", "acc_events")
        run.around = lambda: profile(activities=activities, **dict.fromkeys(names, True))

    return {"off": Variant(setup.config), "recording": Variant(setup.config, record)}
