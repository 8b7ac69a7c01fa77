"""What a run waits for: images, the model, or values that the host reads back from the device."""

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import STARTED
from ..config import Config
from ..data import Batch, TrainData
from ..runtime.distributed import World
from ..runtime.machine import num_cores, usual_precision

# What makes the host read a value that a GPU may not have computed yet.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
# Where the run itself waits, every so many steps.
ALLOWED = ("logger.py", "evaluate.py", "checkpoint.py", "page.py")
INPUT_BOUND = 0.1  # share of the time spent waiting for images from which on they are the bound


class Watch:
    """Looks on as a run goes through its steps, and into one step of each epoch more closely."""

    def __init__(self, config: Config, world: World, data: TrainData) -> None:
        """Of a run on `data`."""
        self.config, self.world, self.data = config, world, data
        # On a CPU operations are counted one by one, which compiled ones are not.
        can_count = world.device.type == "cuda" or not config.compute.compile
        self.counts = world.is_main and can_count
        self.built = time.monotonic()
        self.waits: Counter[str] = Counter()  # lines that read a value back, in the step looked at

    def steps(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        """The same batches, each with whether its step is one that is timed like the others.

        The first is not, nor are those that are looked at.
        """
        for number, batch in enumerate(batches):
            if number == 0:
                self.came = time.monotonic()
            is_second = number % self.data.steps_per_epoch == min(1, self.data.steps_per_epoch - 1)
            is_looked_at = is_second and self.counts
            with self.count_waits() if is_looked_at else nullcontext():
                yield batch, number > 0 and not is_looked_at

    def start(self) -> str:
        """What the time went to up to the end of the first step, which is now."""
        joined, now = self.world.began, time.monotonic()
        return (
            f"first step after {now - STARTED:.1f} s: imports {joined - STARTED:.1f}, "
            f"data and model {self.built - joined:.1f}, first batch {self.came - self.built:.1f}, "
            f"the step itself {now - self.came:.1f}"
        )

    @contextmanager
    def count_waits(self) -> Iterator[None]:
        """A block in which each line that waits for the device is counted."""
        self.waits = Counter()
        if self.world.device.type != "cuda":
            with Waits(self.waits):
                yield
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if "synchronizing CUDA operation" not in str(warning.message):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
            elif Path(warning.filename).name not in ALLOWED:
                self.waits[f"{warning.filename}:{warning.lineno}"] += 1

    def verdict(self, rate: float, waited: float) -> str:
        """What bounds the run, and what to turn.

        `rate` is in images per second, `waited` the share of the time that the loop stood still
        for want of images.
        """
        ceiling = self.data.ceiling
        loader = f"loader {ceiling * self.world.size:,.0f}" if ceiling else "images in memory"
        rates = f"{loader}, model {rate / (1 - waited):,.0f}, achieved {rate:,.0f} images/s"
        if waited > INPUT_BOUND:
            return (
                f"input-bound, {waited:.0%} of the time without images: {rates}; "
                f"{self.faster_input()}"
            )
        if self.waits:
            line, count = self.waits.most_common(1)[0]
            return (
                f"sync-bound: each step waits {self.waits.total()} x for the device, {count} x of "
                f"them at {line}: {rates}; keep values on the device there"
            )
        return f"compute-bound: {rates}; {self.faster_model()}"

    def faster_input(self) -> str:
        """What to do about a loop that waits for images."""
        data = self.data
        if data.where != "stream":
            return "less of --augment"
        advice = []
        if data.source.paths is not None and not data.source.recipe:
            advice.append("`prepare` the images")
        cores = num_cores() // self.world.local_size
        if data.workers < cores:
            advice.append(f"--data.workers {cores} (now {data.workers})")
        return " or ".join(advice or ["more cores, or a smaller --data.image-size"])

    def faster_model(self) -> str:
        """What to do about a loop that waits for nothing but the model."""
        advice = []
        usual = usual_precision(self.world.device)
        if self.world.device.type == "cuda" and self.config.precision == "fp32" != usual:
            advice.append(f"--precision {usual}")
        if not self.config.compute.channels_last:
            advice.append("--compute.channels-last")
        if not self.config.compute.compile:
            advice.append("--compute.compile")
        return " or ".join(advice or ["a smaller --model or --data.image-size"])


class Waits(TorchDispatchMode):
    """Counts the lines of Python that read a value back from the device."""

    def __init__(self, waits: Counter[str]) -> None:
        """Count them in `waits`."""
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Look at the operation, and do it."""
        if func.overloadpacket.__name__ in WAITING:
            line = calling_line()
            if line is not None:
                self.waits[line] += 1
        return func(*args, **(kwargs or {}))


def calling_line() -> str | None:
    """File and line that called torch; None where the run itself waits now and then."""
    line, frame = None, sys._getframe(2)
    library = str(Path(torch.__file__).parent)
    while frame is not None:
        name = frame.f_code.co_filename
        if Path(name).name in ALLOWED:
            return None
        if line is None and not name.startswith((library, "<")):
            line = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return line
