"""What a run says of its speed and its memory."""

import json
import re
import resource
from pathlib import Path

import torch
from conftest import changed

from image_classifier.models.resnet9 import ResNet9
from image_classifier.runtime.tools import find_tools
from image_classifier.tracking import logger
from image_classifier.train import train


def test_the_first_step_is_not_in_the_speed_as_it_compiles(config, monkeypatch, capsys):
    forward, seconds = ResNet9.forward, [0.0]

    def forward_slowly_at_first(model, images):
        seconds[0] += 100 if seconds[0] == 0 else 1
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_slowly_at_first)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _: None)
    monkeypatch.setattr(logger.time, "monotonic", lambda: seconds[0])
    train(changed(config, epochs=1, compute__compile=True, run__log_every_steps=1))
    rows = map(json.loads, Path(config.run.dir, "metrics.jsonl").read_text().splitlines())
    first, row, *_ = (row for row in rows if "train/loss" in row)
    assert "train/images_per_second" not in first
    assert row["train/images_per_second"] == 16  # a step each second, of 16 images
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert most / 2 < row["memory_bytes"] <= most
    said = capsys.readouterr().out
    observers = find_tools("observer").keys()  # each may be deleted
    if "bottleneck" in observers:
        assert "  The model is the limit: 16 images/s. " in said
    if observers >= {"bottleneck", "flops"}:
        assert re.search(r"is the limit: .* MFU \d+%\.", said)
    assert " 1 process, " in said
    assert ", fp32; as --precision says; seed 0: " in said
    assert "  ETA 0:00\n" in said
