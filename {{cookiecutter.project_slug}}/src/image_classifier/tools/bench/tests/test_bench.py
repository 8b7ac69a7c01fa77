"""Measuring tips: what is compared is what training does, and what is there is found."""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conftest import changed

from image_classifier.cli import main
from image_classifier.config import Config
from image_classifier.models.weights import read_checkpoint
from image_classifier.runtime.distributed import join_world
from image_classifier.tools.bench.bench import (
    affordable_batch_size,
    bench,
    compose,
    open_case,
    plan_row,
    preparing,
)
from image_classifier.tools.bench.tips import TIPS, Case, page
from image_classifier.tools.bench.tips.rounds import (
    Effort,
    Row,
    Timing,
    gain,
    measure,
)
from image_classifier.tools.bench.tips.trial import (
    DataShelf,
    Trial,
    Variant,
    kept_switches,
    read_switches,
)
from image_classifier.train import train

TINY = Effort(row_seconds=0, round_seconds=0, rounds=(2, 2), warmup_seconds=0)


@contextmanager
def opened(config: Config, folder: Path) -> Iterator[tuple[Case, DataShelf]]:
    """What tips are tried on."""
    with kept_switches(), join_world(config.compute) as world:
        shelf = DataShelf(world)
        yield open_case(config, shelf, folder), shelf


def test_the_steps_of_a_trial_are_those_of_training(config: Config, tmp_path: Path) -> None:
    ways = {"optim__ema_decay": 0.9, "optim__accumulate": 2, "data__balance": "loss"}
    config = changed(config, augment__mixup=0.2, **ways)
    train(config)
    saved = read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))["state"]
    with opened(config, tmp_path) as (case, shelf):
        trial = Trial(case.config, case.world, shelf.open(case.config))
        trial.run(3)
        trial.run(5)
    for part in ("model", "ema"):
        for name, tensor in trial.state.state_dict()[part].items():
            assert torch.equal(tensor, saved[part][name]), name


@pytest.mark.parametrize("name", ["num_workers", "prefetch", "shared_memory", "uint8", "resident"])
def test_other_ways_bring_the_same_images(config: Config, tmp_path: Path, name: str) -> None:
    with opened(config, tmp_path) as (case, shelf):
        seen = []
        for variant in TIPS[name](case).values():
            data = shelf.open(variant.config)
            trial = Trial(variant.config, case.world, data, variant.change)
            batches = enumerate(trial.batches(0, 2))  # each is overwritten by a later one
            pairs = (trial.augment(batch, step) for step, batch in batches)
            seen.append([(images.clone(), labels.clone()) for images, labels in pairs])
            trial.close()
            assert not multiprocessing.active_children()
    assert len(seen) >= 2
    for other in seen[1:]:
        for (images, labels), (others, other_labels) in zip(seen[0], other, strict=True):
            torch.testing.assert_close(images, others)
            assert torch.equal(labels, other_labels)


def sleeping(seconds: float) -> Callable[[Trial], None]:
    """A way to train that does nothing but sleep."""

    def change(trial: Trial) -> None:
        trial.batches = lambda start, stop: iter(range(start, stop))
        trial.step = lambda _: time.sleep(seconds)

    return change


def test_a_planted_effect_is_found_with_its_size(config: Config, tmp_path: Path) -> None:
    effort = Effort(row_seconds=0, round_seconds=0, rounds=(8, 8), warmup_seconds=0)
    with opened(config, tmp_path) as (case, shelf):
        pair = {
            "slow": Variant(case.config, sleeping(0.04)),
            "fast": Variant(case.config, sleeping(0.02)),
        }
        found = Row("sleep", timings=measure(pair, shelf, effort, 0)).gains()["fast"]
    assert found.is_effect
    assert 1.5 < found.median < 2.5
    assert found.low <= found.median <= found.high


