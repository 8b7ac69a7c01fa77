"""One process per device: who we are, what the others hold, and how all of them are started.

`join_world` serves a process that is alone, one that `torchrun` started, and one that `launch`
started, which is torchrun's own agent called from here: the same environment, the same code path.
"""

import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import ComputeConfig, RunConfig, UserError
from .machine import keep_freed_memory, num_cores

TIMEOUT = timedelta(seconds=300)  # after which a rank gives up waiting for another


@dataclass(frozen=True)
class World:
    """This process among all that train one model; alone unless it was started with others."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine
    began: float = field(default_factory=time.monotonic)  # when it joined, in seconds

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` added up over all processes, in place; it must be on the device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, holds: bool) -> bool:
        """Whether `holds` is true on every process. Waits for the device."""
        return int(self.sum(torch.tensor(int(holds), device=self.device))) == self.size

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give `model` the statistics that rank 0 has: each rank's BatchNorm saw its own images."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def share(self, count: int) -> slice:
        """This rank's part of a batch of `count` images; the parts are equal."""
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def parallelize(self, model: nn.Module, compute: ComputeConfig) -> nn.Module:
        """`model`, wrapped if there are other processes: backward then averages the gradients."""
        if self.size == 1:
            return model
        if compute.sync_batchnorm:
            if self.device.type != "cuda":
                raise UserError("--compute.sync-batchnorm works between GPUs only")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return nn.parallel.DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )

    @contextmanager
    def first_here(self) -> Iterator[None]:
        """A block that this machine's first process runs before the others do."""
        if self.local_rank > 0:
            dist.barrier()
        yield
        if self.local_rank == 0 and self.size > 1:
            dist.barrier()


@contextmanager
def join_world(compute: ComputeConfig) -> Iterator[World]:
    """Find this process's device and its fellows; leave the group on every way out.

    Raises:
        UserError: if there are more processes than devices, or no device of the kind asked for.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = choose_device(compute.device, local_rank, local_size)
    # More threads than cores slow each other down; torchrun's default of one leaves cores idle.
    torch.set_num_threads(max(1, num_cores() // local_size))
    if device.type == "cpu":
        keep_freed_memory()
    world = World(device, rank, size, local_rank, local_size)
    if size == 1:
        yield world
        return
    store = open_store(rank, size, local_size)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield world
    finally:
        dist.destroy_process_group()
        if isinstance(store, dist.FileStore) and rank == 0:
            Path(store.path).unlink(missing_ok=True)


def choose_device(name: str, local_rank: int, local_size: int) -> torch.device:
    """The device of this process: its own GPU, or the CPU that all share."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        name = found.type if found else "cpu"
    elif name not in ("cpu", found and found.type):
        raise UserError(f"--compute.device {name}: this machine has {found or 'no accelerator'}")
    if name == "cuda":
        if local_size > torch.cuda.device_count():
            raise UserError(
                f"{local_size} processes need as many GPUs; there are {torch.cuda.device_count()}: "
                f"--run.processes {torch.cuda.device_count()}, or --compute.device cpu"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if name == "mps" and local_size > 1:
        raise UserError("several processes on one Apple GPU do not help: --run.processes 1")
    return torch.device(name)


def open_store(rank: int, size: int, local_size: int) -> dist.Store:
    """Where the processes find each other; anew for each attempt that torchrun makes.

    What a dead attempt left in a shared store sends the next one to closed ports
    (https://github.com/pytorch/pytorch/issues/135712). On one machine a file does, and no port
    is open to the network.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if size == local_size:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        name = f"store-{job}-{os.getppid()}-{os.environ['MASTER_PORT']}-{attempt}"
        return dist.FileStore(str(Path(tempfile.gettempdir(), name)), size)
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=TIMEOUT))
    return dist.PrefixStore(f"attempt{attempt}", store)


def is_launched() -> bool:
    """Whether torchrun or `launch` started this process."""
    return "RANK" in os.environ


def is_echo(error: Exception) -> bool:
    """Whether `error` only says that another rank has gone, which has its own account of why."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def num_processes(run: RunConfig, compute: ComputeConfig) -> int:
    """How many processes to start: what was asked for, else one per GPU."""
    if run.processes != "auto":
        return run.processes
    if compute.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return 1


def launch(processes: int) -> int:
    """Run this very command in `processes` processes and return the exit code of the first to fail.

    They inherit the terminal. When one fails, the others are stopped.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks say what is the matter; the agent's account of the same would come on top of it.
    logging.disable(logging.ERROR)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # until `join_world` knows better
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder, "rendezvous")),
            rdzv_configs={"store_type": "file"},
            max_restarts=0,
            local_addr="127.0.0.1",
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGUSR1",
        )
        try:
            elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            code = failure.exitcode
            return code if code > 0 else 128 - code
        except Exception as error:
            # The agent turns a signal that reaches it into this, after it ended the ranks.
            number = getattr(error, "sigval", None)
            if number is None:
                raise
            return 128 + int(number)
    return 0
