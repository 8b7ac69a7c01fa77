"""Bench measures what training does, finds what is there, and says what it can't measure."""

import json
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from conftest import changed

from image_classifier.cli import main
from image_classifier.models import read_checkpoint
from image_classifier.runtime.command_line import summary
from image_classifier.runtime.distributed import join_world
from image_classifier.tools.bench import bench as benching
from image_classifier.tools.bench import measure as measuring
from image_classifier.tools.bench import timed_run as timing
from image_classifier.tools.bench.timed_run import Variant
from image_classifier.tools.bench.tips import SLOW, TIPS
from image_classifier.train import train

TINY = measuring.Budget(row_seconds=0, round_seconds=0, rounds=(2, 2), warmup_seconds=0)


@contextmanager
def opened(config):
    """What tips are measured on."""
    with timing.kept_switches(), join_world(config.compute) as world:
        datasets = timing.DatasetCache(world)
        yield benching.open_setup(config, datasets, TINY)[0], datasets


def bench(config, *names, **budget):
    """The rows and the conclusion of a short `bench`."""
    budget = replace(TINY, **budget)
    benching.bench(config, config, "python train.py smoke", names=names, budget=budget)
    found = json.loads(Path(config.run.dir, "bench.json").read_text())
    return found["rows"], found["verdict"]


def test_a_timed_run_makes_the_steps_of_training(config):
    ways = {"optim__ema_decay": 0.9, "optim__accumulate": 2, "data__balance": "loss"}
    config = changed(config, data__limit=32, augment__mixup=0.2, **ways)  # 2 epochs of 2 steps
    train(config)
    saved = read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))["state"]
    with opened(config) as (setup, datasets):
        run = timing.TimedRun(setup.config, setup.world, datasets.open(setup.config))
        run.run(1)
        run.run(3)
    for part in ("model", "ema"):
        for name, tensor in run.state.state_dict()[part].items():
            assert torch.equal(tensor, saved[part][name]), name


KNOBS = ("num_workers", "prefetch")
LOADING = ("persistent_workers", "shared_batches", "uint8", "resident")


def test_all_variants_of_loading_bring_the_same_images(config):
    with opened(config) as (setup, datasets):
        for name in KNOBS:
            assert len({variant.config for variant in TIPS[name](setup).values()}) >= 2
        for name in LOADING:
            seen = []
            for variant in TIPS[name](setup).values():
                data = datasets.open(variant.config)
                run = timing.TimedRun(variant.config, setup.world, data, variant.change)
                batches = enumerate(run.batches(0, 2))  # each may be overwritten by a later one
                pairs = (run.augment(batch, step) for step, batch in batches)
                seen.append([(images.clone(), labels.clone()) for images, labels in pairs])
                assert run.run(1) > 0
                run.close()
            assert len(seen) >= 2
            for other in seen[1:]:
                torch.testing.assert_close(other, seen[0])


