"""Cores and memory are those of the container, not those of the host."""

import os
from pathlib import Path

import pytest

from image_classifier.machine import host_memory_bytes, num_cores


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
