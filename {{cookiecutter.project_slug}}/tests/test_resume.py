"""Nothing that was saved is lost, and a run that was killed ends where an unbroken one ends."""

import contextlib
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from conftest import (
    GROWING,
    changed,
    logged,
    losses,
    mixed,
    run_alone,
    run_ranks,
    start,
    train_until,
)
from safetensors.torch import load_file
from torch import nn
from torch.utils._pytree import tree_map

from image_classifier import train as train_module
from image_classifier.checkpoints import saving as checkpoint
from image_classifier.checkpoints.reading import (
    load_best,
    read_checkpoint,
)
from image_classifier.checkpoints.saving import to_host
from image_classifier.checkpoints.state import NUMBERS, TrainState
from image_classifier.config import OPTIMIZERS
from image_classifier.data import open_dataset
from image_classifier.data.datasets.source import Source
from image_classifier.data.loader import TrainData
from image_classifier.errors import FaultError, UserError
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime.distributed import World
from image_classifier.runtime.files import write_whole
from image_classifier.train import train

CPU = World(torch.device("cpu"))

# What a row says of its speed and of the device.
SPEED = ("train/images_per_second", "train/waited_fraction", "train/mfu", "memory_bytes")
SPEED += ("device/", "energy_joules")


def small_run(config):
    """The checkpoints of a run that trains one layer, and its state after a step."""
    cpu, model = torch.device("cpu"), nn.Linear(3, 2)
    precision = Precision("fp32", config.compute, config.optim, cpu)
    state = TrainState(model, build_optimizer(config.optim, model), precision, step=1)
    source = Source(torch.zeros(2).long(), ("ant", "bee"), torch.zeros(2, 8, 8, 3).byte())
    return checkpoint.Checkpoints(config, World(cpu), source), state


def test_a_checkpoint_is_written_while_training_goes_on(config, monkeypatch):
    may_write = threading.Event()

    def write_late(*arguments):
        may_write.wait(5)
        write_whole(*arguments)

    monkeypatch.setattr(checkpoint, "write_whole", write_late)
    checkpoints, state = small_run(config)
    with checkpoints:
        before = state.model.weight.detach().clone()
        checkpoints.save(state, {"loss": 0.0, "step": 0})
        state.model.weight.data.zero_()  # the next step
        assert not checkpoints.last.exists()
        may_write.set()
    assert torch.equal(read_checkpoint(checkpoints.last)["state"]["model"]["weight"], before)


@pytest.mark.parametrize("averages", [False, True])
def test_a_save_copies_all_once_and_only_when_the_last_one_is_written(
    config, monkeypatch, averages
):
    was_written = []

    def write_slowly(*arguments):
        time.sleep(0.1)
        write_whole(*arguments)

    def spied(*arguments):
        was_written.append(not checkpoints.pending or checkpoints.pending.done())
        return to_host(*arguments)

    monkeypatch.setattr(checkpoint, "write_whole", write_slowly)
    monkeypatch.setattr(checkpoint, "to_host", spied)
    checkpoints, state = small_run(config)
    state.ema = nn.Linear(3, 2) if averages else None
    with checkpoints:
        for state.step in (1, 2):
            state.best_step = state.step
            checkpoints.save(state, {"loss": 0.0, "step": 0})
    assert was_written == [True, True]
    best = load_file(checkpoints.folder / "best.safetensors")
    torch.testing.assert_close(best, dict(state.best_model.state_dict()), rtol=0, atol=0)


def test_saves_of_a_gpu_share_memory_and_are_what_was_there_whatever_it_can_lock(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    weight = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    state = {"step": 1, "ema": None, "model": {"weight": weight.as_subclass(OnGpu)}}
    state["optimizer"] = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"lr": 0.1}]}
    buffers = {}
    first = to_host(state, buffers)
    assert_same(first, state)
    assert first["model"]["weight"].stride() == weight.stride()
    weight.zero_()
    second = to_host(state, buffers)
    assert_same(second, state)
    places = [saved["model"]["weight"].data_ptr() for saved in (first, second)]
    assert places[0] == places[1] != weight.data_ptr()
    assert len(buffers) == 1
    assert torch.cuda.synchronize.call_count == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_saves_of_a_gpu_are_in_page_locked_memory():
    weight, buffers = torch.randn(64, 3, 3, 3, device="cuda"), {}
    for _ in range(2):
        saved = to_host({"weight": weight}, buffers)["weight"]
        assert saved.is_pinned()
        assert torch.equal(saved, weight.cpu())
        weight += 1


