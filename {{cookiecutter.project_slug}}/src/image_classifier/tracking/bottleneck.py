"""What limits the speed of a run, in one sentence per epoch, and what its start took."""

import time

from .. import STARTED
from ..config import Config
from ..data import TrainData
from ..runtime.distributed import World
from ..runtime.machine import num_cores, usual_precision

LOADING_LIMITS = 0.1  # share of the time spent waiting for images from which on loading is slow


class Bottleneck:
    """Compares the speed of loading with that of the model."""

    def __init__(self, config: Config, world: World, data: TrainData) -> None:
        """Of a run on `data`, which is open; the model is built."""
        self.config, self.world, self.data = config, world, data
        self.built = time.monotonic()

    def started(self) -> str:
        """How long the parts of the start took; to be called right after the first step."""
        now, first_batch = time.monotonic(), self.data.waited_seconds
        return (
            f"First step after {now - STARTED:.1f} s: imports {self.world.began - STARTED:.1f}, "
            f"data and model {self.built - self.world.began:.1f}, first batch {first_batch:.1f}, "
            f"the step itself {now - self.built - first_batch:.1f}."
        )

    def verdict(self, rate: float, waited: float) -> str:
        """What limits the speed, and which knob to try.

        Args:
            rate: training images per second.
            waited: share of the time in which the loop waited for images, 0 to 1.
        """
        if waited > LOADING_LIMITS:
            return (
                f"Loading is the limit: {rate:,.0f} images/s, while the model could take "
                f"{rate / (1 - waited):,.0f}. Try {self._faster_loading()}."
            )
        ceiling = self.data.ceiling  # of the workers of one process
        loading = f", while loading could give {ceiling * self.world.size:,.0f}" if ceiling else ""
        return f"The model is the limit: {rate:,.0f} images/s{loading}. Try {self._faster_model()}."

    def _faster_loading(self) -> str:
        data, cores = self.data, num_cores() // self.world.local_size
        if data.where != "stream":
            return "less of --augment"
        advice = []
        if data.source.paths is not None and not data.source.recipe:
            advice.append("`prepare`, which stores the images smaller")
        if data.workers < cores:
            advice.append(f"--data.workers {cores} (now {data.workers})")
        return " or ".join(advice or ["more CPU cores, or a smaller --data.image-size"])

    def _faster_model(self) -> str:
        advice, usual = [], usual_precision(self.world.device)
        if self.world.device.type == "cuda" and self.config.precision == "fp32" != usual:
            advice.append(f"--precision {usual}")
        if not self.config.compute.channels_last:
            advice.append("--compute.channels-last")
        if not self.config.compute.compile:
            advice.append("--compute.compile")
        return " or ".join(advice or ["a smaller --model.name or --data.image-size"])
