"""The learning-rate range test: how it reads losses, when it stops, what it writes."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import changed

from image_classifier.cli import main
from image_classifier.config import Config
from image_classifier.errors import UserError
from image_classifier.runtime.distributed import World
from image_classifier.tools.find_lr import (
    find_lr as find_lr_module,
)
from image_classifier.tools.find_lr.find_lr import (
    analyse,
    find_lr,
    geometric_lrs,
    losses_at,
)

LRS = geometric_lrs(1e-6, 10, 100)


def curve(best: float, diverged: float = math.inf) -> list[float]:
    """Losses that fall around one learning rate and grow without bounds from another on."""
    fall = [1 / (1 + (best / lr) ** 2) for lr in LRS]
    rise = [0 if lr < diverged else lr / diverged for lr in LRS]
    noise = [0.05 * math.sin(37 * step) for step in range(100)]
    return [2.3 - down + up + extra for down, up, extra in zip(fall, rise, noise, strict=True)]


@pytest.mark.parametrize("best", [1e-4, 1e-3, 1e-1])
def test_the_suggestion_lies_where_the_loss_falls_and_below_divergence(best: float) -> None:
    result = analyse(LRS, curve(best, diverged=30 * best))
    assert result.lr_diverge == pytest.approx(30 * best, rel=1.5)
    assert best / 3 < result.suggested < 10 * best


def test_nan_losses_count_as_divergence() -> None:
    result = analyse(LRS, curve(1e-3)[:55] + [math.nan] * 5)
    assert result.lr_diverge == pytest.approx(LRS[55], rel=3)
    assert all(map(math.isfinite, result.smoothed))


@pytest.mark.parametrize("slope", [0, 1])
def test_losses_that_never_fall_give_no_suggestion(slope: float) -> None:
    with pytest.raises(UserError, match="lets the loss fall"):
        analyse(LRS, [2.3 + slope * step for step in range(100)])


def test_the_test_writes_two_files_and_prints_the_command(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "find-lr"
    monkeypatch.setattr(find_lr_module, "losses_at", lambda *_: curve(1e-3, 1e-1))
    result = find_lr(config, "python train.py mine", folder, LRS)
    assert f"python train.py mine --optim.lr {result.suggested:.2g}\n" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"lr.json", "lr.html", ".lock"}
    assert json.loads((folder / "lr.json").read_text())["suggested"] == result.suggested
    page = (folder / "lr.html").read_text()
    assert all(f">{text}</text>" in page for text in ("1e-06", "0.001", "1", "learning rate"))


def test_training_stops_when_it_diverges_and_repeats_exactly(config: Config) -> None:
    config = changed(config, data__batch_size=8, optim__accumulate=2)
    lrs = geometric_lrs(1e-2, 1e8, 40)
    losses = losses_at(lrs, config, World(torch.device("cpu")))
    assert len(losses) in (10, 20, 30)
    assert losses == losses_at(lrs, config, World(torch.device("cpu")))


def test_the_printed_command_has_the_knobs_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(find_lr_module, "find_lr", lambda _, command, *__: tried.append(command))
    words = "--data.root;my photos;--epochs;2;--optim.lr=3;--compute.compile;--run.trackers"
    assert main(["find-lr", *words.split(";")]) == 0
    flags = "--epochs 2.0 --data.root 'my photos' --compute.compile --run.trackers"
    assert tried == [f"python train.py folder {flags}"]


@pytest.mark.parametrize("words", ["--low 0", "--high 1e-6", "--steps 3"])
def test_an_unusable_range_is_a_mistake(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-lr", "smoke", *words.split()]) == 2
    assert "needs 0 < low < high and 20 to 100000 steps" in capsys.readouterr().err
