"""What this machine, or the container we run in, really gives: cores and memory."""

import contextlib
import ctypes
import mmap
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch

CGROUP = Path("/sys/fs/cgroup")
PR_SET_PDEATHSIG = 1  # of prctl(2)
MADV_POPULATE_READ = 22  # of madvise(2), since Linux 5.14; Python's mmap has no name for it
# The command that installs the build of torch that fits the driver.
RIGHT_BUILD = "uv pip install --reinstall --torch-backend auto torch torchvision"
# What helps against faults of a GPU, whose tracebacks show where it was noticed, not where it was.
ADVICE = {
    "device-side assert": "a check within a kernel failed, most often of a label or an index that "
    "is out of range: put CUDA_LAUNCH_BLOCKING=1 before the command to see the line, or take "
    "--compute.device cpu to see the value",
    "CUDNN_STATUS_NOT_INITIALIZED": "cuDNN could not start, most often as other programs have the "
    "GPU's memory (see nvidia-smi), or as it does not fit the driver: put CUDA_LAUNCH_BLOCKING=1 "
    "before the command to see what failed first",
    "no kernel image is available": f"this torch is not built for this GPU: {RIGHT_BUILD}",
}


def num_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may keep busy: affinity, and the container's quota if it has one.

    `os.cpu_count` sees all cores of the host, and more threads than the quota allows get throttled.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 1
    quota = cgroup_quota(cgroup)
    return max(1, min(cores, round(quota))) if quota else cores


