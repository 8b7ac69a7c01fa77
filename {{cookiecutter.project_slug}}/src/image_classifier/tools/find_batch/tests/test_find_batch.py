"""The batch-size finder: which sizes it tries, where it stops, what it concludes."""

import json
from pathlib import Path
from string import Template
from unittest.mock import Mock

import pytest
import torch
from conftest import Shown, changed, mixed

from image_classifier.cli import main
from image_classifier.data import TrainData
from image_classifier.errors import FaultError, UserError
from image_classifier.extensions import find_tool
from image_classifier.runtime.distributed import World
from image_classifier.tools.find_batch import (
    find_batch as finding,
)

CPU = World(torch.device("cpu"))
BASE = 1000  # bytes that a step takes beside its images


def pretend(monkeypatch, room, fits_up_to=10**9, speed=100):
    """Let a machine have `room` bytes, an image take 10, and 16 images at once be fast enough."""
    tried = []

    def measure(trial, count):
        tried.append(count)
        is_fp32 = trial.training.state.precision.name == "fp32"
        size = finding.Size(count, speed * min(count, 16), BASE + (20 if is_fp32 else 10) * count)
        return size if count <= fits_up_to else None

    monkeypatch.setattr(finding.Trial, "measure", measure)
    monkeypatch.setattr(finding.Trial, "total_memory", lambda _: room)
    return tried


def search(config, at_most=64):
    """What is found for a configuration."""
    return finding.search(config, CPU, TrainData(config, CPU), at_most)


def concluded(found, config, processes=1):
    """The sentences, with the changed knobs in place of a command line."""
    return finding.conclude(found, config, lambda **knobs: json.dumps(knobs), processes)


def bf16(config, **knobs):
    """A run in 16 bits."""
    return changed(config, precision="bf16", **knobs)


def test_a_cpu_stops_before_its_memory_is_exceeded(config, monkeypatch):
    tried = pretend(monkeypatch, room=BASE + 10 * 45)
    found = search(bf16(config))
    assert found.limit == "memory"
    assert 40 < found.largest.images <= 45
    assert max(tried) == found.largest.images
    assert found.enough.images == 16


def test_a_step_that_runs_out_of_memory_bounds_the_size_from_above(config, monkeypatch):
    monkeypatch.setattr(finding, "ROUND_SECONDS", 0)

    def fail(*step):
        if len(step[1]) > 5:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")

    monkeypatch.setattr(finding.Trial, "step", fail)
    assert [size.images for size in search(config).sizes] == [2, 3, 4, 5]


@pytest.mark.parametrize("where", ["torch.zeros_like", "torch.nn.utils.clip_grads_with_norm_"])
def test_a_step_may_run_out_of_memory_half_way_through_the_update(config, monkeypatch, where):
    monkeypatch.setattr(finding, "ROUND_SECONDS", 0)
    config = changed(config, optim__name="adamw", optim__clip_norm=1.0, optim__momentum=0.9)
    trial = finding.Trial(config, CPU, TrainData(config, CPU))
    trial.training.precision.scaler = torch.amp.GradScaler("cpu")  # as of fp16 on a GPU
    lack = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    with monkeypatch.context() as short:
        short.setattr(where, lack)
        assert trial.measure(4) is None
    assert lack.called
    assert trial.measure(2).images == 2
    assert trial.training.precision.scaler.is_enabled()


def test_an_error_that_is_no_lack_of_memory_is_not_hidden(config, monkeypatch):
    monkeypatch.setattr(finding.Trial, "step", Mock(side_effect=RuntimeError("wrong shape")))
    with pytest.raises(RuntimeError, match="wrong shape"):
        search(config)


def test_a_size_that_is_nearly_as_fast_as_the_fastest_is_enough():
    sizes = [finding.Size(images, rate, 1) for images, rate in ((4, 90), (8, 96), (16, 100))]
    assert finding.Found(sizes, 1, "memory", 4).enough.images == 8


@pytest.mark.parametrize("most", [0, 1])
def test_the_last_resort_is_one_image(config, monkeypatch, most):
    pretend(monkeypatch, room=10**9, fits_up_to=most)
    if most:
        assert search(bf16(config)).largest.images == 1
    else:
        with pytest.raises(FaultError, match="not even one image at a time fits"):
            search(config)


def test_room_for_twice_the_batch_is_told_and_what_made_it(config, monkeypatch):
    config = bf16(config)  # 16 images
    for room, words in (
        (BASE + 10 * 40, ["could take twice", "makes the room"]),
        (BASE + 20 * 64, ["could take twice", "in fp32 it would take"]),
        (BASE + 10 * 20, ["does not fit", "in fp32"]),
    ):
        pretend(monkeypatch, room)
        text = concluded(search(config), config)
        assert all(word in line for word, line in zip(words, text[2:4], strict=True))
        assert ("makes the room" in text[3]) == (words[1] == "makes the room")
        assert text[4].startswith("a larger batch buys no speed: ")