def test_what_only_the_first_step_takes_is_not_measured(config: Config, tmp_path: Path) -> None:
    def compile_at_first(trial: Trial) -> None:
        sleeping(0)(trial)
        pauses = iter([0.1])
        trial.step = lambda _: time.sleep(next(pauses, 0))

    with opened(config, tmp_path) as (case, shelf):
        timings = measure({"slow": Variant(case.config, compile_at_first)}, shelf, TINY, 0)
    assert len(timings["slow"].seconds) == 2
    assert sum(timings["slow"].seconds) < 0.1


def test_what_is_inside_the_noise_is_no_effect() -> None:
    noise = [1.0, 1.3, 0.9, 1.1, 0.8, 1.2, 1.0]
    same = gain(noise, noise[::-1])
    assert not same.is_effect
    assert str(same).startswith("no effect here (")
    tiny = gain([1.01] * 9, [1.0] * 9)
    assert not tiny.is_effect
    # One round in which the machine did something else is no reason to doubt the others.
    assert gain([2.0] * 10 + [90.0], [1.0] * 11).high == 2
    assert str(gain([2.0] * 5, [1.0] * 5)) == "2.00 x (2.00 .. 2.00)"


def test_a_way_that_fails_does_not_keep_others_from_being_measured(
    config: Config, tmp_path: Path
) -> None:
    def exhaust(_: Trial) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def stumble(trial: Trial) -> None:
        trial.after_step = lambda: 1 // (trial.state.step < 3)

    with opened(config, tmp_path) as (case, shelf):
        variants = {
            "plain": Variant(case.config),
            "large": Variant(case.config, exhaust),
            "broken": Variant(case.config, stumble),
            "again": Variant(case.config),
        }
        row = Row("failing", timings=measure(variants, shelf, TINY, 0))
    assert row.timings["large"].failure == "out of memory"
    assert "division" in row.timings["broken"].failure
    assert list(row.gains()) == ["again"]


def test_knobs_that_gain_are_proposed_together(config: Config, tmp_path: Path) -> None:
    with opened(changed(config, compute__channels_last=False), tmp_path) as (case, _):
        rows = []
        for name, seconds in {
            "channels_last": [1.0, 0.8],
            "mixed_precision": [1.0, 1.2],
            "deterministic": [1.0, 0.5],
            "num_workers": [1.0, 0.5, 0.4],
            "item": [1.0, 0.7],
        }.items():
            row = plan_row(name, case, is_asked=True, effort=TINY)
            row.timings = {
                variant: Timing(16, [time] * 9)
                for variant, time in zip(row.variants, seconds, strict=False)
            }
            rows.append(row)
        pair = compose(case, rows)
    assert pair["preset"].config == case.config
    assert pair["best"].config == changed(case.config, compute__channels_last=True)