def final(config):
    """The last checkpoint of a run, without its folder, workers and energy."""
    saved = read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))
    del saved["config"]["run.dir"], saved["config"]["data.workers"]
    saved["report"].pop("joules", None)
    return saved


def rows(config):
    """What a run logged, without its speed and its use of the device."""
    found = logged(config.run.dir)
    return [{k: v for k, v in row.items() if not k.startswith(SPEED)} for row in found]


def assert_same(one, other):
    """Both are equal to the last bit, whatever they are made of."""

    def assert_equal(left, right):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right

    tree_map(assert_equal, one, other)


def test_a_run_killed_twice_in_an_epoch_ends_as_an_unbroken_one(on_photos, tmp_path):
    # With all that has a memory, draws random numbers, or changes with the epoch.
    config = changed(on_photos, data__batch_size=2, data__workers=0, data__test_size=40, epochs=4)
    config = changed(config, augment__crop="resized", **mixed(cutout=8))
    config = changed(config, model__dropout=0.2, **mixed(cutmix=1.0), **GROWING)
    config = changed(config, optim__name=OPTIMIZERS[-1], optim__lr=1e-3, optim__ema_decay=0.9)
    config = changed(config, run__evaluate_every_epochs=1 / 3, run__log_every_steps=3)
    unbroken = changed(config, run__dir=str(tmp_path / "unbroken"))
    _, ended = start(train, unbroken)
    for last_step, workers in ((3, 2), (5, 1)):
        code, _ = run_alone(train_until, changed(config, data__workers=workers), last_step)
        assert code == -signal.SIGKILL
    train(config)
    ended.recv_bytes()
    assert_same(final(config), final(unbroken))
    assert rows(config) == rows(unbroken)


def seen_until(config, step):
    """Resume, end at `step`, and return the images that this rank trained on."""
    seen, batches = [], TrainData.batches

    def recorded(*arguments):
        for batch in batches(*arguments):
            yield batch
            seen.extend(batch.indices.tolist())  # once its step is done

    TrainData.batches = recorded
    train_until(config, step, kill=False)
    return seen


def test_no_image_is_missed_or_seen_twice_when_ranks_come_and_go(config, trained_once):
    often = changed(config, run__evaluate_every_epochs=0.25)
    parts = [run_ranks(size, seen_until, often, step) for size, step in ((2, 1), (1, 3), (2, 4))]
    assert sorted(chain(*chain(*parts))) == list(range(64))
    train(often)
    assert losses(config.run.dir)[-2:] == pytest.approx(losses(trained_once)[-2:], rel=1e-3)


def test_three_ranks_that_go_on_from_a_checkpoint_end_as_if_they_had_not_stopped(config, tmp_path):
    # Of three numbers, the last bit of the sum depends on the order.
    config = changed(config, data__batch_size=12, run__evaluate_every_epochs=0.2)
    config = changed(config, run__log_every_steps=4, model__dropout=0.2)
    unbroken = changed(config, run__dir=str(tmp_path / "unbroken"))
    run_ranks(3, train, unbroken)
    run_ranks(3, train_until, config, 3, False)
    run_ranks(3, train, config)
    assert_same(final(config), final(unbroken))
    assert rows(config) == rows(unbroken)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_run_resumes_with_another_memory_layout(config, name, tmp_path):
    config = changed(config, optim__name=name, optim__lr=1e-3, optim__warmup_epochs=0)
    unbroken = changed(config, run__dir=str(tmp_path / "unbroken"))
    train(unbroken)
    train_until(config, 4, kill=False)
    train(changed(config, compute__channels_last=False))
    assert losses(config.run.dir) == pytest.approx(losses(unbroken.run.dir), rel=1e-4)


def test_a_save_under_way_is_completed_and_the_gradient_scaler_resumes(config, monkeypatch):
    save, scaler = torch.save, torch.amp.GradScaler
    monkeypatch.setattr(torch, "save", lambda *arguments: (time.sleep(0.1), save(*arguments)))
    scale = {"init_scale": 1.0, "growth_interval": 3}  # to be doubled after steps 3 and 6
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *_, **__: scaler("cpu", **scale))
    train_until(config, 4, kill=False)
    assert final(config)["state"]["step"] == 4
    train(config)
    state = final(config)["state"]["scaler"]
    assert (state["scale"], state["_growth_tracker"]) == (4.0, 2)


