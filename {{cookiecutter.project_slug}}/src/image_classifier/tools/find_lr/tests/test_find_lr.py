"""The learning-rate range test: how it reads losses, when it stops, what it writes."""

import json
import math
import shlex
from itertools import count
from pathlib import Path

import pytest
from conftest import changed, run_ranks
from safetensors.torch import save_file

from image_classifier.cli import main
from image_classifier.errors import UserError
from image_classifier.extensions import find_tool
from image_classifier.models import build_model
from image_classifier.runtime.distributed import join_world
from image_classifier.tools.find_lr import find_lr as finding
from image_classifier.train import Training

LRS = finding.geometric_lrs(1e-6, 10, 100)


def test_learning_rates_grow_by_equal_factors_from_the_first_to_the_last():
    assert finding.geometric_lrs(1e-3, 10.0, 21)[::10] == pytest.approx([1e-3, 0.1, 10.0])


def curve(best, growth=1.0):
    """Losses that fall around one learning rate and grow without bounds from 30 times it on."""
    for step, lr in enumerate(LRS[:95]):
        rise = growth * lr / best if lr >= 30 * best else 0
        yield 2.3 - 1 / (1 + (best / lr) ** 2) + rise + 0.05 * math.sin(37 * step)


@pytest.mark.parametrize(("best", "growth"), [(1e-4, 1), (1e-1, 1), (1e-3, math.nan)])
def test_the_suggestion_lies_where_the_loss_falls_and_below_divergence(best, growth):
    result = finding.analyze(LRS, [*curve(best, growth)])
    assert result.lr_diverge == pytest.approx(30 * best, rel=1.5)
    assert best / 3 < result.suggested < 10 * best
    assert result.suggested == min(result.lr_best / 3, result.lr_diverge / 10)
    assert all(map(math.isfinite, result.smoothed))


@pytest.mark.parametrize("slope", [0, 1, -0.0004])  # a hundredth of the first in all
def test_losses_that_hardly_fall_give_no_suggestion(slope):
    with pytest.raises(UserError, match="lets the loss fall"):
        finding.analyze(LRS, [2.3 + slope * step for step in range(100)])


def test_where_training_diverges_at_once_the_suggestion_keeps_away_from_there():
    losses = [2.3 - step / 60 for step in range(60)] + [9.0] * 10
    result = finding.analyze(LRS, losses)
    assert result.suggested == result.lr_diverge / 10 < result.lr_best / 3
    lowest = min(result.smoothed)
    at_best = result.smoothed[result.lrs.index(result.lr_best)]
    assert at_best - lowest == pytest.approx(0.1 * (result.smoothed[0] - lowest), abs=0.02)


def test_where_training_does_not_diverge_a_third_of_the_best_is_suggested():
    result = finding.analyze(LRS, [2.3 - step / 60 for step in range(100)])
    assert (result.lr_diverge, result.suggested) == (None, result.lr_best / 3)
    assert LRS[80] < result.lr_best < LRS[95]


@pytest.mark.parametrize("has_report", [True, False])
def test_the_command_writes_files_and_prints_how_to_train(
    has_report, tmp_path, monkeypatch, capsys
):
    charts = find_tool("charts", "report") if has_report else None
    monkeypatch.setattr(finding, "losses_at", lambda *_: [*curve(1e-3)])
    monkeypatch.setattr(finding, "find_tool", lambda *_: charts)
    flags = "--epochs 2 --data.root 'my photos' --compute.compile --run.trackers"
    own = f"--optim.lr 3 --low 1e-6 --steps 100 --run.dir {tmp_path} --run.fresh"
    assert main(["find-lr", *shlex.split(f"{flags} {own}")]) == 0
    found = json.loads((tmp_path / "lr.json").read_text())
    suggested = found["suggested"]
    expected = f"try: python train.py finetune {flags} --optim.lr {suggested:.2g}\n"
    out = capsys.readouterr().out
    assert f" to here) {found['lr_best']:.2g}, lr_diverge {found['lr_diverge']:.2g}\n" in out
    assert out.endswith(expected)
    assert (tmp_path / "lr.html").exists() == ("lr.html and lr.json" in out) == bool(charts)
    page = (tmp_path / "lr.html").read_text() if charts else ""
    shown = ("1e-06", "0.01", "1", "learning rate") if charts else ()
    assert all(f">{text}</text>" in page for text in shown)
    assert "000</text>" not in page  # where training diverges, losses of thousands hide the others


def losses_of(config, lrs):
    """The losses of a range test, on the ranks that there are."""
    with join_world(config.compute) as world:
        return finding.losses_at(lrs, config, world)


def test_training_stops_when_it_diverges_and_repeats_on_two_ranks(config):
    config = changed(config, data__batch_size=8, optim__accumulate=2)
    lrs = finding.geometric_lrs(1e-2, 1e8, 40)
    losses = losses_of(config, lrs)
    assert len(losses) in (10, 20, 30)
    first, second = run_ranks(2, losses_of, config, lrs)
    assert first == second
    assert first[:8] == pytest.approx(losses[:8], rel=1e-3)


@pytest.mark.parametrize("words", ["", "--run.fresh"])
def test_without_memory_it_starts_again_in_smaller_parts_and_the_next_test_as_asked(
    words, config, monkeypatch
):
    tried, starts, step = [], count(), Training.step

    def short_step(training, loaded, lr, size):
        if not training.state.step:
            tried.append(size)
        if size > 4 and next(starts) < 3:
            raise RuntimeError("CUDA out of memory")
        return step(training, loaded, lr, size)

    monkeypatch.setattr(Training, "step", short_step)
    monkeypatch.setenv("RUN_RESTARTS", "0")
    knobs = f"--data.limit 64 --data.batch-size 16 --steps 20 --run.dir {config.run.dir} {words}"
    main(["find-lr", "smoke", *knobs.split()])
    assert tried == [16, 8, 4]
    assert not Path(config.run.dir, "micro_batch.json").exists()


@pytest.mark.parametrize("words", ["--low 0", "--high 1e-6", "--steps 3"])
def test_an_unusable_range_is_a_mistake(words, refusal):
    said = refusal("find-lr", "smoke", *words.split())
    assert "needs 0 < low < high and 20 to 100000 steps" in said


def test_a_new_last_layer_on_trained_weights_begins_at_zero(config, tmp_path):
    save_file(build_model(config.model, 7, 32).state_dict(), tmp_path / "w.safetensors")
    config = changed(config, run__init_from=str(tmp_path / "w.safetensors"))
    first, *_ = losses_of(config, finding.geometric_lrs(1e-6, 1e-5, 20))
    assert first == pytest.approx(math.log(10))  # all classes alike
