"""Bench measures what training does, finds what is there, and says what it can't measure."""

import json
import time
import weakref
from contextlib import nullcontext, redirect_stdout
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, mixed

from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.cli import main
from image_classifier.data import TrainData
from image_classifier.extensions import of_tools
from image_classifier.runtime.command_line import summary
from image_classifier.runtime.distributed import World
from image_classifier.tools.bench import bench as benching
from image_classifier.tools.bench import measure as measuring
from image_classifier.tools.bench import timed_run as timing
from image_classifier.tools.bench import tips
from image_classifier.train import train

CPU = World(torch.device("cpu"))
TINY = measuring.Budget(row_seconds=0, round_seconds=0, rounds=(2, 2), warmup_seconds=0)
LOADING = (tips.num_workers, tips.prefetch, tips.resident)


def bench(config, *names, budget=TINY, leave_out=False):
    """The rows and the conclusion of a short `bench`."""
    benching.bench(config, config, "python train.py smoke", names, budget, leave_out)
    found = json.loads(Path(config.run.dir, "bench.json").read_text())
    return found["rows"], found["verdict"]


def test_a_timed_run_makes_the_steps_of_training(config):
    ways = {"optim__ema_decay": 0.9, "optim__accumulate": 2}
    ways |= {"data__balance": "loss"} if hasattr(config.data, "balance") else {}
    config = changed(config, data__limit=32, **ways, **mixed(mixup=0.2))  # 2 epochs of 2 steps
    train(config)
    saved = read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))["state"]
    run = timing.TimedRun(config, CPU, TrainData(config, CPU))
    run.run(1)
    run.run(3)
    for part in ("model", "ema"):
        torch.testing.assert_close(run.state.state_dict()[part], saved[part], rtol=0, atol=0)


def test_all_variants_of_loading_bring_the_same_images(config):
    config = changed(config, data__workers=0)
    setup, datasets = timing.Setup(config, CPU, TrainData(config, CPU)), timing.DatasetCache(CPU)
    for tip in LOADING:
        seen = []
        for variant in tip(setup).values():
            data = datasets.open(variant.config)
            run = timing.TimedRun(variant.config, CPU, data, variant.change)
            pairs = map(run.augment, run.batches(0, 2), (0, 1))
            seen.append([deepcopy(pair) for pair in pairs])  # as a later one may overwrite it
            assert run.run(1) > 0
            run.close()
        assert len(seen) >= 2
        torch.testing.assert_close(seen[1:], seen[:-1])


def test_an_effect_is_found_beside_variants_that_fail(config, monkeypatch):
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried\n20 GiB")
    fail = Mock(side_effect=[0, 0, 0, OSError("eek")])  # after one measured step
    of_worker = RuntimeError("Caught E in DataLoader worker process 0.\n  raise E\nE: no space\n")
    changes = {
        "slow": lambda run: setattr(run, "train_on", lambda _: time.sleep(0.02)),
        "large": Mock(side_effect=out_of_memory),
        "broken": lambda run: setattr(run, "after_step", fail),
        "apart": Mock(side_effect=of_worker),
        "fast": lambda run: setattr(run, "train_on", lambda _: time.sleep(0.01)),
    }

    def mine(setup):
        return {name: timing.Variant(setup.config, changes[name]) for name in changes}

    monkeypatch.setattr(tips, "TIPS", (mine,))
    (row,), _ = bench(config, "mine", budget=replace(TINY, rounds=(8, 8)))
    failures = [variant["failure"] for variant in row["variants"]]
    told = ["CUDA out of memory. Tried", "eek", "E: no space"]
    assert failures == ["", *(f"failed: {reason}" for reason in told), ""]
    *others, gain = (variant["gain"] for variant in row["variants"])
    assert others == [None] * 4
    assert gain["is_effect"]
    assert 1.5 < gain["median"] < 2.5
    assert gain["low"] <= gain["median"] <= gain["high"]