@pytest.mark.parametrize("name", ["", "checkpoints/best.pt", "checkpoints/best.safetensors"])
def test_fresh_starts_over_and_may_begin_with_the_weights_that_it_replaces(finished, name):
    before, notes = final(finished), Path(finished.run.dir, "notes.txt")
    notes.write_text("mine")
    weights = Path(finished.run.dir, name)
    best = load_best(Path(finished.run.dir, "checkpoints", "best.pt")).weights
    fresh = changed(finished, run__fresh=True, run__init_from=str(weights))
    fresh = changed(fresh, optim__lr=0.0, optim__warmup_epochs=0, epochs=0.25)
    with pytest.raises(UserError):
        train(changed(fresh, model__name="resnt18"))
    assert_same(final(finished), before)  # a user's mistake costs nothing
    train(fresh)
    assert_same(final(fresh)["state"]["model"], best)
    assert {row["step"] for row in rows(fresh)} == {0, 1}
    assert notes.read_text() == "mine"  # it deletes only what the run wrote


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_kill_before_the_best_is_saved_does_not_lose_it(config, monkeypatch, epochs):
    saves = [*[DEFAULT] * (epochs - 1), KeyboardInterrupt]  # the last is killed
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        write = Mock(wraps=checkpoint.tensor_file, side_effect=saves)
        patch.setattr(checkpoint, "tensor_file", write)
        train(changed(config, epochs=epochs))
    train(changed(config, epochs=epochs))
    best = Path(config.run.dir, "checkpoints", "best.pt")
    assert read_checkpoint(best)["state"]["step"] == 4 * epochs


def test_a_finished_run_is_neither_trained_again_nor_mixed_with_another(finished, monkeypatch):
    before, last = final(finished), rows(finished)[-1]
    again = train(finished)
    assert again.metrics() == {name: last[name] for name in again.metrics()}
    with pytest.raises(UserError, match=r"lr was 0.02, is 0.1; take another --run.dir, or start"):
        train(changed(finished, optim__lr=0.1))
    offer = r"take another --run.dir \(with --run.init-from '.*last.pt' it"
    with pytest.raises(UserError, match=f"--epochs was 2, is 4; {offer}"):
        train(changed(finished, epochs=4))
    edited = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    monkeypatch.setattr(train_module, "build_model", lambda *_, **__: edited)
    with pytest.raises(UserError, match=r"holds another model: .*take another --run.dir, or start"):
        train(finished)
    assert_same(final(finished), before)


def test_a_finished_run_has_a_best_that_was_deleted_again(finished):
    best = Path(finished.run.dir, "checkpoints", "best.pt")
    before = read_checkpoint(best)
    best.unlink()
    train(finished)
    assert_same(read_checkpoint(best), before)


