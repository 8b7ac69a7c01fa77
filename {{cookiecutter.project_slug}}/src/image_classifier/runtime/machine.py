"""What this machine, or the container on it, offers: cores, memory, an accelerator."""

import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from .platform import affinity, free_memory_bytes, install_command

CORES = "RUN_CORES"  # variable with the share of a run that a tool trains beside others
CGROUPS = Path("/sys/fs/cgroup")
# Files of a cgroup, of version 2 and 1: the limit, what is used, and of that what files take.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def cgroups(controller: str, root: Path) -> list[Path]:
    """The folders of what limits this process by `controller`: its cgroup, and those above.

    A container sees its own as the root; SLURM and systemd put theirs deep below it. Version 1 of
    cgroups has a tree for each controller: https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    folders = [root]
    for controllers, path in re.findall(r"^\d+:(.*?):(.*)", proc("self/cgroup"), re.MULTILINE):
        if controller in controllers.split(",") or not controllers:
            own = root / (controller if controllers else "") / path.lstrip("/")
            folders += [own, *own.parents]
    return folders


def num_cores(root: Path = CGROUPS) -> int:
    """Cores of this process: its CPU affinity or share, limited by the quotas of its cgroups.

    `os.cpu_count` counts all cores of the host; threads beyond the quota are throttled.
    """
    cores = min(len(affinity(0)), int(os.environ.get(CORES, sys.maxsize)))
    for folder in cgroups("cpu", root):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with suppress(OSError, ValueError):  # no such file, or "max"
                words = " ".join((folder / name).read_text() for name in names)
                quota, period = map(int, words.split())
                if quota > 0:  # -1: no limit
                    cores = min(cores, max(1, round(quota / period)))
    return cores


def host_memory_bytes(root: Path = CGROUPS) -> int:
    """Free main memory: what the host has available, within the limits of its cgroups."""
    free = free_memory_bytes()
    for folder in cgroups("memory", root):
        for most, now, files in MEMORY_FILES:
            with suppress(OSError, ValueError):  # no such file, or "max"
                limit = int((folder / most).read_text())
                used = int((folder / now).read_text())
                # The system gives back the memory of files that were read.
                cached = re.search(rf"\b{files} (\d+)", (folder / "memory.stat").read_text())
                free = max(0, min(free, limit - used + int(cached[1] if cached else 0)))
    return free


def device_memory_bytes(device: torch.device) -> int:
    """Free memory on `device`, in bytes; what torch has taken and does not use is free, too."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return host_memory_bytes()


def num_threads(processes: int) -> int:
    """Threads for each of `processes` on this machine: OMP_NUM_THREADS, or its share of the cores.

    torchrun sets OMP_NUM_THREADS=1 if nobody has set it, which leaves cores idle: ignored.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    is_torchruns = asked == "1" and "TORCHELASTIC_MAX_RESTARTS" in os.environ
    if asked.isdigit() and int(asked) > 0 and not is_torchruns:
        return int(asked)
    return max(1, num_cores() // processes)


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which torch computes with one thread, for work that has threads of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def leave_tracer_out(*owners: type) -> None:
    """Let methods of torch's classes run without the tracer of `torch.compile`.

    Those which it must not trace import it on their first call, to tell it so: a third of the start
    of a run and 100 MB, for nothing in a run that compiles nothing.
    """
    if "torch._dynamo" not in sys.modules:
        for method in (method for owner in owners for method in vars(owner).values()):
            if hasattr(method, "__wrapped__"):
                method.__wrapped__.__dynamo_disable = method.__wrapped__


def untraced(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """An optimizer whose `step` leaves out the tracer too: see `leave_tracer_out`."""
    step = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), {"step": step})


def find_accelerator() -> tuple[str, str]:
    """The kind of device to train on: cuda, mps or cpu; if cpu, also why there is no GPU.

    A GPU that is older than all that this build of torch has kernels for does not count.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return "cpu", why_no_gpu()
    if found.type not in ("cuda", "mps"):
        return "cpu", f"the {found.type} device of this machine is not supported: cuda and mps are"
    why = why_too_old(0) if found.type == "cuda" else ""
    return "cpu" if why else found.type, why


def why_too_old(gpu: int) -> str:
    """Why this build of torch has no kernels for a GPU of CUDA; empty if it has."""
    if torch.version.cuda is None:  # ROCm's GPUs
        return ""
    major, minor = torch.cuda.get_device_capability(gpu)
    oldest = min(int(re.sub(r"\D", "", arch)) for arch in torch.cuda.get_arch_list())
    if 10 * major + minor >= oldest:
        return ""
    return (
        f"{torch.cuda.get_device_name(gpu)} has compute capability {major}.{minor}; torch "
        f"{torch.__version__} needs {oldest / 10}: install a build for older CUDA"
    )


def why_no_gpu() -> str:
    """Why torch sees no GPU, and what to do about it."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        value = os.environ.get(name)
        if value is not None and (not value.strip() or value.startswith("-1")):
            return f"{name} is {value!a}, which hides every GPU: unset it"
    if torch.version.cuda is None and torch.version.hip is None:
        build = f"torch {torch.__version__} is built"
        if shutil.which("nvidia-smi"):
            words = ["--reinstall", "--torch-backend", "auto", "torch", "torchvision"]
            install = install_command(*words, needs_uv=True)
            return f"there is an NVIDIA driver, but {build} without CUDA: {install}"
        return f"{build} for CPUs, and there is no NVIDIA driver"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, no GPU
        return str(error).partition(". ")[0]
    return "torch finds no GPU"


def usual_precision(device: torch.device) -> str:
    """The number format that is usually fastest on `device`, without a measurement.

    GPUs have tensor cores for bf16 from Ampere on (compute capability 8.0), for fp16 from Volta on
    (7.0): https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    # Apple's GPUs have both in autocast; that they are faster there is not yet shown.
    has_bf16 = any(flag in proc("cpuinfo") for flag in (" amx_bf16", " avx512_bf16", " bf16"))
    return "bf16" if device.type == "cpu" and has_bf16 else "fp32"


@cache
def proc(name: str) -> str:
    """The content of the file `name` in Linux's /proc; empty elsewhere."""
    with suppress(OSError):
        return Path("/proc", name).read_text(errors="replace")
    return ""


def device_name(device: torch.device) -> str:
    """The device's name for a reader: `NVIDIA H200`, `CPU, 2 cores`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {num_cores()} cores" if device.type == "cpu" else device.type
