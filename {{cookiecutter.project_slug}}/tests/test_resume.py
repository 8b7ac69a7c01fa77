"""Nothing that was saved is lost, and a run that was killed ends where an unbroken one ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from conftest import after_each_step, changed, run_alone, run_ranks

from image_classifier import checkpoint
from image_classifier import train as story
from image_classifier.checkpoint import Checkpoints
from image_classifier.config import Config, UserError
from image_classifier.data.datasets import open_dataset
from image_classifier.data.loader import Batch, TrainData
from image_classifier.models import (
    DamagedError,
    load_best,
    read_checkpoint,
)
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime import consensus
from image_classifier.runtime import run_dir as run
from image_classifier.runtime.distributed import World
from image_classifier.runtime.files import give_name, write_whole
from image_classifier.tracking.logger import RunLogger
from image_classifier.train import train
from image_classifier.train_state import TrainState

CPU = World(torch.device("cpu"))


def train_until(config: Config, step: int, kill: bool = True) -> None:
    """Train, and die by SIGKILL in the middle of step `step`; or leave as after Ctrl-C."""

    def stop(log: RunLogger, _: torch.Tensor) -> None:
        if log.step_done > step:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        after_each_step(patch, stop)
        train(config)


def scored(config: Config) -> float:
    """Train, and return the fraction of validation images that are recognised."""
    return train(config).top1


def final(config: Config) -> dict:
    """The last checkpoint of a run, without what may differ: where it lies, the energy it took."""
    saved = read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))
    del saved["config"]["run.dir"]
    saved["report"].pop("joules", None)
    return saved


def rows(config: Config) -> list[dict]:
    """What a run logged, without its speed and what the device had to do for it."""
    lines = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
    speed = ("train/images_per_second", "train/waited_fraction", "train/mfu", "memory_bytes")
    others = (*speed, "device/", "energy_joules")
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(others)} for line in lines
    ]


def assert_same(one: object, other: object, where: str = "") -> None:
    """Both are equal to the last bit, whatever they are made of."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{number}")
    else:
        assert one == other, where


@pytest.fixture
def eventful(config: Config, photos: Path) -> Config:
    """A run that uses all that has a memory, draws numbers, or changes with the epoch."""
    return changed(
        config,
        data__name="folder",
        data__root=str(photos),
        data__batch_size=2,
        data__workers=2,
        augment__crop="resized",
        augment__policy="trivialaugment",
        augment__cutmix=1.0,
        augment__random_erasing=0.5,
        augment__min_size=16,
        augment__growth=(0.5, 0.5),
        data__test_size=40,
        model__dropout=0.2,
        model__stochastic_depth=0.2,
        optim__name="muon",
        optim__lr=1e-3,
        optim__ema_decay=0.9,
        run__save_every_steps=2,
        run__log_every_steps=3,
    )


def test_a_run_killed_twice_in_an_epoch_ends_as_an_unbroken_one(
    eventful: Config, tmp_path: Path
) -> None:
    unbroken = changed(eventful, run__dir=str(tmp_path / "unbroken"))
    code, top1 = run_alone(scored, unbroken)
    assert code == 0
    for last_step, workers in ((3, 2), (5, 1)):
        code, _ = run_alone(train_until, changed(eventful, data__workers=workers), last_step)
        assert code == -signal.SIGKILL
    assert run_alone(scored, changed(eventful, data__workers=0)) == (0, top1)
    one, other = final(eventful), final(unbroken)
    del one["config"]["data.workers"], other["config"]["data.workers"]
    assert_same(one, other)
    assert rows(eventful) == rows(unbroken)


def test_a_run_on_two_ranks_resumes_on_one(config: Config, tmp_path: Path) -> None:
    unbroken = changed(config, run__dir=str(tmp_path / "unbroken"))
    train(unbroken)
    half = changed(config, run__save_every_steps=1)
    run_ranks(2, train_until, half, 3, False)
    train(half)
    for one, other in zip(rows(half)[-3:], rows(unbroken)[-3:], strict=True):
        assert one["step"] == other["step"]
        for name in one.keys() & {"train/loss", "val/loss"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3)