@pytest.mark.parametrize(
    ("name", "old", "lr"), [("sgd", 0.5, 2.0), ("adamw", 0.5, 1.0), ("sgd", 0.55, 2.2)]
)
def test_a_faster_batch_comes_with_a_learning_rate(config, monkeypatch, name, old, lr):
    pretend(monkeypatch, room=10**9)
    config = bf16(config, data__batch_size=4, optim__name=name, optim__lr=old)
    *_, what, _, advice = concluded(search(config), config, processes=2)
    assert what.startswith("--data.batch-size 8, 4 images at once, takes")
    assert advice.startswith(f'try: {{"data__batch_size": 32, "optim__lr": {lr}}} (')


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        ({64: 800, 96: 960, 128: 1000}, 'try: {"data__batch_size": 128'),  # by 1.25, at 2 x
        ({64: 800, 96: 1000}, "a somewhat larger batch is faster, but twice as many do not fit: "),
        (
            {64: 800, 96: 1000, 128: 700},
            "a somewhat larger batch is faster, but twice as many are no faster: ",
        ),
        ({64: 980, 96: 1000, 128: 1000}, "a larger batch buys no speed: "),
    ],
)
def test_a_batch_that_is_too_small_is_doubled_if_that_fits(config, sizes, advice):
    config = bf16(config, data__batch_size=64)
    found = finding.Found([finding.Size(n, s, n) for n, s in sizes.items()], 1000, "memory", 64)
    assert concluded(found, config)[-1].startswith(advice)


def test_the_configured_size_is_tried_where_the_search_ended_just_below_it(config, monkeypatch):
    pretend(monkeypatch, room=10**9, fits_up_to=50)
    found = search(bf16(config, data__limit=0, data__batch_size=50))  # 48 fit, and 52 do not
    assert found.largest.images == 50


def test_a_batch_that_does_not_fit_is_divided_and_one_that_fits_is_not(config, monkeypatch):
    pretend(monkeypatch, room=10**9, fits_up_to=7)
    *_, what, advice = concluded(search(bf16(config)), bf16(config))
    assert what == "--data.batch-size 16, 16 images at once, does not fit"
    assert advice.startswith('try: {"optim__accumulate": 4} (')
    pretend(monkeypatch, room=10**9)
    config = bf16(config, optim__accumulate=4)
    *_, what, _, advice = concluded(search(config), config)
    assert what.startswith("--data.batch-size 16, 4 images at once, takes")
    assert advice.startswith('try: {"optim__accumulate": 1} (')


@pytest.mark.parametrize(
    ("parts", "fits_up_to", "advice"),
    [
        (8, 7, 'try: {"optim__accumulate": 4} (larger parts are faster)'),
        (4, 8, 'try: {"optim__accumulate": 2} ('),
        (16, 5, 'try: {"optim__accumulate": 4} ('),
    ],
)
def test_where_memory_lacks_for_a_batch_its_parts_grow_and_not_the_batch(
    parts, fits_up_to, advice, config, monkeypatch
):
    pretend(monkeypatch, room=10**9, fits_up_to=fits_up_to)
    config = bf16(config, optim__accumulate=parts, data__limit=20)  # 16 images in a batch
    assert concluded(search(config, at_most=20), config)[-1].startswith(advice)


def test_parts_that_divide_no_batch_are_not_advised(config):
    config = bf16(config, data__batch_size=35, optim__accumulate=5)
    sizes = [finding.Size(n, rate, n) for n, rate in ((7, 700), (14, 1400), (16, 1400))]
    advice = concluded(finding.Found(sizes, 1000, "memory", 7), config)[-1]
    assert advice == "larger parts would be faster, but none of them divides the batch: {}"


def test_a_size_that_was_not_reached_is_not_said_not_to_fit(config, monkeypatch):
    pretend(monkeypatch, room=10**9)
    larger = bf16(config, data__batch_size=32, data__limit=64)
    *_, what, _ = concluded(search(larger, at_most=8), larger)
    assert what == "--data.batch-size 32, 32 images at once, was not tried"


def test_the_steps_are_those_of_training_but_change_no_weight(config, monkeypatch):
    monkeypatch.setattr(finding, "ROUND_SECONDS", 0)
    config = changed(config, optim__ema_decay=0.9, **mixed(mixup=0.2))
    trial = finding.Trial(config, CPU, TrainData(config, CPU))
    before = [weight.clone() for weight in trial.training.state.model.parameters()]
    size = trial.measure(24)
    assert trial.training.state.step >= 2 + finding.MIN_STEPS
    assert (size.images, size.peak_bytes > 2**26) == (24, True)
    torch.testing.assert_close(list(trial.training.state.model.parameters()), before)