def test_an_effect_is_found_beside_variants_that_fail(config):
    def sleep(run, *seconds):
        pauses = chain(seconds, repeat(seconds[-1]))
        run.batches = lambda start, stop: iter(range(start, stop))
        run.step = lambda _: time.sleep(next(pauses))

    def exhaust(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def stumble(run):
        run.after_step = lambda: 1 // (run.state.step < 3)

    changes = {"slow": lambda run: sleep(run, 0.02), "large": exhaust, "broken": stumble}
    changes["fast"] = lambda run: sleep(run, 0.2, 0.01)  # its first step is not measured
    with opened(config) as (setup, datasets):
        variants = {name: Variant(setup.config, change) for name, change in changes.items()}
        budget = replace(TINY, rounds=(8, 8))
        row = measuring.Row("row", timings=measuring.measure(variants, datasets, budget, 0))
    assert row.timings["large"].failure.startswith("failed: CUDA out of memory")
    assert "division" in row.timings["broken"].failure
    assert [name for name in changes if row.gain("slow", name)] == ["fast"]
    gain = row.gain("slow", "fast")
    assert gain.is_faster
    assert 1.5 < gain.median < 2.5
    assert gain.low <= gain.median <= gain.high


def test_what_is_inside_the_noise_is_no_effect():
    noise = [1.0, 1.3, 0.9, 1.1, 0.8, 1.2, 1.0]
    assert str(measuring.gain(noise, noise[::-1])).startswith("no effect here (")
    assert not measuring.gain([1.01] * 9, [1.0] * 9).is_effect
    disturbed = measuring.gain([2.0] * 10 + [90.0], [1.0] * 11)
    assert str(disturbed) == "2.00 x (2.00 .. 2.00)"


def test_faster_knobs_are_recommended_together(config):
    found = {"channels_last": [1.0, 0.8], "mixed_precision": [1.0, 1.2], "item": [1.0, 0.7]}
    found |= {"deterministic": [1.0, 0.5], "num_workers": [1.0, 0.5, 0.4]}
    with opened(changed(config, compute__channels_last=False)) as (setup, _):
        rows = [benching.plan_row(name, setup, is_asked=True, budget=TINY) for name in found]
        for row in rows:
            times = chain(([each] * 9 for each in found[row.name]), repeat([]))
            pairs = zip(row.variants, times, strict=False)
            row.timings = {name: measuring.Timing(16, seconds) for name, seconds in pairs}
        pair = benching.combine(setup, rows)
    assert pair["preset"].config == setup.config
    assert pair["best"].config == changed(setup.config, compute__channels_last=True)


def test_without_time_a_few_tips_are_measured_and_the_others_named(config, monkeypatch):
    monkeypatch.setattr(benching, "MIN_ROWS", 1)
    rows, conclusion = bench(config, "tf32", "item", "profiler", total_seconds=0)
    assert "of 1 measured tips (1 skipped for lack of time)" in conclusion
    assert [len(row["variants"]) for row in rows] == [0, 2, 0]
    assert rows[2]["reason"] == "no time left: --rows profiler"


def test_long_steps_are_measured_with_fewer_images():
    affordable, budget = benching.affordable_batch_size, replace(TINY, step_seconds=0.15)
    assert [affordable(256, 1, 256 / pace, budget) for pace in (0.1, 0.5, 99)] == [256, 64, 16]
    assert affordable(84, 3, 84 / 99, budget) == 42  # three micro-batches


def test_a_quick_measurement_of_two_tips_writes_its_files_and_restores_every_switch(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(measuring, "QUICK", TINY)
    before = [(switch.args, switch.func) for switch in timing.read_switches()]
    words = f"bench smoke --quick --rows tf32 deterministic --data.limit 64 --run.dir {tmp_path}"
    assert main([*words.split(), "--data.batch-size", "16"]) == 0
    assert [(switch.args, switch.func) for switch in timing.read_switches()] == before
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["tf32", "deterministic"]
    assert found["rows"][0]["reason"] == "needs a GPU"
    off, on = found["rows"][1]["variants"]
    assert (off["name"], on["name"], len(on["seconds_per_step"])) == ("off", "on", 2)
    assert on["gain"]["low"] <= on["gain"]["median"] <= on["gain"]["high"]
    conclusion = found["verdict"]
    assert conclusion.endswith("python train.py smoke --data.limit 64 --data.batch-size 16")
    assert capsys.readouterr().out.splitlines()[-1] == conclusion
    table = (tmp_path / "bench.md").read_text()
    assert all(text in table for text in (conclusion, "| tf32 ", "| deterministic "))


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_every_tip_works_or_says_what_it_needs(on_photos, device):
    knobs = {"compute__device": device, "run__processes": 1, "data__where": "stream"}
    config = changed(on_photos, data__workers=0, **knobs)
    names = [name for name in TIPS if device == "cuda" or name not in SLOW + KNOBS + LOADING]
    for row in bench(config, *names)[0]:
        assert not row["reason"] or row["reason"].startswith("needs ")
        assert not row["reason"] or device == "cpu" or row["name"] == "data_parallel"
        assert row["reason"] or len(row["variants"]) >= 2
        for variant in row["variants"]:
            assert not variant["failure"], (row["name"], variant)
    written = {path.name for path in Path(config.run.dir).glob("[!.]*")}
    assert written == {"bench.json", "bench.md"}


def test_an_unknown_tip_is_a_mistake(refusal):
    assert refusal("bench", "smoke", "--rows", "num_worker").endswith("mean num_workers?\n")


def test_every_tip_is_explained_on_the_page_that_is_printed(capsys):
    assert main(["bench", "--tips"]) == 0
    sections = capsys.readouterr().out.split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == [*TIPS]
    for section, tip in zip(sections, TIPS.values(), strict=True):
        assert f"\n\n{summary(tip)}\n\n- Why: " in section
        assert all(f"\n- {word}: " in section for word in ("When it hurts", "Knob", "Source"))
