"""Bench measures what training does, finds what is there, and says what it can't measure."""

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
    advise_preparing,
    affordable_batch_size,
    bench,
    combine,
    open_setup,
    plan_row,
)
from image_classifier.tools.bench.measure import (
    Budget,
    Row,
    Timing,
    gain,
    measure,
)
from image_classifier.tools.bench.setup import Setup, Variant
from image_classifier.tools.bench.timed_run import (
    DatasetCache,
    TimedRun,
    kept_switches,
    read_switches,
)
from image_classifier.tools.bench.tips import TIPS, page
from image_classifier.train import train

TINY = Budget(row_seconds=0, round_seconds=0, rounds=(2, 2), warmup_seconds=0)


@contextmanager
def opened(config: Config, folder: Path) -> Iterator[tuple[Setup, DatasetCache]]:
    """What tips are measured on."""
    with kept_switches(), join_world(config.compute) as world:
        datasets = DatasetCache(world)
        yield open_setup(config, datasets, folder), datasets


def test_a_timed_run_makes_the_steps_of_training(config: Config, tmp_path: Path) -> None:
    ways = {"optim__ema_decay": 0.9, "optim__accumulate": 2, "data__balance": "loss"}
    config = changed(config, augment__mixup=0.2, **ways)
    train(config)
    saved = read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))["state"]
    with opened(config, tmp_path) as (setup, datasets):
        run = TimedRun(setup.config, setup.world, datasets.open(setup.config))
        run.run(3)
        run.run(5)
    for part in ("model", "ema"):
        for name, tensor in run.state.state_dict()[part].items():
            assert torch.equal(tensor, saved[part][name]), name


@pytest.mark.parametrize(
    "name",
    ["num_workers", "prefetch", "persistent_workers", "shared_batches", "uint8", "resident"],
)
def test_all_variants_of_loading_bring_the_same_images(
    config: Config, tmp_path: Path, name: str
) -> None:
    with opened(config, tmp_path) as (setup, datasets):
        seen = []
        for variant in TIPS[name](setup).values():
            data = datasets.open(variant.config)
            run = TimedRun(variant.config, setup.world, data, variant.change)
            batches = enumerate(run.batches(0, 2))  # each may be overwritten by a later one
            pairs = (run.augment(batch, step) for step, batch in batches)
            seen.append([(images.clone(), labels.clone()) for images, labels in pairs])
            run.close()
            assert not multiprocessing.active_children()
    assert len(seen) >= 2
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0])


def sleeping(seconds: float) -> Callable[[TimedRun], None]:
    """A training step that only sleeps."""

    def change(run: TimedRun) -> None:
        run.batches = lambda start, stop: iter(range(start, stop))
        run.step = lambda _: time.sleep(seconds)

    return change


def test_a_planted_effect_is_found_with_its_size(config: Config, tmp_path: Path) -> None:
    with opened(config, tmp_path) as (setup, datasets):
        pair = {
            "slow": Variant(setup.config, sleeping(0.04)),
            "fast": Variant(setup.config, sleeping(0.02)),
        }
        budget = replace(TINY, rounds=(8, 8))
        found = Row("sleep", timings=measure(pair, datasets, budget, 0)).gains()["fast"]
    assert found.is_faster
    assert 1.5 < found.median < 2.5
    assert found.low <= found.median <= found.high


def test_the_first_step_is_not_measured(config: Config, tmp_path: Path) -> None:
    def compile_at_first(run: TimedRun) -> None:
        sleeping(0)(run)
        pauses = iter([0.1])
        run.step = lambda _: time.sleep(next(pauses, 0))

    with opened(config, tmp_path) as (setup, datasets):
        timings = measure({"slow": Variant(setup.config, compile_at_first)}, datasets, TINY, 0)
    assert len(timings["slow"].seconds) == 2
    assert sum(timings["slow"].seconds) < 0.1


def test_what_is_inside_the_noise_is_no_effect() -> None:
    noise = [1.0, 1.3, 0.9, 1.1, 0.8, 1.2, 1.0]
    assert str(gain(noise, noise[::-1])).startswith("no effect here (")
    assert not gain([1.01] * 9, [1.0] * 9).is_effect
    assert gain([2.0] * 10 + [90.0], [1.0] * 11).high == 2  # one disturbed round does not matter
    assert str(gain([2.0] * 5, [1.0] * 5)) == "2.00 x (2.00 .. 2.00)"


def test_a_variant_that_fails_does_not_stop_the_others(config: Config, tmp_path: Path) -> None:
    def exhaust(_: TimedRun) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def stumble(run: TimedRun) -> None:
        run.after_step = lambda: 1 // (run.state.step < 3)

    with opened(config, tmp_path) as (setup, datasets):
        changes = {"plain": None, "large": exhaust, "broken": stumble, "again": None}
        variants = {name: Variant(setup.config, change) for name, change in changes.items()}
        row = Row("failing", timings=measure(variants, datasets, TINY, 0))
    assert row.timings["large"].failure == "out of memory"
    assert "division" in row.timings["broken"].failure
    assert list(row.gains()) == ["again"]


