"""One process per device: who we are, and what the others hold.

`join_world` serves a process that is alone, one that `torchrun` started, and one that `launch.py`
started with the same variables in its environment: one code path.
"""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import ComputeConfig, RunConfig, UserError
from .machine import end_with_parent, find_accelerator, keep_freed_memory, num_threads

STORE = "RUN_STORE"  # variable with the descriptor of a file in which our own launcher's ranks meet
STALE_SECONDS = 24 * 60 * 60  # after which a file that no process is known of is removed
EXCHANGE_SECONDS = 0.5  # about how often ranks tell each other what has come up
LOST, AGAIN = 74, 75  # exit codes of ranks that lost another, and that ask to be started again


@dataclass(frozen=True)
class World:
    """This process among all that train one model; alone unless it was started with others."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine
    why_cpu: str = ""  # why the device is the CPU, where nobody has asked for that
    began: float = field(default_factory=time.monotonic)  # when it joined, in seconds

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """`tensor` added up over all processes, in place; it must be on the device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_min(self, value: int) -> int:
        """The smallest `value` that a process has. Waits for the device."""
        tensor = torch.tensor(value, device=self.device)
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    def all_true(self, holds: bool) -> bool:
        """Whether `holds` is true on every process. Waits for the device."""
        return int(self.all_reduce_sum(torch.tensor(int(holds), device=self.device))) == self.size

    def is_same(self, value: int) -> bool:
        """Whether every process has the same `value`. Waits for the device."""
        return self.all_reduce_min(value) == -self.all_reduce_min(-value)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give `model` the statistics that rank 0 has: each rank's BatchNorm saw its own images."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def local_slice(self, count: int) -> slice:
        """This rank's part of a batch of `count` images; the parts are equal."""
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    @contextmanager
    def local_main_first(self) -> Iterator[None]:
        """A block that this machine's first process runs before the others do."""
        if self.local_rank > 0:
            dist.barrier()
        yield
        if self.local_rank == 0 and self.size > 1:
            dist.barrier()


class Board:
    """Whole numbers that ranks hand in, of which all know the largest at the same step.

    Nobody waits: what is handed in at one exchange is read at the next. It goes between the hosts,
    so a rank that hangs is noticed here, whatever its GPU has still to do.
    """

    def __init__(self, world: World, timeout_seconds: float) -> None:
        """For all of `world`, whose ranks give up on each other after `timeout_seconds`."""
        self.world, self.due = world, 0
        self.under_way: tuple[Tensor, dist.Work] | None = None
        self.last = (0, time.monotonic())
        if world.size > 1:
            timeout = timedelta(seconds=timeout_seconds)
            self.group = dist.new_group(backend="gloo", timeout=timeout)

    def exchange(self, step: int, *numbers: int) -> list[int]:
        """The largest of each of `numbers` over all ranks: those of an exchange before `step`.

        Zeros in most steps, as ranks exchange about twice in a second.
        """
        if self.world.size == 1:
            return list(numbers)
        if step < self.due:
            return [0] * len(numbers)
        known, interval = [0] * len(numbers), 1
        if self.under_way is not None:
            tensor, work = self.under_way
            work.wait()
            *known, interval = tensor.tolist()
        tensor = torch.tensor([*numbers, self.interval(step) if self.world.is_main else 0])
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.under_way, self.due = (tensor, work), step + max(1, interval)
        return known

    def interval(self, step: int) -> int:
        """Steps until the next exchange, from how long they have taken since the last."""
        (last_step, last_time), self.last = self.last, (step, time.monotonic())
        return max(1, round(EXCHANGE_SECONDS * (step - last_step) / (self.last[1] - last_time)))

    def __enter__(self) -> "Board":
        """Nothing to do."""
        return self

    def __exit__(self, *error: object) -> None:
        """Finish the last exchange, as all ranks do that come to the end."""
        if error[0] is None and self.under_way is not None:
            self.under_way[1].wait()


@contextmanager
def join_world(
    compute: ComputeConfig, timeout_seconds: float = RunConfig.timeout_seconds
) -> Iterator[World]:
    """Find this process's device and its fellows; leave the group on every way out.

    A rank gives up waiting for another after `timeout_seconds`.

    Raises:
        UserError: if there are more processes than devices, or no device of the kind asked for.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, why_cpu = choose_device(compute.device, local_rank, local_size)
    torch.set_num_threads(num_threads(local_size))  # more than cores slow each other down
    if device.type == "cpu":
        keep_freed_memory()
    world = World(device, rank, size, local_rank, local_size, why_cpu)
    if size == 1:
        yield world
        return
    end_with_parent(signal.SIGTERM)  # the agent that started us
    # NCCL's watchdog aborts the process: ranks shall have said before whom they wait for.
    patience = timedelta(seconds=timeout_seconds + 60 * (device.type == "cuda"))
    store = open_store(rank, size, local_size, patience)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=patience,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield world
    finally:
        dist.destroy_process_group()
        if isinstance(store, dist.FileStore) and rank == 0:
            with suppress(OSError):  # one without a name
                Path(store.path).unlink()


def choose_device(name: str, local_rank: int, local_size: int) -> tuple[torch.device, str]:
    """The device of this process, its own GPU or the CPU that all share; and why no GPU was found.

    Raises:
        UserError: if there are more processes than devices, or no device of the kind asked for.
    """
    found, why = find_accelerator()
    if name not in ("auto", "cpu", found):
        raise UserError(f"--compute.device {name}: {why or f'this machine has {found}'}")
    name, why = (found, why) if name == "auto" else (name, "")
    if name == "cuda":
        if local_size > torch.cuda.device_count():
            raise UserError(
                f"{local_size} processes need as many GPUs; there are {torch.cuda.device_count()}: "
                f"--run.processes {torch.cuda.device_count()}, or --compute.device cpu"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank), ""
    if name == "mps" and local_size > 1:
        raise UserError("several processes on one Apple GPU do not help: --run.processes 1")
    return torch.device(name), why


def open_store(rank: int, size: int, local_size: int, patience: timedelta) -> dist.Store:
    """Where the processes find each other; anew for each attempt that torchrun makes.

    What a dead attempt left in a shared store sends the next one to closed ports
    (https://github.com/pytorch/pytorch/issues/135712). On one machine a file does, and no port
    is open to the network.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if size == local_size:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if STORE in os.environ:
            return dist.FileStore(f"/proc/self/fd/{os.environ[STORE]}", size)
        if rank == 0:
            sweep(Path(tempfile.gettempdir()))
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        name = f"store-{job}-{os.getppid()}-{os.environ['MASTER_PORT']}-{attempt}"
        return dist.FileStore(str(Path(tempfile.gettempdir(), name)), size)
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=patience))
    return dist.PrefixStore(f"attempt{attempt}", store)


def sweep(folder: Path) -> None:
    """Remove the stores of jobs that were killed with their launchers.

    Not at once: a container that shares the folder has other numbers for its processes.
    """
    for path in folder.glob("store-*"):
        with suppress(OSError):
            parent = re.fullmatch(r"store-.*-(\d{1,9})-\d+-\d+", path.name)
            if parent and time.time() - path.stat().st_mtime > STALE_SECONDS:
                try:
                    os.kill(int(parent[1]), 0)
                except ProcessLookupError:
                    path.unlink()


def is_peer_failure(error: Exception) -> bool:
    """Whether `error` only says that another rank has gone, which has its own account of why."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
