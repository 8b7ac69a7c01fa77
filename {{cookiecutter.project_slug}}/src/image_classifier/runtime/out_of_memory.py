"""Running out of memory: a restart from the last save computes the same batch in smaller parts.

Ranks cannot agree on it within a step: those that did not fail wait for gradients that will never
come, and a check before each exchange of gradients would end its overlap with computing. So the
rank that fails writes down half of its micro-batch, all start again, and read it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ..config import Config
from ..errors import EXIT_OUT_OF_MEMORY, FaultError
from .console import first_line
from .distributed import World
from .files import read_object, write_json

FILE = "micro_batch.json"  # in the run folder, to the end of the run
# CUDA, ROCm, NCCL and Apple's GPUs; cuBLAS and cuDNN, also where a handle or an algorithm finds no
# memory; torch's allocator for the CPU.
OUT_OF_MEMORY = re.compile(
    "out of memory|_ALLOC(ATION)?_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_SUPPORTED"
    "|nable to find (an engine|a valid cuDNN algorithm)|DefaultCPUAllocator: "
)


class OutOfMemoryError(FaultError):
    """A step does not fit into memory; after a restart it is computed in smaller parts."""

    code = EXIT_OUT_OF_MEMORY


class MicroBatch:
    """Images that a rank computes with at once: its share of a batch, or a part of that."""

    def __init__(self, config: Config, world: World) -> None:
        """As `--optim.accumulate` says, or as an attempt that ran out of memory left it."""
        self.path = Path(config.run.dir, FILE)
        self.world = world
        self.share = config.data.batch_size // world.size
        size = max(1, self.share // config.optim.accumulate)
        with suppress(OSError):
            kept = 0 if config.run.fresh else read_object(self.path).get("micro_batch")
            size = min(size, kept) if isinstance(kept, int) and kept > 0 else size
        self.size = world.all_reduce_min(size)

    @contextmanager
    def halve_micro_batch_on_oom(self, steps_done: Callable[[], int]) -> Iterator[None]:
        """A block that, if it runs out of memory, halves the micro-batch of the next start.

        Raises:
            OutOfMemoryError: in place of an error of torch, if there is a smaller micro-batch.
            FaultError: if there is none.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            done = steps_done()
            place = f"out of memory at step {done + 1} with micro-batch {self.size}"
            why = first_line(error)
            if self.size == 1:
                raise FaultError(
                    f"{place}: not even one image at a time fits; a smaller --data.image-size or "
                    f"--model.name, or --data.where host, needs less ({why})"
                ) from error
            half = self.size // 2
            with suppress(FileNotFoundError):  # another rank has renamed our file
                write_json(self.path, {"micro_batch": half, "was": self.size, "step": done})
            raise OutOfMemoryError(
                f"{place}: started again from the last save with {half} "
                f"(the batch stays {self.share * self.world.size}): {why}"
            ) from error


@contextmanager
def smaller_batch_on_oom(flag: str, size: int) -> Iterator[None]:
    """A block in which a lack of memory is a `FaultError` that advises less than `flag size`."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        cure = f"give a smaller {flag} than {size}"
        raise FaultError(f"out of memory: {cure} ({first_line(error)})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, or a library that it calls, says in `error` that memory ran out."""
    if not isinstance(error, RuntimeError) or isinstance(error, FaultError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or bool(OUT_OF_MEMORY.search(str(error)))
