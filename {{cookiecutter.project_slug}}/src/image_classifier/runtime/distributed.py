"""One process per device: which rank this is, and sums and agreement over all ranks.

`join_world` serves a process that is alone, one that `torchrun` started, and one that `launch.py`
started with the same environment variables.
"""

import itertools
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import ComputeConfig, RunConfig
from ..errors import UserError
from .launch import STORE
from .machine import find_accelerator, num_threads, why_too_old
from .platform import LOOPBACK, end_with_parent, interface_to, keep_freed_memory

T = TypeVar("T")
FAILED = "failed"  # key in the store: a rank failed where others wait for it
LINE_SECONDS = 60.0  # until a rank that waits in the store says so
POLL_SECONDS = 0.05  # between two looks at the store
left: list[object] = []  # process groups that this process has left; see `join_world`
blocks = itertools.count()  # in which the first rank of a machine was first: as many on each rank


@dataclass(frozen=True)
class World:
    """This process (a rank) among all that train one model; its collectives do nothing alone."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine
    why_cpu: str = ""  # why the device is the CPU although nobody asked for it
    store: dist.Store | None = None  # where ranks leave words for each other; None if alone

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in place; it must be on the device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_min(self, value: int) -> int:
        """The smallest `value` of any rank. Waits for the device."""
        tensor = torch.tensor(value, device=self.device)
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    def all_true(self, holds: bool) -> bool:
        """Whether `holds` is true on every rank. Waits for the device, so it is a barrier too."""
        return int(self.all_reduce_sum(torch.tensor(int(holds), device=self.device))) == self.size

    def is_same(self, value: int) -> bool:
        """Whether every rank has the same `value`. Waits for the device."""
        return self.all_reduce_min(value) == -self.all_reduce_min(-value)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks: each rank's BatchNorm saw its own images only."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def read_once(self, read: Callable[[], T]) -> T:
        """What `read` finds on this machine; with several machines, what rank 0 finds on its own.

        Their disks may differ: the run folder of another machine may be empty, or hold older
        checkpoints. The value is pickled on its way, as are others between ranks.
        """
        if self.size == self.local_size:
            return read()
        found = [read() if self.is_main else None]
        dist.broadcast_object_list(found, device=self.device)
        return found[0]

    def local_slice(self, count: int) -> slice:
        """This rank's part of a global batch of `count` images; all parts have the same size."""
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    @contextmanager
    def local_main_first(self, what: str) -> Iterator[None]:
        """A block that the first rank of a machine runs before its others; all leave it together.

        Ranks wait in the store as long as `what`, such as a download, takes: a collective gives up.

        Raises:
            DistError: if another rank failed in such a block; that one reports why.
        """
        if self.size == 1:
            yield
            return
        block = f"block {next(blocks)}, rank"
        if self.local_rank > 0:
            self.wait_for([f"{block} {self.rank - self.local_rank}"], what)
        try:
            yield
        except BaseException:
            self.store.set(FAILED, "")
            raise
        self.store.set(f"{block} {self.rank}", "")
        self.wait_for([f"{block} {rank}" for rank in range(self.size)], what)

    def wait_for(self, keys: list[str], what: str) -> None:
        """Wait until other ranks have left all `keys` in the store; say so after a minute."""
        line_due = time.monotonic() + LINE_SECONDS
        while not self.store.check(keys):
            if self.store.check([FAILED]):
                raise dist.DistError(f"another rank failed: {what}")
            if time.monotonic() > line_due:
                print(f"rank {self.rank} waits for another: {what}", flush=True)
                line_due = math.inf
            time.sleep(POLL_SECONDS)


@contextmanager
def join_world(
    compute: ComputeConfig, timeout_seconds: float = RunConfig.timeout_seconds
) -> Iterator[World]:
    """Choose this rank's device and join the process group; leave it at the end of the block.

    A rank gives up waiting for another after `timeout_seconds`. One that raises stays in the group
    up to its end: to leave it, NCCL waits for all ranks, which may wait for that one
    (https://github.com/pytorch/pytorch/pull/119250).

    Raises:
        UserError: if there are more processes than devices, no device of the kind asked for, or
            variables that another program left.
    """
    rank, size, local_rank, local_size = read_ranks()
    device, why_cpu = choose_device(compute.device, local_rank, local_size)
    torch.set_num_threads(num_threads(local_size))  # more than cores slow each other down
    if device.type == "cpu":
        keep_freed_memory()
    world = World(device, rank, size, local_rank, local_size, why_cpu)
    if size == 1:
        yield world
        return
    end_with_parent(signal.SIGTERM)  # the launcher
    has_nccl = device.type == "cuda" and dist.is_nccl_available()  # not on Windows
    # NCCL's watchdog aborts the process: ranks report first whom they wait for.
    patience = timedelta(seconds=timeout_seconds + 60 * has_nccl)
    store = open_store(rank, size, local_size, patience)
    dist.init_process_group(
        backend="nccl" if has_nccl else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=patience,
        device_id=device if has_nccl else None,
    )
    yield replace(world, store=store)
    # DDP may drop the last reference to a group whose threads are still at work, and then waits for
    # them for ever (https://github.com/pytorch/pytorch/issues/56297): one more is kept.
    left.append(dist.group.WORLD)
    dist.destroy_process_group()
    if isinstance(store, dist.FileStore) and rank == 0:
        with suppress(OSError):  # a file without a name
            Path(store.path).unlink()


