"""Cores and memory are the container's, not the host's; what the system has read is at hand."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from image_classifier.config import UserError
from image_classifier.distributed import choose_device
from image_classifier.machine import (
    host_memory_bytes,
    is_in_memory,
    map_pages,
    num_cores,
)


def write(folder: Path, **files: str) -> Path:
    """A folder as the kernel shows control groups; `__` in a name is a dot, `___` a slash."""
    for name, text in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def test_a_quota_limits_the_cores(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == 8
    assert num_cores(write(tmp_path / "none", cpu__max="max 100000")) == 8
    assert num_cores(write(tmp_path / "two", cpu__max="200000 100000")) == 2
    assert num_cores(write(tmp_path / "half", cpu__max="50000 100000")) == 1
    old = {"cpu___cpu__cfs_quota_us": "300000", "cpu___cpu__cfs_period_us": "100000"}
    assert num_cores(write(tmp_path / "old", **old)) == 3


def test_a_limit_limits_the_memory(tmp_path: Path) -> None:
    limits = write(tmp_path, memory__max=str(2**30), memory__current=str(2**29))
    assert host_memory_bytes(limits) == 2**29
    assert host_memory_bytes(tmp_path / "nowhere") > 2**29


@pytest.mark.skipif(sys.platform != "linux", reason="the system's own pages, as Linux keeps them")
def test_a_file_in_memory_is_mapped_at_once(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "images.safetensors"
    save_file({"images": np.ones(8_000_000, dtype=np.uint8)}, path)
    assert is_in_memory(path)
    images = load_file(path)["images"].numpy()
    map_pages(images)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert images[::4096].all()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 20  # of 2,000 pages


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing lets go of a file's pages")
def test_a_file_on_the_disk_is_not_taken_for_one_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "images"
    with path.open("wb") as file:
        file.write(bytes(8_000_000))
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not is_in_memory(path)
    assert not is_in_memory(tmp_path / "missing")


def test_each_process_has_a_device_of_its_own_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for there, name, device in (
        (None, "auto", "cpu"),
        (None, "cpu", "cpu"),
        ("cuda", "cpu", "cpu"),
    ):
        kind = there and torch.device(there)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind, **_: kind)
        assert choose_device(name, 1, 2) == torch.device(device)
        if there is None:
            with pytest.raises(UserError, match=r"--compute\.device cuda"):
                choose_device("cuda", 1, 2)
    for name in ("auto", "cuda"):
        assert choose_device(name, 1, 2) == torch.device("cuda", 1)
        with pytest.raises(UserError, match=r"3 processes .* --run\.processes 2"):
            choose_device(name, 0, 3)
    assert chosen == [1, 1]
