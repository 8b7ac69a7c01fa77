"""What a run says of its own speed: what limits it, and how long its start took."""

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
from image_classifier.tracking import logger
from image_classifier.train import train


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ("decoder", r"Loading is the limit: ([\d.]+) images/s, while the model could take "),
        ("model", r"The model is the limit: ([\d.]+) images/s, while loading could give "),
    ],
)
def test_what_is_slow_is_named_with_the_knob_to_try(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    slow: str,
    said: str,
) -> None:
    place, name, seconds = {
        "decoder": (Source, "read", 0.008),  # of an image
        "model": (ResNet9, "forward", 0.05),  # of a batch of 16
    }[slow]
    function = getattr(place, name)

    def slowly(*arguments: object) -> torch.Tensor:
        time.sleep(seconds)
        return function(*arguments)

    monkeypatch.setattr(place, name, slowly)
    config = changed(config, data__where="stream", data__workers=1)
    train(changed(config, epochs=1, data__limit=64, data__prefetch_batches=1))
    (verdict,) = re.findall(r".* is the limit: .*", capsys.readouterr().out)
    rate = float(re.search(said, verdict)[1])
    assert 8 < rate < 320  # a machine that has other things to do is slower
    assert ("Try --compute.compile." in verdict) == (slow == "model")


def test_the_first_step_is_not_in_the_speed_as_it_compiles(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, seconds = ResNet9.forward, [0.0]

    def forward_slowly_at_first(model: ResNet9, images: torch.Tensor) -> torch.Tensor:
        seconds[0] += 100 if seconds[0] == 0 else 1
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_slowly_at_first)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _: None)
    monkeypatch.setattr(logger.time, "monotonic", lambda: seconds[0])
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
    parts = r"imports ([\d.]+), data and model ([\d.]+), first batch ([\d.]+), .* itself ([\d.]+)\."
    total = float(re.findall(r"First step after ([\d.]+) s", said)[0])
    assert sum(map(float, re.findall(parts, said)[0])) == pytest.approx(total, abs=0.3)
