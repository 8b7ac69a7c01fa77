"""`--profile` shows where the time of a step goes."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from conftest import changed

from image_classifier.errors import UserError
from image_classifier.runtime import tools
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


def test_the_flag_is_refused_without_its_tool(config, monkeypatch):
    monkeypatch.setattr(tools, "find_tool", lambda *_: None)
    with pytest.raises(UserError, match="--profile needs tools/profile"):
        train(changed(config, profile=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # each names a line that waits for the device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_profiler_sees_the_device(config):
    train(changed(config, compute__device="cuda", epochs=6, profile=True))
    for name in ("trace.json.gz", "memory.pickle"):
        assert Path(config.run.dir, "profile", name).stat().st_size > 1000
