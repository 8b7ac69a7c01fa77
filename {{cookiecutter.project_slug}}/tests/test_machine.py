"""Cores and memory are the container's; a machine without a usable GPU says why."""

import errno
import os

import pytest
import torch

from image_classifier.config import ComputeConfig
from image_classifier.errors import UserError
from image_classifier.runtime import distributed, machine
from image_classifier.runtime.distributed import choose_device
from image_classifier.runtime.launch import attempt
from image_classifier.runtime.machine import (
    find_accelerator,
    host_memory_bytes,
    num_cores,
    num_threads,
)


@pytest.mark.parametrize(
    ("quota", "cores"), [("", 8), ("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1)]
)
def test_a_quota_limits_the_cores(quota, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert num_cores(tmp_path) == cores


def test_a_limit_limits_the_memory(tmp_path):
    for name, size in {"max": 2**30, "current": 2**29}.items():
        (tmp_path / f"memory.{name}").write_text(f"{size}\n")
    assert host_memory_bytes(tmp_path) == 2**29
    assert host_memory_bytes(tmp_path / "nowhere") > 2**29


def test_threads_are_those_that_the_user_asks_for(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    assert (num_threads(1), num_threads(3), num_threads(20)) == (8, 2, 1)
    for text, threads in {"1": 1, "4,2": 4, "16": 16, "many": 8, "0": 8}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert num_threads(1) == threads
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")  # of torchrun, which sets 1 by itself
    for text, threads in {"1": 4, "2": 2}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert num_threads(2) == threads


def test_a_process_computes_on_as_many_threads(monkeypatch):
    monkeypatch.setattr(distributed, "num_threads", lambda processes: 3 // processes)
    # The first block restores the number of threads.
    with machine.one_thread(), distributed.join_world(ComputeConfig(device="cpu")):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() != 3


def refuse_to_start():
    """As torch does without a driver."""
    raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one")


def test_a_run_on_the_cpu_says_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    for program, reason in (
        ("/bin/nvidia-smi", "is built without CUDA: uv pip install --reinstall --torch-backend"),
        (None, "there is no NVIDIA driver"),
    ):
        monkeypatch.setattr(machine.shutil, "which", lambda _, program=program: program)
        device, why = choose_device("auto", 0, 1)
        assert device.type == "cpu"
        assert reason in why
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse_to_start)
    assert choose_device("auto", 0, 1)[1] == "Found no NVIDIA driver on your system"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    expected = "CUDA_VISIBLE_DEVICES is '-1', which hides every GPU: unset it"
    assert choose_device("auto", 0, 1)[1] == expected
    assert choose_device("cpu", 0, 1) == (torch.device("cpu"), "")  # it was asked for
    with pytest.raises(UserError, match=r"--compute.device cuda: CUDA_VISIBLE_DEVICES is"):
        choose_device("cuda", 0, 1)


def test_a_gpu_that_is_older_than_the_build_is_not_taken(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_120"])
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GTX 1080")
    device, why = choose_device("auto", 0, 1)
    assert device.type == "cpu"
    assert "GTX 1080 has compute capability 6.1; torch" in why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    assert find_accelerator() == ("cuda", "")


def test_each_process_has_a_device_of_its_own_or_is_refused(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(distributed, "find_accelerator", lambda: ("cuda", ""))
    assert choose_device("cpu", 1, 2) == (torch.device("cpu"), "")
    for name in ("auto", "cuda"):
        assert choose_device(name, 1, 2) == (torch.device("cuda", 1), "")
        with pytest.raises(UserError, match=r"3 processes .* --run\.processes 2"):
            choose_device(name, 0, 3)
    assert chosen == [1, 1]


@pytest.mark.parametrize(
    ("fault", "begin", "end"),
    [
        (RuntimeError("planted"), "Traceback", "RuntimeError: planted\n\nfailed\n"),
        (OSError(errno.ENOSPC, "No space left", "a"), "failed: [Errno 28] No space left: ", "\n"),
    ],
)
def test_a_fault_comes_with_its_traceback_and_a_full_disk_in_a_line(fault, begin, end, capsys):
    def fail():
        raise fault

    assert attempt(fail) == 1
    said = capsys.readouterr().err
    assert said.startswith(begin)
    assert said.endswith(end)
