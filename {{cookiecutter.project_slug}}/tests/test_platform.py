"""Windows and other systems, shown here by taking away what they lack."""

import os
import re
import runpy
import shlex
import sys
from contextlib import closing
from itertools import chain
from pathlib import Path

import pytest
import torch
from conftest import SMOKE, changed, losses, run_ranks, start

from image_classifier.cli import main
from image_classifier.data.loader import TrainData
from image_classifier.runtime import platform
from image_classifier.runtime.distributed import join_world

PACKAGE = Path(platform.__file__).parents[1]
# Data workers run it too: they start from nothing, as they do on Windows.
WINDOWS = """
import ctypes, os, signal, sys
from types import ModuleType, SimpleNamespace
import PIL.JpegImagePlugin, torch.distributed, torch.utils.data, tyro

torch.utils.data._utils.signal_handling.IS_WINDOWS = True  # where a DataLoader notes no SIGCHLD
LACKING = "memfd_create preadv sched_getaffinity setsid sysconf O_NONBLOCK RWF_NOWAIT"
LACKING += " SIGHUP SIGUSR1 SIGKILL SIGCHLD pthread_sigmask"

def lesser(module, **others):
    copy = ModuleType(module.__name__)
    kept = {name: there for name, there in vars(module).items() if name not in LACKING.split()}
    vars(copy).update(kept | others)
    return copy

def tell(*words):
    words[-1][1:3] = (2**33, 2**33)

locked = []
msvcrt = SimpleNamespace(LK_NBLCK=2, locking=lambda *words: locked.append(words))
sys.modules |= {"fcntl": None, "resource": None, "msvcrt": msvcrt}
ctypes.windll = SimpleNamespace(kernel32=SimpleNamespace(
    GlobalMemoryStatusEx=tell, K32GetProcessMemoryInfo=lambda *words: tell(words[1])
))
windows = {"os": lesser(os), "signal": lesser(signal), "sys": lesser(sys, platform="win32")}
real = {name: sys.modules[name] for name in windows}
sys.modules |= windows
from image_classifier.cli import main
from image_classifier.train import train
sys.modules |= real  # for libraries

if __name__ == "__main__":
    code = main(sys.argv[1:])
    assert [count for _, _, count in locked] == [1]
    sys.exit(code)
"""


def run_script(script, words, errors):
    """Run a script as Python does, with a new copy of the package; standard error is a file."""
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE.name]:
        del sys.modules[name]
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    sys.argv = [str(script), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def test_it_trains_where_there_is_what_windows_has(tmp_path):
    script, errors = tmp_path / "windows.py", tmp_path / "errors"
    script.write_text(WINDOWS)
    words = f"train {SMOKE} --data.where stream --data.workers 1 --run.dir".split()
    process, _ = start(run_script, script, [*words, str(tmp_path / "windows")], errors)
    assert main([*words, str(tmp_path / "linux")]) == 0
    process.join()
    assert (process.exitcode, errors.read_text()) == (0, "")
    assert losses(tmp_path / "windows") == losses(tmp_path / "linux")


def batches_by(method, config):
    """The first batches of this rank: rank 1 has a worker that starts by `method`."""
    platform.START_METHOD = method
    config = changed(config, data__workers=int(os.environ.get("RANK", "1")))
    with join_world(config.compute) as world, closing(TrainData(config, world)) as data:
        return [(batch.images.clone(), batch.labels.clone()) for batch in data.batches(0, 3)]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_decode_the_same(on_photos, monkeypatch, method):
    monkeypatch.setattr(platform, "START_METHOD", platform.START_METHOD)  # which is put back
    config = changed(on_photos, data__where="stream")
    alone = batches_by(platform.START_METHOD, config)
    # In the process of the tests, which have a server that has imported torch.
    in_ranks = method == "spawn"
    ranks = run_ranks(2, batches_by, method, config) if in_ranks else [batches_by(method, config)]
    parts = (zip(*batches, strict=True) for batches in zip(*ranks, strict=True))
    together = [torch.cat(tensors) for tensors in chain(*parts)]
    assert all(map(torch.equal, chain(*alone), together))


@pytest.mark.parametrize(
    ("pip", "uv", "begins"),
    [
        ("pip", "uv", "'/my env/python' -m pip install "),
        ("pip", None, "'/my env/python' -m pip install "),
        (None, "uv", "uv pip install --python '/my env/python' "),
        (None, None, "'/my env/python' -m ensurepip && '/my env/python' -m pip install "),
    ],
)
def test_the_command_that_installs_a_library_reaches_the_environment_that_lacks_it(
    monkeypatch, pip, uv, begins
):
    monkeypatch.setattr(platform, "find_spec", lambda _: pip)
    monkeypatch.setattr(platform.shutil, "which", lambda _: uv)
    monkeypatch.setattr(sys, "executable", "/my env/python")
    command = platform.install_command("ray[train]>=2.60", "timm")
    assert command == f"{begins}'ray[train]>=2.60' timm"
    assert shlex.split(command)[-2:] == ["ray[train]>=2.60", "timm"]
    monkeypatch.setattr(platform.sys, "platform", "win32")
    monkeypatch.setattr(sys, "executable", r"C:\my env\python.exe")
    assert '"C:\\my env\\python.exe" ' in platform.install_command("timm")


def test_nothing_else_says_how_to_install_a_library():
    files = [p for p in PACKAGE.rglob("*.py") if "tests" not in p.relative_to(PACKAGE).parts]
    said = [path.name for path in files if re.search(r"pip install\b", path.read_text())]
    assert said == ["platform.py"]