def test_a_variant_that_fails_leaves_its_memory_to_the_others(config):
    begun = []
    alive = []

    def failing_after(steps):
        def change(run):
            begun.append(weakref.ref(run.state.model))
            run.after_step = Mock(side_effect=[*[None] * steps, torch.OutOfMemoryError])

        return change

    def watch(run):
        run.after_step = lambda: alive.append([one() is not None for one in begun])

    changes = {"at once": failing_after(0), "later": failing_after(2), "none": watch}
    variants = {name: timing.Variant(config, change) for name, change in changes.items()}
    measuring.measure(variants, timing.DatasetCache(CPU), TINY, 0)
    assert [bool(variant.failure) for variant in variants.values()] == [True, True, False]
    assert (alive[0], alive[-1]) == ([False, True], [False, False])


def test_images_are_on_the_device_as_long_as_a_run_has_them(config):
    pixels = []
    resident = changed(config, data__where="device")
    variant = timing.Variant(resident, lambda run: pixels.append(weakref.ref(run.data.pixels)))
    datasets = timing.DatasetCache(CPU)
    measuring.measure({"device": variant}, datasets, TINY, 0)
    assert variant.seconds
    assert pixels[0]() is None
    one = datasets.open(resident)
    other = datasets.open(changed(resident, data__workers=1))
    assert one.pixels is other.pixels


def test_what_is_inside_the_noise_is_no_effect():
    noise = [1.0, 1.3, 0.9, 1.1, 0.8, 1.2, 1.0]
    assert str(measuring.gain(noise, noise[::-1])).startswith("no effect here (")
    assert not measuring.gain([1.01] * 9, [1.0] * 9).is_effect
    assert str(measuring.gain([2.0] * 10 + [90.0], [1.0] * 11)) == "2.00 x (2.00 .. 2.00)"


def test_faster_knobs_are_recommended_together(config, monkeypatch):
    paces = {"channels_last": 0.8, "bf16": 1.2, "on": 0.1, "0": 9.0, "host": 0.8, "best": 0.5}

    def measure(variants, *_):
        for name, variant in variants.items():
            variant.seconds = [paces.get(name, 1.0)] * 9

    monkeypatch.setattr(benching, "measure", measure)
    names = ("channels_last", "mixed_precision", "deterministic", "num_workers", "resident")
    config = changed(config, compute__channels_last=False)
    rows, conclusion = bench(config, *names, leave_out=True)
    left_out = {row["name"]: [v["name"] for v in row["variants"]] for row in rows[len(names) :]}
    assert left_out.pop("without channels_last") == ["best", "contiguous"]
    assert left_out == {"without resident": ["best", "stream"]}
    assert conclusion == (
        "best setting of 5 measured tips, 2.00 x (2.00 .. 2.00) against the preset: "
        "python train.py smoke --data.where host --compute.channels-last"
    )


def test_long_steps_are_measured_with_fewer_images():
    affordable, budget = benching.affordable_batch_size, replace(TINY, step_seconds=0.15)
    assert [affordable(256, 1, 256 / pace, budget) for pace in (0.1, 0.5, 99)] == [256, 64, 16]
    assert affordable(84, 3, 84 / 99, budget) == 42  # three micro-batches