def cgroup_quota(cgroup: Path = CGROUP) -> float | None:
    """The container's CPU quota in cores, or None: from cgroup v2's file, else v1's two."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def host_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Main memory that is free: the host's, and what the container's limit leaves of it."""
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES")
        free = pages * os.sysconf("SC_PAGE_SIZE")
        meminfo = Path("/proc/meminfo").read_text()
        available = [line.split()[1] for line in meminfo.splitlines() if "MemAvailable" in line]
        free = int(available[0]) * 1024 if available else free
    except (OSError, ValueError, AttributeError):  # macOS, Windows: assume a small machine
        free = 4 * 2**30
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((cgroup / limit_name).read_text())
            free = min(free, limit - int((cgroup / usage_name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(0, free)


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    glibc hands large blocks back to the kernel at once, so that on a CPU each step faults in all
    of its activations anew; see `mallopt(3)`.
    """
    set_malloc(mmap_threshold=2**30, trim_threshold=2**31 - 1, top_pad=2**27)


def return_freed_memory() -> None:
    """Let it hand memory back as glibc does by itself, after it has seen large blocks.

    By then it has raised its thresholds as far as it ever does.
    """
    set_malloc(mmap_threshold=2**25, trim_threshold=2**26, top_pad=2**17)
    hand_back_memory()


def hand_back_memory() -> None:
    """Give what is freed and kept to the kernel, once; see `malloc_trim(3)`."""
    call_libc("malloc_trim", 0)


def map_pages(array: np.ndarray) -> None:
    """Let this process see all pages of a memory-mapped array at once, not each when it is read.

    It is for files that `is_in_memory`: pages that are not would be read from the disk first.
    Where the system can't do it, nothing changes.
    """
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = array.ctypes.data + array.nbytes - first
    call_libc("madvise", ctypes.c_void_p(first), ctypes.c_size_t(length), MADV_POPULATE_READ)


def is_in_memory(path: Path) -> bool:
    """Whether the system holds a file in memory, judged by a few places that are not waited for."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for place in range(0, size, size // 8 + 1):
                os.preadv(file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
    except (OSError, AttributeError):  # it would have to wait, or this is not Linux
        return False
    return True


def set_malloc(mmap_threshold: int, trim_threshold: int, top_pad: int) -> None:
    """From which size on glibc asks the kernel for a block, and when it hands back; in bytes."""
    for parameter, value in (
        (-3, mmap_threshold),  # M_MMAP_THRESHOLD: smaller blocks come from the heap
        (-1, trim_threshold),  # M_TRIM_THRESHOLD: which is cut when so much at its end is free
        (-2, top_pad),  # M_TOP_PAD: and grows by so much
    ):
        call_libc("mallopt", parameter, value)


def end_with_parent(number: int) -> None:
    """Have this process sent the signal `number` when its parent is killed, where Linux can."""
    call_libc("prctl", PR_SET_PDEATHSIG, number)


def call_libc(name: str, *arguments: object) -> None:
    """Call a function of the C library, if that is glibc and has it."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL("libc.so.6"), name)(*arguments)


def find_accelerator() -> tuple[str, str]:
    """The kind of device to train on here: cuda, mps, ... or cpu; and then why there is no GPU.

    A GPU that this build of torch has no kernels for counts for none.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return "cpu", why_no_gpu()
    if found.type == "cuda" and not has_kernels(*torch.cuda.get_device_capability(0)):
        major, minor = torch.cuda.get_device_capability(0)
        return "cpu", (
            f"{torch.cuda.get_device_name(0)} has compute capability {major}.{minor}, and torch "
            f"{torch.__version__} has kernels for {', '.join(torch.cuda.get_arch_list())} only: "
            f"install another build of torch ({RIGHT_BUILD})"
        )
    return found.type, ""


def has_kernels(major: int, minor: int) -> bool:
    """Whether this build of torch can compute on an NVIDIA GPU of that capability.

    Kernels for `sm_86` run on 8.6 and later 8.x; `compute_90` is compiled for 9.0 and all later.
    https://docs.nvidia.com/cuda/blackwell-compatibility-guide/
    """
    if torch.version.cuda is None:  # ROCm
        return True
    for arch in torch.cuda.get_arch_list():
        kind, _, number = arch.partition("_")
        number = number.rstrip("af")  # `sm_90a`
        built = int(number[:-1]), int(number[-1])
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False


def why_no_gpu() -> str:
    """Why torch sees no GPU, and what to do about it."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        value = os.environ.get(name)
        if value is not None and (not value.strip() or value.startswith("-1")):
            return f"{name} is {value!a}, which hides every GPU: unset it"
    if torch.version.cuda is None and torch.version.hip is None:
        if has_nvidia_driver():
            return (
                f"there is an NVIDIA driver, but torch {torch.__version__} is built without CUDA: "
                f"{RIGHT_BUILD}"
            )
        return f"torch {torch.__version__} is built for CPUs, and there is no NVIDIA driver"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, no GPU
        return str(error).partition(". ")[0]
    return "torch finds no GPU"


def has_nvidia_driver() -> bool:
    """Whether the system has a driver for NVIDIA's GPUs: on Linux, Windows or its Linux."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def num_threads(processes: int) -> int:
    """Threads for each of `processes` here: as OMP_NUM_THREADS says, else its share of the cores.

    torchrun sets that to 1 where nobody has set it, which leaves cores idle.
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


def device_memory_bytes(device: torch.device) -> int:
    """Memory that is free on `device`, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_memory_bytes()


def usual_precision(device: torch.device) -> str:
    """The number format that is usually fastest on `device`, without a measurement.

    A GPU has tensor cores for bf16 from Ampere on (capability 8.0), and for fp16 from Volta on
    (7.0): https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    has_bf16 = any(flag in cpu_info() for flag in (" amx_bf16", " avx512_bf16", " bf16"))
    return "bf16" if device.type == "cpu" and has_bf16 else "fp32"


def cpu_name() -> str:
    """What the manufacturer calls this CPU: `AMD EPYC 9B14`."""
    names = [line.partition(":")[2] for line in cpu_info().splitlines() if "model name" in line]
    return names[0].strip() if names else platform.processor() or platform.machine()


@cache
def cpu_info() -> str:
    """What Linux says of the processors; empty elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def device_name(device: torch.device) -> str:
    """What a person calls the device: `NVIDIA H200`, `CPU, 2 cores`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU, {num_cores()} cores"
    return device.type


def advice_on(error: Exception) -> str:
    """What to do about a fault of the GPU, after a colon; empty for any other."""
    said = (advice for words, advice in ADVICE.items() if words in str(error))
    return next((f": {advice}" for advice in said), "")