def test_a_compiled_model_is_compiled_for_each_size(config, monkeypatch):
    compiled, compile_model = [], torch.nn.Module.compile
    backend = lambda graph, _: compiled.append(1) or graph.forward  # noqa: E731
    patched = lambda model, **how: compile_model(model, **how, backend=backend)  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "compile", patched)
    monkeypatch.setattr(finding, "ROUND_SECONDS", 0)
    config = changed(config, compute__compile=True)
    trial = finding.Trial(config, CPU, TrainData(config, CPU))
    with torch._dynamo.config.patch(recompile_limit=2):  # of sizes; it is 8
        for count in (2, 3, 4):
            trial.measure(count)
    assert len(compiled) == 3
    torch._dynamo.reset()


def test_a_cpu_leaves_a_tenth_of_its_memory_to_others(config, monkeypatch):
    monkeypatch.setattr(finding, "peak_memory_bytes", lambda: 300)
    monkeypatch.setattr(finding, "host_memory_bytes", lambda: 700)
    assert finding.Trial(config, CPU, TrainData(config, CPU)).total_bytes == 900


def test_the_fastest_step_counts_once_the_first_two_have_warmed_up(config, monkeypatch):
    trial = finding.Trial(config, CPU, TrainData(config, CPU))
    seconds, now = iter((0.1, 0.1, 0.5, 0.25, 0.4)), [0.0]
    monkeypatch.setattr(trial, "step", lambda *_: now.append(now[-1] + next(seconds)))
    monkeypatch.setattr(finding, "perf_counter", lambda: now[-1])
    assert trial.measure(24).images_per_second == pytest.approx(24 / 0.25)
    seconds = iter([finding.SLOW_SECONDS + 1])  # which is not repeated
    assert trial.measure(24).seconds == pytest.approx(11)


def test_one_process_is_measured_with_its_share_of_the_batch(config, monkeypatch):
    pretend(monkeypatch, room=10**9)
    found = finding.find_batch(config, lambda **_: "", 32, processes=2)
    assert found.configured == 8
    assert json.loads(Path(config.run.dir, "batch.json").read_text())["largest"] == 32


def test_a_batch_of_all_processes_is_no_more_than_the_training_images(config, monkeypatch, capsys):
    pretend(monkeypatch, room=10**9)  # 16 images in each of two processes are fast
    config = changed(config, data__batch_size=4, data__limit=24)
    finding.find_batch(config, lambda **knobs: json.dumps(knobs), 0, processes=2)
    assert 'try: {"data__batch_size": 24, ' in capsys.readouterr().out


def test_the_command_writes_two_files_and_says_what_to_try(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finding, "ROUND_SECONDS", 0)
    knobs = "--data.batch-size 4 --data.limit 64 --precision bf16"
    own = f"--at-most 8 --run.dir {tmp_path} --run.fresh"  # which `train` is not to get
    assert main(["find-batch", "smoke", *f"{knobs} {own}".split()]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "batch.json").read_text())
    assert {2, 4, 8} <= {size["images"] for size in found["sizes"]}
    assert out.endswith("".join(f"{line}\n" for line in found["text"]))
    assert "limit: more than 8 were not tried" in out
    assert "python train.py smoke " in found["text"][-1]
    assert "--run." not in found["text"][-1]
    charts = find_tool("charts", "report")
    assert (tmp_path / "batch.html").exists() == ("batch.html and" in out) == bool(charts)
    page = (tmp_path / "batch.html").read_text() if charts else ""
    shown = ("images in a micro-batch", "images per second", " GB") if charts else ()
    assert all(text in page for text in shown)


def test_the_page_and_the_first_line_have_each_size_with_its_rate_and_memory(config):
    sizes = [finding.Size(16, 1000.0, 2**31), finding.Size(32, 1010.0, 3 * 2**30)]
    found = finding.Found(sizes, 2**33, "memory", 16)
    draw = Mock(PAGE=Template("$body"), line_chart=Mock(return_value=""))
    (table,) = Shown(finding.page(found, ["<b>"], draw)).tables
    assert table == [
        ["images", "images/s", "memory"],
        ["16", "1,000", "2 GB"],
        ["32", "1,010", "3 GB"],
    ]
    rates, memory = ([*call.args[1].values()] for call in draw.line_chart.call_args_list)
    assert (rates, memory) == ([[(16, 1000), (32, 1010)]], [[(16, 2), (32, 3)]])
    first = "largest micro-batch that fits: 32 images (3 GB of 8 GB); limit: memory"
    assert concluded(found, config)[0] == first


def test_memory_is_told_in_units_of_2_to_the_30_bytes():
    assert finding.gigabytes(11.2 * 2**30) == "11.2 GB"
    assert finding.gigabytes(0.42 * 2**30) == "0.42 GB"


def test_under_torchrun_nothing_is_measured_or_written(config, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="without torchrun"):
        finding.find_batch(config, Mock(), 0, 1)
    assert not Path(config.run.dir).exists()
