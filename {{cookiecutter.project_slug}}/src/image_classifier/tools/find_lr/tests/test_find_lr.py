"""The learning-rate range test: what it makes of losses, and that it is quick and tidy."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from conftest import changed

from image_classifier.cli import main
from image_classifier.config import Config, UserError
from image_classifier.runtime.command_line import parse
from image_classifier.runtime.distributed import World
from image_classifier.tools.find_lr import (
    find_lr as find_lr_module,
)
from image_classifier.tools.find_lr.command import FindLrOptions
from image_classifier.tools.find_lr.find_lr import (
    find_lr,
    growing,
    judge,
    losses_at,
)

RATES = growing(1e-6, 10, 100)


def curve(best: float, diverged: float = math.inf) -> list[float]:
    """Losses that fall around a rate, and grow without bounds from another one on."""
    fall = [1 / (1 + (best / rate) ** 2) for rate in RATES]
    rise = [0 if rate < diverged else rate / diverged for rate in RATES]
    noise = [0.05 * math.sin(37 * step) for step in range(100)]
    return [2.3 - down + up + extra for down, up, extra in zip(fall, rise, noise, strict=True)]


@pytest.mark.parametrize("best", [1e-4, 1e-3, 1e-1])
def test_the_suggestion_lies_below_divergence_and_where_the_loss_falls(best: float) -> None:
    finding = judge(RATES, curve(best, diverged=30 * best))
    assert finding.diverged == pytest.approx(30 * best, rel=1.5)
    assert best / 3 < finding.suggested < 10 * best


def test_losses_that_are_not_numbers_are_divergence() -> None:
    losses = curve(1e-3)[:60]
    losses[55:] = [math.nan] * 5
    finding = judge(RATES, losses)
    assert finding.diverged == pytest.approx(RATES[55], rel=3)
    assert all(map(math.isfinite, finding.smoothed))


def test_losses_that_never_fall_give_no_suggestion() -> None:
    for losses in ([2.3] * 100, [2.3 + step for step in range(100)]):
        with pytest.raises(UserError, match="lets the loss fall"):
            judge(RATES, losses)


@pytest.mark.parametrize("wrong", [(0.0, 1.0, 50), (1.0, 0.1, 50), (1e-3, 1.0, 3)])
def test_a_range_that_is_none_is_refused(wrong: tuple[float, float, int]) -> None:
    with pytest.raises(UserError, match=r"--low .* --high .* --steps"):
        growing(*wrong)


def test_it_writes_what_it_found_and_nothing_else(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "find-lr"
    monkeypatch.setattr(find_lr_module, "losses_at", lambda *_: curve(1e-3, 1e-1))
    finding = find_lr(config, "python train.py mine", folder, RATES)
    said = capsys.readouterr().out
    assert f"python train.py mine --optim.lr {finding.suggested:.2g}\n" in said
    assert {path.name for path in folder.iterdir()} == {"lr.json", "lr.svg", ".lock"}
    assert json.loads((folder / "lr.json").read_text())["suggested"] == finding.suggested
    texts = {text.text for text in ET.parse(folder / "lr.svg").getroot().iter()}
    assert {"1e-06", "0.001", "1", "learning rate"} <= texts


def test_a_training_that_diverges_is_not_gone_on_with(config: Config) -> None:
    config = changed(config, data__batch_size=8, optim__accumulate=2)
    rates = growing(1e-2, 1e8, 40)
    losses = losses_at(rates, config, World(torch.device("cpu")))
    assert len(losses) in (10, 20, 30)
    assert losses == losses_at(rates, config, World(torch.device("cpu")))


def test_what_to_try_has_the_knobs_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(find_lr_module, "find_lr", lambda _, command, *__: tried.append(command))
    words = "--data.root;my photos;--epochs;2;--optim.lr=3;--compute.no-tf32;--run.trackers"
    assert main(["find-lr", *words.split(";")]) == 0
    flags = "--epochs 2.0 --data.root 'my photos' --compute.no-tf32 --run.trackers"
    assert tried == [f"python train.py folder {flags}"]


def test_it_takes_every_knob_of_training() -> None:
    words = ["--steps", "50", "--optim.name", "adamw", "--data.root", "x"]
    options = parse(FindLrOptions, words, prog="find-lr", about="", default=FindLrOptions())
    assert (options.steps, options.optim.name, options.data.root) == (50, "adamw", "x")
