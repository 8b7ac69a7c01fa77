"""What a run says of its own speed: what bounds it, where it waits, and what its start took."""

import json
import re
import resource
import time
from pathlib import Path

import pytest
import torch
from conftest import changed

from image_classifier.config import Config
from image_classifier.data.datasets.source import Source
from image_classifier.models.resnet9 import ResNet9
from image_classifier.runtime import distributed
from image_classifier.tracking import logger as report
from image_classifier.tracking.logger import Report
from image_classifier.train import train


def verdicts(config: Config, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a run of one epoch says at the end of it."""
    train(changed(config, epochs=1, data__limit=64, data__prefetch_batches=1))
    return re.findall(r"\w+-bound.*", capsys.readouterr().out)


def test_a_slow_decoder_is_found(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Source.read

    def read_slowly(*arguments: object) -> torch.Tensor:
        time.sleep(0.008)
        return read(*arguments)

    monkeypatch.setattr(Source, "read", read_slowly)
    said = verdicts(changed(config, data__where="stream", data__workers=1), capsys)
    assert [line.split(",")[0] for line in said] == ["input-bound"]
    # Of 125 images/s at most; a machine that has other things to do wakes the decoder later.
    assert 15 < float(re.findall(r"loader (\d+)", said[0])[0]) < 125


def test_a_slow_model_is_found(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = ResNet9.forward

    def forward_slowly(model: ResNet9, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_slowly)
    said = verdicts(changed(config, data__where="stream", data__workers=1), capsys)
    assert [line.split(":")[0] for line in said] == ["compute-bound"]
    assert "--compute.compile" in said[0]


def test_a_value_read_back_in_each_step_is_found_with_its_line(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = Report.count

    def count_and_look(report: Report, loss: torch.Tensor) -> None:
        count(report, loss)
        loss.item()

    monkeypatch.setattr(Report, "count", count_and_look)
    said = verdicts(config, capsys)
    line = count_and_look.__code__.co_firstlineno + 2
    assert [text.split(":")[0] for text in said] == ["sync-bound"]
    assert f"{__file__}:{line}" in said[0]


def test_the_first_step_is_not_in_the_speed_as_it_compiles(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, seconds = ResNet9.forward, [0.0]

    def forward_slowly_at_first(model: ResNet9, images: torch.Tensor) -> torch.Tensor:
        seconds[0] += 100 if seconds[0] == 0 else 1
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_slowly_at_first)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _: None)
    monkeypatch.setattr(report.time, "monotonic", lambda: seconds[0])
    train(changed(config, epochs=1, compute__compile=True))
    rows = map(json.loads, Path(config.run.dir, "metrics.jsonl").read_text().splitlines())
    row = next(row for row in rows if "train/loss" in row)
    assert row["train/images_per_second"] == 16  # a step each second, of 16 images
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert most / 2 < row["memory_bytes"] <= most


def test_a_run_says_what_it_runs_on_and_what_its_start_took(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = torch.device("cpu"), "there is no GPU"
    monkeypatch.setattr(distributed, "choose_device", lambda *_: missing)
    train(changed(config, epochs=1))
    said = capsys.readouterr().out
    assert "\non the CPU: there is no GPU\nCPU, " in said
    assert ", 1 process of 1 thread, fp32; as --precision says; seed 0: " in said
    parts = r"imports ([\d.]+), data and model ([\d.]+), first batch ([\d.]+), .* itself ([\d.]+)"
    total = float(re.findall(r"first step after ([\d.]+) s", said)[0])
    assert sum(map(float, re.findall(parts, said)[0])) == pytest.approx(total, abs=0.3)