def seen_until(config: Config, step: int) -> list[int]:
    """The images that this rank trains on from where the run is up to `step`, where it is ended."""
    seen: list[int] = []
    batches = TrainData.batches

    def recorded(data: TrainData, start: int, stop: int) -> Iterator[Batch]:
        for batch in batches(data, start, stop):
            seen.extend(batch.indices.tolist())
            yield batch

    TrainData.batches = recorded
    train_until(config, step, kill=False)
    TrainData.batches = batches
    return seen[: len(seen) - config.data.batch_size // int(os.environ.get("WORLD_SIZE", "1"))]


def test_no_image_is_missed_or_seen_twice_when_ranks_come_and_go(config: Config) -> None:
    config = changed(config, run__save_every_steps=1)
    two = run_ranks(2, seen_until, config, 1)
    one = seen_until(config, 3)
    two_again = run_ranks(2, seen_until, config, 4)
    assert sorted(chain(*two, one, *two_again)) == list(range(64))


def checkpoints_of(config: Config) -> Checkpoints:
    """Of the run of a config, in one process."""
    return Checkpoints(config, CPU, open_dataset(config.data, "train"))


def begun(config: Config, scale: float = 1.0) -> TrainState:
    """A tiny model before its first step, whose losses are scaled."""
    model = torch.nn.Linear(4, 4)
    precision = Precision("fp32", config.compute, config.optim, CPU.device)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return TrainState(model, build_optimizer(config.optim, model), precision)


def test_a_save_that_is_under_way_is_seen_through_whatever_ends_the_run(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def save_slowly(*arguments: object) -> None:
        time.sleep(0.1)
        save(*arguments)

    monkeypatch.setattr(checkpoint.torch, "save", save_slowly)
    with contextlib.suppress(KeyboardInterrupt), checkpoints_of(config) as checkpoints:
        checkpoints.save(begun(config), {"loss": 1.0, "step": 0})
        raise KeyboardInterrupt
    assert final(config)["state"]["step"] == 0


def test_a_scaler_goes_on_as_it_was_saved(config: Config) -> None:
    state, again = begun(config, 8.0), begun(config, 4.0)
    for _ in range(5):
        state.precision.backward(state.model(torch.ones(2, 4)).mean())
        state.precision.step(state.optimizer)
        state.advance()
    with checkpoints_of(config) as checkpoints:
        checkpoints.save(state, {"loss": 1.0, "step": 5})
    checkpoints_of(config).resume(again)
    scaler = again.precision.scaler
    assert (again.step, scaler.get_scale(), scaler._get_growth_tracker()) == (5, 16.0, 2)
    assert_same(scaler.state_dict(), state.precision.scaler.state_dict())


def test_a_finished_run_is_not_trained_again(finished: Config) -> None:
    before, logged = final(finished), rows(finished)[-1]
    again = train(finished)
    assert (again.top1, again.loss) == (logged["val/top1"], logged["val/loss"])
    assert_same(final(finished), before)


def test_fresh_starts_over(finished: Config) -> None:
    other = changed(finished, optim__lr=0.01, run__fresh=True)
    train(other)
    assert rows(other)[0]["step"] < final(other)["state"]["step"]
    assert final(other)["config"]["optim.lr"] == 0.01


def test_a_mistake_in_a_fresh_start_costs_nothing(finished: Config) -> None:
    before = final(finished)
    with pytest.raises(UserError):
        train(changed(finished, run__fresh=True, model__name="resnt18"))
    assert_same(final(finished), before)
    own = f"{finished.run.dir}/checkpoints/best.pt"
    train(changed(finished, run__fresh=True, run__init_from=own))
    assert final(finished)["state"]["step"] == 8


def test_a_kill_before_the_best_is_saved_does_not_lose_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, write: object) -> None:
        if path.name == "best.safetensors":
            raise KeyboardInterrupt
        write_whole(path, write)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(checkpoint, "write_whole", fail)
        train(config)
    train(config)
    assert Path(config.run.dir, "checkpoints", "best.pt").exists()
    assert Path(config.run.dir, "checkpoints", "best.safetensors").exists()


def test_a_model_that_was_edited_meanwhile_is_named(
    finished: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = story.build_model

    def edited(*arguments: object, **options: object) -> torch.nn.Module:
        model = build(*arguments, **options)
        model.head = torch.nn.Sequential(torch.nn.Linear(64, 10))
        return model

    monkeypatch.setattr(story, "build_model", edited)
    with pytest.raises(UserError, match=r"another model: Missing key.*--run.fresh"):
        train(finished)


def test_fresh_leaves_other_peoples_files_alone(config: Config) -> None:
    folder = Path(config.run.dir)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    train(changed(config, optim__warmup_epochs=0, epochs=0.25, run__fresh=True))
    assert (folder / "notes.txt").read_text() == "mine"


def test_another_config_is_not_mixed_into_a_run(finished: Config) -> None:
    with pytest.raises(UserError, match=r"--optim.lr was 0.02, is 0.1.*--run.fresh"):
        train(changed(finished, optim__lr=0.1))
    weights = re.escape(str(Path(finished.run.dir, "checkpoints", "last.pt")))
    onward = rf"--epochs was 2, is 4; take another --run.dir \(with --run.init-from '{weights}' it"
    with pytest.raises(UserError, match=onward):
        train(changed(finished, epochs=4))


def test_other_images_are_not_mixed_into_a_run(finished: Config, photos: Path) -> None:
    with pytest.raises(UserError, match=r"--data.name was shapes, is folder"):
        train(changed(finished, data__name="folder", data__root=str(photos), data__batch_size=4))


def test_images_that_were_replaced_under_their_names_are_noticed(
    config: Config, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    config = changed(config, data__name="folder", data__root=str(root), data__batch_size=4)
    train(config)
    capsys.readouterr()
    train(config)
    assert "written anew" not in capsys.readouterr().out
    image = root / "train" / "ant" / "4.jpg"
    os.utime(image, (0, 0))
    train(config)
    assert "training images were written anew since this run was saved" in capsys.readouterr().out
    content = image.read_bytes()
    for end in (b"\0", b"\1"):  # another size, and then other bytes of the same size
        image.write_bytes(content + end)
        with pytest.raises(UserError, match=r"replaced under the same names.* --run.init-from"):
            train(config)
        train(changed(config, run__fresh=True))


def test_a_damaged_checkpoint_is_passed_over(
    finished: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    last = Path(finished.run.dir, "checkpoints", "last.pt")
    previous, newest = sorted(last.parent.glob("step_*.pt"))[-2:]
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    for path in (last, newest):  # which are two names of one file
        path.write_bytes(content)
    train(finished)
    assert f"using {str(previous)!a} (step 4)" in capsys.readouterr().out
    assert final(finished)["state"]["step"] == 8


def test_damage_is_never_loaded(finished: Config) -> None:
    path = Path(finished.run.dir, "checkpoints", "last.pt")
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DamagedError):
            read_checkpoint(path)
    path.unlink()
    os.mkfifo(path)  # of which nobody would ever write to the other end
    with pytest.raises(DamagedError, match="is damaged: not a plain file"):
        read_checkpoint(path)


def test_if_all_checkpoints_are_damaged_nothing_is_overwritten(finished: Config) -> None:
    for path in Path(finished.run.dir, "checkpoints").glob("*.pt"):
        path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"no readable checkpoint.*--run.fresh"):
        train(finished)


def test_data_reaches_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        events.append(f"name {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    write_whole(tmp_path / "last.pt", lambda file: file.write(b"weights"))
    written, *others = events
    assert re.fullmatch(r"sync \.last\.pt\.[0-9a-f]{8}\.tmp", written)
    assert others == ["name last.pt", f"sync {tmp_path.name}"]


def test_two_that_write_the_same_file_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    path, name = tmp_path / "model.onnx", tmp_path / "best.onnx"

    def write(file: BinaryIO) -> None:
        file.write(b"a whole ")
        write_whole(path, lambda other: other.write(b"another"))
        give_name(path, name)
        file.write(b"file")

    write_whole(path, write)
    assert (path.read_bytes(), name.read_bytes()) == (b"a whole file", b"another")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "best.onnx"}


def test_what_a_killed_run_left_half_written_is_removed_by_the_next(finished: Config) -> None:
    folder = Path(finished.run.dir)
    mine = folder / ".mine.0123abcd.tmp"
    left = [folder / ".report.html.0123abcd.tmp", folder / "checkpoints/.last.pt.0123abcd.tmp"]
    for path in (mine, *left):
        path.touch()
    train(finished)
    assert mine.exists()
    assert not [path for path in left if path.exists()]


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(b"before")

    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(path, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]
    assert path.read_bytes() == b"before"


def test_only_the_newest_checkpoints_are_kept(config: Config) -> None:
    train(changed(config, run__save_every_steps=1, run__keep=3))
    names = sorted(path.name for path in Path(config.run.dir, "checkpoints").iterdir())
    numbered = [f"step_0000000{step}.pt" for step in (6, 7, 8)]
    assert names == ["best.pt", "best.safetensors", "last.pt", *numbered]


def saved_steps(config: Config) -> list[int]:
    """Train, and return the steps of all checkpoints that were saved, the same on each rank."""
    consensus.EXCHANGE_SECONDS = 0
    steps, save = [], checkpoint.Checkpoints.save

    def record(checkpoints: checkpoint.Checkpoints, state: TrainState, report: dict) -> None:
        steps.append(state.step)
        save(checkpoints, state, report)

    checkpoint.Checkpoints.save = record
    try:
        train(config)
    finally:
        checkpoint.Checkpoints.save = save
    return steps


def saved_at_once(config: Config) -> list[int]:
    """The steps that a run saves whose every save is overdue."""
    checkpoint.SAVE_SECONDS = 0.0
    return saved_steps(config)


def test_a_run_that_seldom_evaluates_saves_by_the_clock(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom = changed(config, run__evaluate_every_epochs=100.0)
    assert saved_steps(seldom) == [8]
    minutes = iter(range(1, 1000))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "monotonic", lambda: 60.0 * next(minutes))
        patch.setattr(checkpoint, "SAVE_SECONDS", 150.0)
        often = changed(seldom, run__dir=str(tmp_path / "often"))
        assert saved_steps(often) == [3, 6, 8]  # the clock is asked once in a step
    always = changed(seldom, run__dir=str(tmp_path / "two"))
    one, other = run_ranks(2, saved_at_once, always)
    assert one == other
    assert len(one) == len(set(one)) > 3


def test_weights_of_a_run_start_another(finished: Config, tmp_path: Path) -> None:
    trained = load_best(Path(finished.run.dir, "checkpoints", "best.pt")).weights
    for name in ("best.pt", "best.safetensors"):
        other = changed(
            finished,
            optim__lr=0.0,
            optim__warmup_epochs=0,
            epochs=0.25,
            run__dir=str(tmp_path / name),
            run__init_from=f"{finished.run.dir}/checkpoints/{name}",
        )
        train(other)
        assert_same(final(other)["state"]["model"], trained)


def test_weights_of_another_model_are_refused(finished: Config, tmp_path: Path) -> None:
    path = f"{finished.run.dir}/checkpoints/best.pt"
    other = changed(finished, run__dir=str(tmp_path / "b"), run__init_from=path)
    with pytest.raises(UserError, match="do not fit the model"):
        train(changed(other, model__width=16))
    with pytest.raises(UserError, match="do not fit the model"):
        train(changed(other, model__name="squeezenet1_1"))


def test_a_kill_can_leave_no_lock_in_the_users_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    (tmp_path / "mine.py").write_text("mine")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "mine.py"], cwd=tmp_path, check=True)
    os.utime(tmp_path / "mine.py", (0, 0))  # git would like to note that it is the same
    index = (tmp_path / ".git" / "index").read_bytes()
    assert run.git("status", "--porcelain") == "A  mine.py"
    assert (tmp_path / ".git" / "index").read_bytes() == index