def test_faster_knobs_are_recommended_together(config: Config, tmp_path: Path) -> None:
    found = {
        "channels_last": [1.0, 0.8],
        "mixed_precision": [1.0, 1.2],
        "deterministic": [1.0, 0.5],
        "num_workers": [1.0, 0.5, 0.4],
        "item": [1.0, 0.7],
    }
    with opened(changed(config, compute__channels_last=False), tmp_path) as (setup, _):
        rows = [plan_row(name, setup, is_asked=True, budget=TINY) for name in found]
        for row in rows:
            pairs = zip(row.variants, found[row.name], strict=False)
            row.timings = {variant: Timing(16, [seconds] * 9) for variant, seconds in pairs}
        pair = combine(setup, rows)
    assert pair["preset"].config == setup.config
    assert pair["best"].config == changed(setup.config, compute__channels_last=True)


def test_without_time_a_few_tips_are_measured_and_the_others_named(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hasty = replace(TINY, total_seconds=0)
    names = ["tf32", "item", "deterministic", "inference_mode", "profiler", "channels_last"]
    bench(config, config, "train", tmp_path, names=names, budget=hasty)
    said = capsys.readouterr().out
    assert "no time left: --rows profiler" in said
    assert "of 3 measured tips (2 skipped for lack of time)" in said.splitlines()[-1]
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [len(row["variants"]) for row in rows] == [0, 2, 2, 3, 0, 0]


def test_long_steps_are_measured_with_fewer_images(config: Config) -> None:
    budget = replace(TINY, step_seconds=0.15)
    large = changed(config, data__batch_size=256)
    sizes = [affordable_batch_size(large, pace, budget) for pace in (0.1, 0.5, 99.0)]
    assert sizes == [256, 64, 16]
    odd = changed(config, data__batch_size=84, optim__accumulate=3)
    assert affordable_batch_size(odd, 99.0, budget) == 42


def test_preparing_is_advised_where_it_helps(on_photos: Config, tmp_path: Path) -> None:
    times = {"files": 1.0, "prepared, jpeg": 0.5, "prepared, raw": 0.25}
    row = Row("prepared", timings={name: Timing(4, [time] * 9) for name, time in times.items()})
    for where, expected in (("stream", "(prepared, raw: 4.00 x"), ("device", "")):
        with opened(changed(on_photos, data__where=where), tmp_path) as (setup, _):
            advice = advise_preparing(setup, [row])
            assert expected in advice
            assert bool(advice) == bool(expected)


def test_the_results_are_written_and_every_switch_is_restored(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_switches()
    names, folder = ("tf32", "deterministic", "item"), tmp_path / "found"
    chosen = changed(config, data__limit=48)
    bench(chosen, config, "python train.py smoke", folder, names=names, budget=TINY)
    assert read_switches() == before
    *_, last = capsys.readouterr().out.splitlines()
    assert last.endswith("python train.py smoke --data.limit 48")
    found = json.loads((folder / "bench.json").read_text())
    assert [row["name"] for row in found["rows"]] == list(names)
    assert found["verdict"] == last
    off, on = found["rows"][1]["variants"]
    assert (off["name"], on["name"]) == ("off", "on")
    assert len(on["seconds_per_step"]) == 2
    assert on["gain"]["low"] <= on["gain"]["median"] <= on["gain"]["high"]
    table = (folder / "bench.md").read_text()
    assert last in table
    assert all(f"| {name} |" in table for name in names)
    drawing = ElementTree.fromstring((folder / "bench.svg").read_text())
    assert len(drawing.findall(".//{*}rect")) == 2


def test_every_tip_is_measured_or_says_what_it_needs(config: Config, tmp_path: Path) -> None:
    with opened(config, tmp_path) as (setup, _):
        rows = [plan_row(name, setup, is_asked=True, budget=TINY) for name in TIPS]
    for row in rows:
        assert row.reason or len(row.variants) >= 2, row.name


def test_photographs_are_prepared_to_measure_it(on_photos: Config, tmp_path: Path) -> None:
    folder = tmp_path / "found"
    bench(on_photos, on_photos, "train", folder, names=["prepared"], budget=TINY)
    (row,) = json.loads((folder / "bench.json").read_text())["rows"]
    assert [variant["failure"] for variant in row["variants"]] == ["", "", ""]
    assert {path.name for path in folder.glob("[!.]*")} == {"bench.json", "bench.md", "bench.svg"}


def test_an_unknown_tip_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "smoke", "--rows", "num_worker"]) == 2
    assert capsys.readouterr().err.endswith("did you mean num_workers?\n")


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
    bench(config, config, "train", tmp_path, names=tuple(TIPS), budget=TINY)
    for row in json.loads((tmp_path / "bench.json").read_text())["rows"]:
        assert not row["reason"] or row["name"] in ("data_parallel", "strips")
        for variant in row["variants"]:
            assert not variant["failure"], (row["name"], variant)
            assert variant["memory_bytes"] > 0 or row["name"] == "data_parallel"