def test_a_short_bench_says_what_it_left_out_and_restores_switches(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measuring, "QUICK", replace(TINY, total_seconds=0))
    monkeypatch.setattr(benching, "MIN_ROWS", 1)
    before = str(timing.read_switches())
    knobs = "--data.limit 64 --data.batch-size 16"
    words = f"--quick --rows prepared deterministic prefetch --run.dir {tmp_path} {knobs}"
    assert main(["bench", "smoke", *words.split(), "--run.fresh"]) == 0
    assert str(timing.read_switches()) == before
    found = json.loads((tmp_path / "bench.json").read_text())
    rows = [(row["name"], row["reason"], len(row["variants"])) for row in found["rows"]]
    not_here = ("prepared", "needs photographs in files; these images are in memory", 0)
    late = ("prefetch", "no time left: --rows prefetch", 0)
    assert rows == [not_here, ("deterministic", "", 2), late]
    expected = "none of 1 measured tips (1 skipped for lack of time) helps: "
    expected += f"python train.py smoke {knobs}"
    assert found["verdict"] == capsys.readouterr().out.splitlines()[-1] == expected
    table = (tmp_path / "bench.md").read_text()
    assert all(text in table for text in (expected, "| prepared ", "| on "))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_tip_works_or_says_what_it_needs(on_photos, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    knobs = {"compute__device": device, "run__processes": 1, "data__where": "stream"}
    if "augment.policy" in of_tools():  # as most presets for photographs have
        knobs["augment__policy"] = "trivialaugment"
    config = changed(on_photos, data__workers=0, **mixed(mixup=0.2), **knobs)
    names = [tip.__name__ for tip in tips.TIPS if device == "cuda" or tip not in LOADING]
    names = [name for name in names if device == "cuda" or name not in tips.SLOW]
    for row in bench(config, *names)[0]:
        assert not row["reason"] or row["reason"].startswith("needs a tool")
        assert row["reason"] or len(row["variants"]) >= 2
        for variant in row["variants"]:
            assert not variant["failure"], (row["name"], variant)
        # On a GPU a network this small takes less than its copies in bf16.
        saves = ["gradient_checkpointing"] + ["mixed_precision"] * (device == "cpu")
        if row["name"] in saves and not row["reason"]:
            peaks = [variant["peak_bytes"] for variant in row["variants"]]
            assert 0 < peaks[1] < peaks[0]
    written = {path.name for path in Path(config.run.dir).glob("[!.]*")}
    assert written == {"bench.json", "bench.md"}


def test_an_image_that_cannot_be_prepared_leaves_the_other_tips_to_measure(on_spoilt_photos):
    pytest.importorskip("image_classifier.tools.prepare")
    pytest.importorskip("image_classifier.tools.skip_bad_images")
    config = changed(on_spoilt_photos, data__on_bad_image="skip", data__workers=0)
    prepared, other = bench(config, "prepared", "channels_last")[0]
    assert prepared["reason"].startswith("cannot read image ")
    assert all(variant["seconds_per_step"] for variant in other["variants"])


def test_every_tip_is_explained_on_the_page_and_another_is_a_mistake(capsys, refusal):
    assert main(["bench", "--tips"]) == 0
    sections = capsys.readouterr().out.split("\n## ")[1:]
    explained = {section.partition("\n")[0]: section for section in sections}
    for name, tip in tips.find_tips().items():
        section = explained[name]
        assert section.startswith(f"{name}\n\n{summary(tip)}\n\n- Why: ")
        words = ["When it hurts", "Option", "Source"]
        if name == "gradient_checkpointing" and f"compute.{name}" not in of_tools():
            words.remove("Option")  # which goes with its tool
        assert all(f"\n- {word}: " in section for word in words)
    assert refusal("bench", "smoke", "--rows", "num_worker").endswith("mean num_workers?\n")


def test_a_bench_whose_output_is_lost_has_its_result_in_files_but_its_page_is_lost(monkeypatch):
    monkeypatch.setattr(benching, "bench", lambda *_: print("measured"))
    for words, code in ((["smoke"], 0), (["--tips"], 1)):
        with open("/dev/full", "w") as full, redirect_stdout(full):
            assert main(["bench", *words]) == code


def test_what_changes_pixels_is_measured_and_never_recommended(on_photos, monkeypatch):
    preparing = Mock(Recipe=Mock(side=256, quality=85))
    monkeypatch.setattr(tips, "find_tool", lambda *_: preparing)
    monkeypatch.setitem(tips.DATASETS, tips.SAMPLE, None)
    streamed = changed(on_photos, data__where="stream", data__workers=0)
    for crop, is_same in (("pad", True), ("resized", False)):
        config = changed(streamed, augment__crop=crop)
        setup = timing.Setup(config, CPU, TrainData(config, CPU))
        assert {variant.is_choice for variant in tips.resident(setup).values()} == {is_same}
        assert {variant.is_choice for variant in tips.prepared(setup).values()} == {False}


def test_the_clock_runs_from_the_first_batch_to_the_one_after_the_last(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def batches(start, stop):
        for number in range(start, stop):
            now[0] += 1.0 if number > start else 9.0  # workers start
            yield number

    def train_on(_):
        now[0] += 2.0

    parts = {"switches": [], "around": nullcontext, "after_step": lambda: None}
    parts |= {"state": SimpleNamespace(step=5), "data": SimpleNamespace(steps_per_epoch=3)}
    parts["train_on"] = train_on
    run = SimpleNamespace(world=CPU, batches=batches, restarts_workers=False, **parts)
    assert timing.TimedRun.run(run, 4) == 3
    run.restarts_workers = True  # once in an epoch
    assert timing.TimedRun.run(run, 4) == 3 + 9 / 3


def test_times_of_the_same_round_are_compared():
    found = measuring.gain([1.0, 2, 3, 4, 5, 6, 7], [7.0, 6, 5, 4, 3, 2, 1])
    assert found.low < 0.5  # sorted, all would be alike
    assert found.high > 2


def test_images_per_second_are_those_of_the_middle_round(config):
    variant = timing.Variant(config, seconds=[0.5, 8.0, 2.0])  # 16 images in a step
    assert variant.rate == 8


def test_variants_take_turns_there_and_back(config):
    turns = []

    def start(name):
        run = Mock()
        run.run.side_effect = lambda _: turns.append(name) or 0.01
        return run

    variants = {name: timing.Variant(config, start=lambda _, n=name: start(n)) for name in "ab"}
    measuring.measure(variants, None, replace(TINY, rounds=(4, 4)), 0)
    assert "".join(turns[-8:]) == "abbaabba"


def test_what_takes_a_minute_is_left_out_of_a_quick_bench_unless_it_is_asked_for(config):
    setup = timing.Setup(config, CPU, TrainData(config, CPU))
    (slow,) = tips.SLOW
    quick = benching.plan_row(slow, setup, is_asked=False, budget=measuring.QUICK)
    assert quick.reason == f"takes a minute: without --quick, or with --rows {slow}"
    for is_asked, budget in ((True, measuring.QUICK), (False, measuring.FULL)):
        assert not benching.plan_row(slow, setup, is_asked=is_asked, budget=budget).reason


def test_as_many_rounds_of_as_many_steps_are_timed_as_there_is_time_for(config, monkeypatch):
    monkeypatch.setattr(measuring, "monotonic", lambda: 0.0)
    steps = []

    def start(_):
        run = Mock()
        run.run.side_effect = lambda count: steps.append(count) or 0.01
        return run

    variants = {name: timing.Variant(config, start=start) for name in "ab"}
    budget = replace(TINY, round_seconds=0.1, rounds=(2, 25))
    measuring.measure(variants, None, budget, 1.1)  # of 0.1 s for each in a round
    assert steps == [1, 1] * 2 + [10] * 10
    assert [len(variant.seconds) for variant in variants.values()] == [5, 5]


def test_a_row_of_the_table_has_its_knobs_rate_gain_and_memory(config):
    variants = {
        "whole": timing.Variant(config, seconds=[2.0] * 9, peak_bytes=3 * 2**20),
        "half": timing.Variant(config, seconds=[1.0] * 9),  # 16 images in a step
        "none": timing.Variant(config, failure="failed: no space"),
    }
    row = measuring.Row("tip", note="--precision fp32", variants=variants)
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in row.lines()] == [
        ["tip", "whole", "8", "--precision fp32, 3 MB per step"],
        ["", "half", "16", "2.00 x (2.00 .. 2.00)"],
        ["", "none", "failed: no space", ""],
    ]


def test_knobs_that_are_no_faster_together_are_not_recommended(config):
    other = changed(config, precision="bf16")
    for seconds, knobs in ((0.5, {"precision": "bf16"}), (1.0, {}), (2.0, {})):
        both = {"preset": (config, 1.0), "best": (other, seconds)}
        variants = {n: timing.Variant(own, seconds=[s] * 9) for n, (own, s) in both.items()}
        assert benching.best_knobs(measuring.Row("best", variants=variants)) == knobs


def test_about_how_long_it_takes_is_said_in_minutes(config):
    setup, (slow,) = timing.Setup(config, CPU, None), tips.SLOW
    rows = [measuring.Row("a"), measuring.Row("b", reason="needs a GPU")]
    for more, minutes in (([], 2), ([measuring.Row(slow)], 4)):  # one more for the best setting
        told = benching.introduce(setup, rows + more, replace(TINY, row_seconds=50), 1000.0)
        assert f"tips can be measured here, in about {minutes} min." in told


def test_images_that_are_augmented_in_another_way_are_opened_anew(config):
    datasets = timing.DatasetCache(CPU)
    one, same = (datasets.open(changed(config, data__workers=n)).whole for n in (0, 1))
    other = datasets.open(changed(config, augment__crop="none")).whole
    assert one is same is not other
