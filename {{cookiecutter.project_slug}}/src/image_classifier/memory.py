"""Running out of memory: the same batch in twice as many parts, from the last save on.

Ranks can't agree on it within a step: those that did not fail wait for gradients that will never
come, and to look before each exchange of gradients would end its overlap with computing. So the
failing rank writes down half of the micro-batch, all are started again, and read it.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from .config import Config, FaultError
from .data import TrainData
from .runtime.distributed import AGAIN, World
from .runtime.files import read_object
from .runtime.run_dir import write_json
from .train_state import TrainState

MICRO_BATCH = "micro_batch.json"  # in the run folder, to the end of the run


class OutOfMemoryError(FaultError):
    """A step does not fit into memory; started again, it is computed in more parts."""

    code = AGAIN


class MicroBatch:
    """Images that a rank computes with at once: its share of a batch, or a part of it."""

    def __init__(self, config: Config, world: World) -> None:
        """As `--optim.accumulate` says, or as an attempt that ran out of memory left it."""
        self.path, self.world = Path(config.run.dir, MICRO_BATCH), world
        self.share = config.data.batch_size // world.size
        size = max(1, self.share // config.optim.accumulate)
        with contextlib.suppress(OSError):
            kept = 0 if config.run.fresh else read_object(self.path).get("micro_batch")
            size = min(size, kept) if isinstance(kept, int) and kept > 0 else size
        self.size = world.smallest(size)

    @contextmanager
    def halved_on_failure(self, state: TrainState, data: TrainData) -> Iterator[None]:
        """A block after which, if memory did not suffice, a new start needs less of it.

        Raises:
            OutOfMemoryError: in place of torch's, if there is a smaller micro-batch.
            FaultError: if there is none; it says what the memory went to.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            place = f"out of memory at step {state.step + 1} with micro-batch {self.size}"
            if self.size == 1:
                raise FaultError(f"{place}: {holdings(state, data)}") from error
            half = self.size // 2
            with contextlib.suppress(FileNotFoundError):  # another rank has renamed our file
                write_json(self.path, {"micro_batch": half, "was": self.size, "step": state.step})
            raise OutOfMemoryError(
                f"{place}: started again from the last save with {half} "
                f"(the batch stays {self.share * self.world.size})"
            ) from error


def split(batch: tuple[Tensor, Tensor], micro_batch: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Images and labels of a batch in parts, and whether it is the last, which may be smaller."""
    images, labels = batch
    if len(images) <= micro_batch:
        yield images, labels, True
        return
    for start in range(0, len(images), micro_batch):
        stop = start + micro_batch
        yield images[start:stop], labels[start:stop], stop >= len(images)


def holdings(state: TrainState, data: TrainData) -> str:
    """What the memory went to that does not depend on the micro-batch, and the remedies."""
    weights = sum(weight.nbytes for weight in state.model.parameters())
    optimizer = sum(
        value.nbytes
        for values in state.optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
    average = sum(tensor.nbytes for tensor in state.ema.state_dict().values()) if state.ema else 0
    images = data.pixels.nbytes if data.where == "device" else 0
    parts = {
        "weights": weights,
        "gradients": weights,
        "optimizer": optimizer,
        "averaged weights": average,
        "resident images": images,
    }
    account = ", ".join(f"{name} {size / 2**20:,.0f} MB" for name, size in parts.items() if size)
    remedy = " or --data.where host" if images else ""
    return (
        f"{account}, the rest is what one image needs on its way through the model; "
        f"a smaller --data.image-size or --model{remedy} needs less"
    )
