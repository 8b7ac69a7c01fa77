"""What needs a GPU, and a run on several of them with one process each."""

import multiprocessing
import os
import tempfile
import uuid
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import ExitStack
from functools import wraps
from pathlib import Path

from ...config import Config
from ...data import TrainData
from ...runtime.distributed import join_world
from ..bench.timed_run import Setup, TimedRun, Variants
from ..bench.tips import Tip


def on_gpu(tip: Tip) -> Tip:
    """A tip that says where there is no GPU to measure it on."""

    @wraps(tip)
    def asked(setup: Setup) -> Variants | str:
        return tip(setup) if setup.world.device.type == "cuda" else "needs a GPU"

    return asked


class MultiProcessRun:
    """A run on several GPUs, one process each; `run` and `close` as of a `TimedRun`."""

    def __init__(self, config: Config, size: int) -> None:
        """Start `size` processes."""
        self.name = uuid.uuid4().hex
        job = {"MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": self.name}
        job |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        ranks = (job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size))
        self.ranks = [ProcessPoolExecutor(1, context, start_rank, (config, v)) for v in ranks]

    def run(self, steps: int) -> float:
        """Train for `steps`; the seconds per step of the slowest process."""
        futures = [rank.submit(run_rank, steps) for rank in self.ranks]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)  # if one fails, others wait for it
        return max(future.result() for future in done)

    def close(self) -> None:
        """End the processes, of which some may wait for others for ever."""
        for rank in self.ranks:
            for process in list((rank._processes or {}).values()):
                process.kill()
            rank.shutdown(wait=False, cancel_futures=True)
        for path in Path(tempfile.gettempdir()).glob(f"store-{self.name}-*"):  # where they met
            path.unlink(missing_ok=True)


# In a process of a MultiProcessRun: its part, and the world that it is in to its end.
RANK_RUN: list[TimedRun] = []
WORLD = ExitStack()


def start_rank(config: Config, variables: dict[str, str]) -> None:
    """Join the other processes and build the run."""
    os.environ |= variables
    world = WORLD.enter_context(join_world(config.compute))
    RANK_RUN.append(TimedRun(config, world, TrainData(config, world)))


def run_rank(steps: int) -> float:
    """`TimedRun.run` of this process."""
    return RANK_RUN[0].run(steps)
