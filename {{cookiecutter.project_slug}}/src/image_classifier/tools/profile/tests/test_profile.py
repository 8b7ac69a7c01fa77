"""`--profile` shows where the time of a step goes."""

import gzip
import json
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import changed
from torch.autograd import DeviceType

from image_classifier.runtime.distributed import World
from image_classifier.tools.profile import watcher
from image_classifier.train import train


def test_phases_of_a_step_are_printed_and_a_trace_is_written(config, monkeypatch, capsys):
    monkeypatch.setattr(watcher, "SKIPPED_STEPS", 2)
    monkeypatch.setattr(watcher, "RECORDED_STEPS", 1)  # as each takes half a second to write
    train(changed(config, profile=True))
    with gzip.open(Path(config.run.dir, "profile", "trace.json.gz")) as trace:
        assert json.load(trace)["traceEvents"]
    said = capsys.readouterr().out
    assert all(f"  {phase} " in said for phase in ("wait for data", "forward", "optimizer"))
    assert "nothing is recorded" not in said


class Recorder:
    """What counts steps as the profiler does."""

    step_num = 0

    def step(self):
        """Begin the next step."""
        self.step_num += 1


def test_phases_are_milliseconds_of_one_step_and_slow_steps_are_told(config, monkeypatch, capsys):
    asked = {}

    @contextmanager
    def profile(**how):
        asked.update(how)
        yield Recorder()

    monkeypatch.setattr(watcher, "profile", profile)
    monkeypatch.setattr(watcher, "phase_times", lambda _: {"forward": 12_500.0})
    Path(config.run.dir).mkdir()
    data = SimpleNamespace(total_steps=100, steps_in=lambda _: 50)
    parts = {"world": World(torch.device("cpu")), "train_data": data}
    setup = SimpleNamespace(config=changed(config, profile=True), **parts)
    with watcher.watch(setup, SimpleNamespace(step=0)) as end_step:
        # Before 3 that warm up and 5 that are recorded, and after them.
        assert [step for step in range(1, 30) if end_step()] == [10, 18]
        asked["on_trace_ready"](Mock())
    assert re.search(r"(?m)^  forward +2\.50 ms$", capsys.readouterr().out)


def test_one_of_several_processes_records(config):
    setup = SimpleNamespace(
        config=changed(config, profile=True), world=World(torch.device("cpu"), rank=1, size=2)
    )
    with watcher.watch(setup, SimpleNamespace(step=0)) as end_step:
        assert not end_step()
    assert not Path(config.run.dir, "profile").exists()


def test_a_run_that_is_too_short_records_nothing(config, capsys):
    train(changed(config, profile=True, epochs=1))
    assert "nothing is recorded: --profile needs a run with " in capsys.readouterr().out
    assert not Path(config.run.dir, "profile").exists()


def test_no_evaluation_is_recorded_unless_there_are_too_many():
    for every in range(6, 40):
        for step in range(40):
            first = step + watcher.steps_to_skip(step, every) + watcher.WARMUP_STEPS
            assert step + 13 <= first < step + 13 + 6
            assert all(after % every for after in range(first, first + watcher.RECORDED_STEPS))
    assert watcher.steps_to_skip(0, 5) == watcher.SKIPPED_STEPS


def event(key, on_cpu, device=0.0, cpu=0.0, *, is_phase=False):
    kind = DeviceType.CPU if on_cpu else DeviceType.CUDA
    times = {"cpu_time_total": cpu, "device_time_total": device, "self_device_time_total": device}
    return SimpleNamespace(key=key, device_type=kind, is_user_annotation=is_phase, **times)


def test_on_a_gpu_the_backward_pass_has_the_kernels_of_no_other_phase():
    events = [event("wait for data", on_cpu=True, cpu=9.0)]
    events += [event("forward", on_cpu=True, device=20.0), event("optimizer", True, 5.0)]
    # On the device a phase is a span, which has the gaps between its kernels, too.
    events += [event("forward", on_cpu=False, device=70.0, is_phase=True)]
    events += [event("conv", on_cpu=False, device=50.0), event("step", False, 5.0)]
    spent = {"wait for data": 9.0, "copy": 0, "augment": 0, "forward": 20.0, "backward": 30.0}
    assert watcher.phase_times(events) == spent | {"optimizer": 5.0}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # each names a line that waits for the device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_profiler_sees_the_device(config):
    train(changed(config, compute__device="cuda", epochs=6, profile=True))
    for name in ("trace.json.gz", "memory.pickle"):
        assert Path(config.run.dir, "profile", name).stat().st_size > 1000