def read_ranks() -> tuple[int, int, int, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE: those of a launcher, or of one process.

    Raises:
        UserError: if they are no rank of a job, or it is not said where its ranks meet.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    texts = [os.environ.get(name, default) for name, default in alone.items()]
    rank, size, local_rank, local_size = (int(t) if t.isdecimal() else -1 for t in texts)
    needed = ["RANK"] * (size > 1) + ["MASTER_ADDR"] * (size > local_size)
    needed += ["MASTER_PORT"] * (size > 1 and STORE not in os.environ)
    missing = [name for name in needed if not os.environ.get(name)]
    fits = 0 <= rank < size and 0 <= local_rank < size and 1 <= local_size <= size
    port = os.environ.get("MASTER_PORT", "") if "MASTER_PORT" in needed else ""
    no_port = ["MASTER_PORT"] * (bool(port) and not (port.isdecimal() and int(port) < 2**16))
    if missing or no_port or not fits:
        said = [*alone, *no_port]
        found = " ".join(f"{name}={os.environ[name]!a}" for name in said if name in os.environ)
        without = f" without {', '.join(missing)}" if missing else ""
        raise UserError(
            f"the environment has {found}{without}, which is no rank of a job: unset what another "
            "program left, or start all processes with torchrun, or with --run.processes"
        )
    return rank, size, local_rank, local_size


def choose_device(name: str, local_rank: int, local_size: int) -> tuple[torch.device, str]:
    """This rank's device: its own GPU, or the CPU that all share; and why no GPU was found.

    Raises:
        UserError: if there are more processes than devices, none of the kind, or one too old.
    """
    found, why = find_accelerator()
    if name not in ("auto", "cpu", found):
        raise UserError(f"--compute.device {name}: {why or f'this machine has {found}'}")
    name, why = (found, why) if name == "auto" else (name, "")
    if name == "cuda":
        count = torch.cuda.device_count()
        # With `srun --gpus-per-task 1`, each task sees one GPU, its own, as the first.
        is_task = os.environ.get("SLURM_LOCALID") == str(local_rank)  # no rank of a task's launcher
        has_own = count == 1 and is_task and "SLURM_GPUS_PER_TASK" in os.environ
        if local_size > count and not has_own:
            raise UserError(
                f"{local_size} processes need as many GPUs; there are {count}: "
                f"--run.processes {count}, or --compute.device cpu"
            )
        device = torch.device("cuda", 0 if has_own else local_rank)
        if why := why_too_old(device.index):
            raise UserError(f"{why}, or hide that GPU by CUDA_VISIBLE_DEVICES")
        torch.cuda.set_device(device)
        return device, ""
    if name == "mps" and local_size > 1:
        raise UserError("several processes on one Apple GPU do not help: --run.processes 1")
    return torch.device(name), why


def open_store(rank: int, size: int, local_size: int, patience: timedelta) -> dist.Store:
    """Where the ranks find each other: a new store for each attempt that torchrun makes.

    In a shared store, the next attempt would find the closed ports of the dead one
    (https://github.com/pytorch/pytorch/issues/135712). On one machine a file is enough, and no port
    is open to the network.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if size == local_size:
        if LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        if STORE in os.environ:
            return dist.FileStore(f"/proc/self/fd/{os.environ[STORE]}", size)
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        name = f"store-{job}-{os.getppid()}-{os.environ['MASTER_PORT']}-{attempt}"
        return dist.FileStore(str(Path(tempfile.gettempdir(), name)), size)
    # gloo would take the address of this machine's name, which is often 127.0.1.1.
    if interface := interface_to(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=patience))
    return dist.PrefixStore(f"attempt{attempt}", store)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP shards; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