def test_images_that_were_replaced_under_their_names_are_noticed(on_photos, photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    config = changed(on_photos, data__root=str(root), epochs=1, optim__warmup_epochs=0)
    image = root / "train" / "ant" / "4.jpg"
    train(config)
    os.utime(image, (0, 0))
    train(config)  # a copy is the same
    content = image.read_bytes()  # to be other dots per inch, in as many bytes
    image.write_bytes(content[:15] + b"\2" + content[16:])
    with pytest.raises(UserError, match=r"replaced under the same names.* --run.init-from"):
        train(config)


def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it(finished, capsys):
    last = Path(finished.run.dir, "checkpoints", "last.pt")
    *_, previous, newest = sorted(last.parent.glob("step_*.pt"))
    whole = last.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content in (b"", whole[:10], whole[: len(whole) // 2], whole[:-1], flipped):
        last.write_bytes(content)
        with pytest.raises(checkpoint.DamagedError):
            read_checkpoint(last)
    newest.write_bytes(flipped)  # of which `last.pt` is another name
    train(finished)
    assert f"using {str(previous)!a} (step 4)" in capsys.readouterr().out
    assert final(finished)["state"]["step"] == 8
    for path in last.parent.glob("*.pt"):
        path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"no readable checkpoint.*--run.fresh"):
        train(finished)  # which overwrites none of them


def test_data_reaches_the_disk_before_its_name(tmp_path, monkeypatch):
    events = []
    path_of = lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(path_of(descriptor)))
    monkeypatch.setattr(Path, "replace", lambda *paths: events.append(paths))
    write_whole(tmp_path / "last.pt", lambda file: file.write(b"weights"))
    written, *others = events
    assert others == [(Path(written), tmp_path / "last.pt"), str(tmp_path)]


def test_a_run_saves_by_the_clock_and_keeps_the_newest_and_nothing_unfinished(config, monkeypatch):
    folder = Path(config.run.dir, "checkpoints")
    folder.mkdir(parents=True)
    left = [folder.with_name(f".{name}.0123abcd.tmp") for name in ("mine", "report.html")]
    for path in (*left, folder / ".last.pt.0123abcd.tmp"):
        path.touch()
    minutes = iter(range(1, 1000))  # it is asked once in a step
    monkeypatch.setattr(checkpoint, "monotonic", lambda: 60.0 * next(minutes))
    monkeypatch.setattr(checkpoint, "SAVE_SECONDS", 90.0)
    train(changed(config, run__evaluate_every_epochs=100.0))
    assert [path.exists() for path in left] == [True, False]
    newest = ["step_00000006.pt", "step_00000008.pt"]  # of those of steps 2, 4, 6 and 8
    expected = ["best.pt", "best.safetensors", "last.pt", *newest]
    assert sorted(os.listdir(folder)) == expected


def test_a_checkpoint_from_before_an_option_has_its_default(finished):
    path = Path(finished.run.dir, "checkpoints", "last.pt")
    saved = torch.load(path, weights_only=True)
    del saved["config"]["data.val_fraction"]
    torch.save(saved, path)
    train(finished)
    other = changed(finished, data__val_fraction=0.5)
    with pytest.raises(UserError, match=r"--data\.val-fraction was 0\.2, is 0\.5"):
        train(other)


def test_weights_that_are_not_finite_are_not_saved(config):
    checkpoints, state = small_run(config)
    state.model.weight.data[0, 0] = torch.inf
    with pytest.raises(FaultError, match=r"not finite after step 1: not saved"), checkpoints:
        checkpoints.save(state, {"loss": 0.0, "step": 0})
    assert not checkpoints.folder.exists()


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"run__best_by": "loss"}, "--run.best-by was top1, is loss"),
        (
            {"augment__crop": "resized", "data__where": "device"},
            "--data.where was stream, is device",
        ),
        ({"data__where": "host"}, ""),
    ],
)
def test_what_changes_the_pixels_or_the_best_is_not_free_to_change(config, knobs, said):
    was = changed(config, run__best_by="top1", data__where="stream")
    was = changed(was, augment__crop=knobs.get("augment__crop", "none"))
    now = changed(was, **knobs)
    source = open_dataset(was.data, "train")
    saved = checkpoint.Checkpoints(was, CPU, source).identity
    checkpoints = checkpoint.Checkpoints(now, CPU, source)
    refused = pytest.raises(UserError, match=said) if said else contextlib.nullcontext()
    with refused:
        checkpoints.check_identity(saved)


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_run_is_not_continued_with_another_normalization(config, name):
    config = changed(config, run__best_by="top1")
    source = open_dataset(config.data, "train")
    saved = checkpoint.Checkpoints(config, CPU, source).identity
    other = checkpoint.Checkpoints(config, CPU, replace(source, **{name: (0.25, 0.25, 0.25)}))
    with pytest.raises(UserError, match=f"it normalized with a {name} of "):
        other.check_identity(saved)


def test_the_averaged_weights_are_those_that_a_run_leaves(config):
    checkpoints, state = small_run(config)
    state.ema, state.step, state.best_step = nn.Linear(3, 2), 1, 1
    best = state.ema.weight.detach().clone()
    with checkpoints:
        checkpoints.save(state, {"loss": 0.0, "step": 0})
        state.step = 2
        state.ema.weight.data.zero_()
        checkpoints.load_best(state)
    assert torch.equal(state.ema.weight, best)


def test_a_run_goes_on_with_all_its_numbers(config):
    (_, state), (_, other) = small_run(config), small_run(config)
    for value, name in enumerate(NUMBERS, start=2):
        setattr(state, name, value)
    other.load_state_dict(state.state_dict())
    assert [getattr(other, name) for name in NUMBERS] == [2, 3, 4, 5, 6]