def test_without_time_a_few_tips_are_measured_and_nothing_is_said_of_others(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hasty = replace(TINY, total_seconds=0)
    names = ["tf32", "item", "deterministic", "inference_mode", "profiler", "channels_last"]
    bench(config, config, "train", tmp_path, names=names, effort=hasty)
    said = capsys.readouterr().out
    assert "no time left: --rows profiler" in said
    assert "of the 3 tips measured (2 more were not, for want of time" in said.splitlines()[-1]
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [len(row["variants"]) for row in rows] == [0, 2, 2, 3, 0, 0]


def test_steps_that_take_too_long_are_tried_with_fewer_images(
    config: Config,
) -> None:
    effort = replace(TINY, step_seconds=0.15)
    large = changed(config, data__batch_size=256)
    assert affordable_batch_size(large, 0.1, effort) == 256
    assert affordable_batch_size(large, 0.5, effort) == 64
    assert affordable_batch_size(large, 99.0, effort) == 16
    odd = changed(config, data__batch_size=84, optim__accumulate=3)
    assert affordable_batch_size(odd, 99.0, effort) == 42


def test_it_is_said_if_preparing_helps(on_photos: Config, tmp_path: Path) -> None:
    times = {"files": 1.0, "prepared, jpeg": 0.5, "prepared, raw": 0.25}
    row = Row("prepared", timings={name: Timing(4, [time] * 9) for name, time in times.items()})
    with opened(changed(on_photos, data__where="stream"), tmp_path) as (case, _):
        assert "(prepared, raw: 4.00 x" in preparing(case, [row])
    with opened(changed(on_photos, data__where="device"), tmp_path) as (case, _):
        assert not preparing(case, [row])  # they are decoded once


def test_all_is_written_and_every_switch_put_back(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_switches()
    names = ("tf32", "deterministic", "item")
    folder = tmp_path / "found"
    chosen = changed(config, data__limit=48)
    bench(chosen, config, "python train.py smoke", folder, names=names, effort=TINY)
    assert read_switches() == before
    *_, last = capsys.readouterr().out.splitlines()
    assert last.endswith("python train.py smoke --data.limit 48")
    found = json.loads((folder / "bench.json").read_text())
    assert [row["name"] for row in found["rows"]] == list(names)
    assert found["verdict"] == last
    _, deterministic, _ = found["rows"]
    off, on = deterministic["variants"]
    assert (off["name"], on["name"]) == ("off", "on")
    assert len(on["seconds_per_step"]) == 2
    assert on["gain"]["low"] <= on["gain"]["median"] <= on["gain"]["high"]
    table = (folder / "bench.md").read_text()
    assert last in table
    assert all(f"| {name} |" in table for name in names)
    drawing = ElementTree.fromstring((folder / "bench.svg").read_text())
    assert len(drawing.findall(".//{*}rect")) == 2


def test_every_tip_is_measured_or_says_what_it_needs(config: Config, tmp_path: Path) -> None:
    with opened(config, tmp_path) as (case, _):
        rows = [plan_row(name, case, is_asked=True, effort=TINY) for name in TIPS]
    for row in rows:
        assert row.reason or len(row.variants) >= 2, row.name


def test_photographs_are_prepared_to_see_what_it_buys(on_photos: Config, tmp_path: Path) -> None:
    folder = tmp_path / "found"
    bench(on_photos, on_photos, "train", folder, names=["prepared"], effort=TINY)
    (row,) = json.loads((folder / "bench.json").read_text())["rows"]
    assert [variant["failure"] for variant in row["variants"]] == ["", "", ""]
    assert {path.name for path in folder.glob("[!.]*")} == {"bench.json", "bench.md", "bench.svg"}


def test_a_tip_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "smoke", "--rows", "num_worker"]) == 2
    message = capsys.readouterr().err
    assert "no tip 'num_worker'; there are: mixed_precision, channels_last, " in message
    assert message.endswith("did you mean num_workers?\n")


def test_the_page_of_tips_is_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[5] / "docs" / "tips.md"
    assert path.read_text(encoding="utf-8") == page(), "bench --tips > docs/tips.md"
    assert main(["bench", "--tips"]) == 0
    assert capsys.readouterr().out == page()
    for name, section in zip(TIPS, page().split("\n## ")[1:], strict=True):
        assert section.startswith(name)
        for word in ("Why", "When it hurts", "Knob", "Source"):
            assert f"\n- {word}: " in section, (name, word)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_tip_works_on_a_gpu(on_photos: Config, tmp_path: Path) -> None:
    config = changed(on_photos, compute__device="cuda", run__processes=1, data__where="stream")
    bench(config, config, "train", tmp_path, names=tuple(TIPS), effort=TINY)
    for row in json.loads((tmp_path / "bench.json").read_text())["rows"]:
        assert not row["reason"] or row["name"] in ("data_parallel", "keep_memory", "strips")
        for variant in row["variants"]:
            assert not variant["failure"], (row["name"], variant)
            assert variant["memory_bytes"] > 0 or row["name"] == "data_parallel"
