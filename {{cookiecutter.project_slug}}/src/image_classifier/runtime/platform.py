"""What differs between systems: Linux has it all, macOS and Windows lack some of it.

The rest of the package asks here, never which system this is. Nothing here imports torch.
"""

import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

# A forked worker starts at once and shares memory. Only on Linux are forks safe.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
# What schedulers, terminals and `kill` send to a job that should end.
STOP_SIGNALS = [n for n in signal.Signals if n.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")]
HAS_NAMELESS_FILES = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)  # the network of this machine alone
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opens a pipe that nobody writes to
# The cores that a process may use; all of them where there is no affinity.
affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))

PR_SET_PDEATHSIG = 1  # of prctl(2)
SIOCGIFADDR = 0x8915  # of netdevice(7): the IPv4 address of an interface
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


def lock(file: IO) -> None:
    """Lock `file`, which is open for writing; PermissionError or BlockingIOError if it is taken."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file.fileno(), 2**30, os.SEEK_SET)  # nobody can read a byte that is locked
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        # Not `flock`: data workers, which are forked, would continue to hold the lock.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def send_signal(process: subprocess.Popen, number: int) -> None:
    """Send a signal to a process; on Windows, Ctrl-C reaches the whole terminal by itself."""
    if sys.platform != "win32":
        process.send_signal(number)


def hold_ctrl_c(is_held: bool) -> None:
    """Let Ctrl-C wait, here and in processes that this one starts, or not; Windows can't."""
    if hasattr(signal, "pthread_sigmask"):
        how = signal.SIG_BLOCK if is_held else signal.SIG_UNBLOCK
        signal.pthread_sigmask(how, [signal.SIGINT])


def install_command(*libraries: str, needs_uv: bool = False) -> str:
    """The command line that installs `libraries` into the environment of this Python.

    One that `uv venv` made has no pip, and a `pip` on the PATH would fill another environment.
    """
    join = subprocess.list2cmdline if sys.platform == "win32" else shlex.join
    python = join([sys.executable])
    has_pip = find_spec("pip") is not None
    if needs_uv or (not has_pip and shutil.which("uv")):
        return f"uv pip install --python {python} {join(libraries)}"
    pip = "" if has_pip else f"{python} -m ensurepip && "
    return f"{pip}{python} -m pip install {join(libraries)}"


def free_memory_bytes() -> int:
    """Main memory that the host has available; macOS does not tell: half of what it has."""
    if sys.platform == "win32":
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size, all memory, what is free
        ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return status[2]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def peak_memory_bytes() -> int:
    """The most main memory that this process has had so far."""
    if sys.platform == "win32":
        counters = (ctypes.c_uint64 * 9)(72)  # PROCESS_MEMORY_COUNTERS: its size, peak memory
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(ctypes.c_void_p(-1), counters, 72)
        return counters[1]
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def keep_freed_memory() -> None:
    """Let glibc keep the memory that this process frees.

    By default glibc returns large blocks to the kernel at once, and on a CPU each step then faults
    in the pages of its activations again: 5 to 15 % of a step; see `mallopt(3)`.
    """
    call_libc("mallopt", M_MMAP_THRESHOLD, 2**30)  # bytes from which a block is mapped on its own
    call_libc("mallopt", M_TRIM_THRESHOLD, 2**31 - 1)  # free at the heap's end before it shrinks
    call_libc("mallopt", M_TOP_PAD, 2**27)  # by which it grows


def hand_back_memory() -> None:
    """Return freed memory to the kernel, once; see `malloc_trim(3)`."""
    call_libc("malloc_trim", 0)


def end_with_parent(number: int) -> None:
    """Let Linux send this process the signal `number` when its parent dies."""
    call_libc("prctl", PR_SET_PDEATHSIG, number)


def interface_to(host: str) -> str | None:
    """The network interface by which Linux reaches `host`; None elsewhere and where it has none."""
    if sys.platform != "linux":
        return None
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = name.encode().ljust(256, b"\0")
                if fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24] == address:
                    return name
    return None


def call_libc(name: str, *arguments: object) -> None:
    """Call a function of glibc; do nothing with another C library."""
    with suppress(OSError, AttributeError):
        getattr(ctypes.CDLL("libc.so.6"), name)(*arguments)
