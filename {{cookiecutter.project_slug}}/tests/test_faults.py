"""Whatever ends a run: what was saved is kept, one line says why, the same command goes on."""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import after_each_step, changed, losses, run_alone, run_ranks, start
from torch import Tensor

from image_classifier import checkpoint
from image_classifier import train as train_module
from image_classifier.checkpoint import SaveError
from image_classifier.config import Config, FaultError, UserError
from image_classifier.models import read_checkpoint
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime import consensus, heartbeat
from image_classifier.runtime.launch import attempt
from image_classifier.runtime.out_of_memory import (
    OutOfMemoryError,
)
from image_classifier.runtime.signals import Signals, StoppedError
from image_classifier.tracking.logger import RunLogger
from image_classifier.train import train

Loss = Callable[[Tensor, Tensor], Tensor]


def last(config: Config) -> dict:
    """The newest checkpoint of a run."""
    return read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))


def status(config: Config) -> dict:
    """What a run says of how it stands."""
    return json.loads(Path(config.run.dir, "status.json").read_text())


def is_finite(state: dict) -> bool:
    """Whether all weights and statistics of a checkpoint are numbers."""
    return all(tensor.isfinite().all() for tensor in state["model"].values())


def plant(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[int, Tensor], Tensor]) -> None:
    """Let `spoil` change the loss of each part of a batch, of which it knows the number."""
    build = train_module.build_loss

    def build_spoiled(*arguments: object) -> Loss:
        loss_of, calls = build(*arguments), iter(range(1, 1000))
        return lambda logits, labels: spoil(next(calls), loss_of(logits, labels))

    monkeypatch.setattr(train_module, "build_loss", build_spoiled)


def when_counting(act: Callable[[RunLogger], object]) -> None:
    """Let `act` happen in every step, in a process of its own."""
    after_each_step(pytest.MonkeyPatch(), lambda log, _: act(log))


# Signals


def signalling(number: signal.Signals) -> Callable[[int, Tensor], Tensor]:
    """Let the third step send a signal to this process."""

    def send(step: int, loss: Tensor) -> Tensor:
        if step == 3:
            os.kill(os.getpid(), number)
        return loss

    return send


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP ends a process, even where the tests themselves run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_a_run_after_its_step_with_all_of_it_saved(
    config: Config, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(patch, signalling(number))
        with pytest.raises(StoppedError, match=f"received {number.name}: saved .* of 8") as error:
            train(config)
    assert error.value.code == 128 + number
    step = last(config)["state"]["step"]
    assert step in (3, 4)
    found = status(config)
    assert (found["state"], found["signal"], found["step"]) == ("interrupted", number.name, step)
    train(config)
    assert status(config)["state"] == "done"


@pytest.mark.usefixtures("hangup")
def test_under_nohup_a_run_outlives_its_terminal(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang_up(_: int, loss: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGHUP)
        return loss

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    plant(monkeypatch, hang_up)
    train(config)
    assert status(config)["state"] == "done"


def interrupted_twice(config: Config) -> None:
    """Train, and get Ctrl-C twice in a step that takes for ever."""

    def hang(_: RunLogger) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        torch.zeros(1).sum()
        os.read(os.pipe()[0], 1)

    when_counting(hang)
    train(config)


def test_a_second_ctrl_c_waits_for_nothing(config: Config) -> None:
    assert run_alone(interrupted_twice, config) == (130, None)


def test_signals_act_as_before_when_the_run_is_over() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Signals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def stopped_on_one_rank(config: Config) -> tuple[str, int]:
    """Train, with a signal to rank 1 alone; what was said, and the step that was saved."""

    def send(report: RunLogger) -> None:
        if report.world.rank == 1 and report.step_done == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    when_counting(send)
    consensus.EXCHANGE_SECONDS = 0
    with suppress(FaultError):
        try:
            train(config)
        except StoppedError as error:
            return str(error), last(config)["state"]["step"]
    return "not stopped", 0


def test_all_ranks_end_after_the_same_step_whichever_got_the_signal(config: Config) -> None:
    (said, step), (quiet, same_step) = run_ranks(2, stopped_on_one_rank, config)
    assert said.startswith("received SIGTERM: saved ")
    assert quiet == ""
    assert 2 <= step == same_step < 8


# Ranks


def left_alone(config: Config) -> str:
    """Train, and be killed if this is rank 1; what rank 0 says of it."""
    heartbeat.BEAT_SECONDS = 0.1

    def die(report: RunLogger) -> None:
        if report.world.rank == 1 and report.step_done == 3:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    when_counting(die)
    try:
        train(config)
    except FaultError as error:
        return f"{error.code}: {error}"
    return "not noticed"


def test_a_rank_that_was_killed_is_named_with_its_place(config: Config) -> None:
    with pytest.raises(EOFError):
        run_ranks(2, left_alone, config)
    account = status(config)
    assert account["state"] == "failed"
    assert "no answer from rank 1 on " in account["message"]
    assert "which has ended" in account["message"]
    assert "at test_faults.py:" in account["message"]


# Memory


def test_out_of_memory_halves_the_micro_batch_and_nothing_else(
    config: Config,
    trained_once: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = []

    def fail(_: int, loss: Tensor) -> Tensor:
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("planted")
        return loss

    forward = torch.nn.Module.__call__

    def look(module: torch.nn.Module, *arguments: object, **options: object) -> object:
        if type(module).__name__ == "ResNet9" and module.training:
            sizes.append(len(arguments[0]))
        return forward(module, *arguments, **options)

    plant(monkeypatch, fail)
    monkeypatch.setattr(torch.nn.Module, "__call__", look)
    codes = [attempt(lambda: train(config)) for _ in range(3)]
    assert codes == [OutOfMemoryError.code] * 2 + [0]
    said = capsys.readouterr().err
    assert "out of memory at step 1 with micro-batch 16" in said
    assert "from the last save with 4 (the batch stays 16)" in said
    assert set(sizes[2:]) == {4}
    assert losses(config.run.dir) == pytest.approx(losses(trained_once), rel=1e-3)


def test_a_micro_batch_need_not_divide_the_batch(config: Config, trained_once: Path) -> None:
    folder = Path(config.run.dir)
    folder.mkdir()
    (folder / "micro_batch.json").write_text('{"micro_batch": 5}')
    train(config)
    assert losses(folder) == pytest.approx(losses(trained_once), rel=1e-3)


def test_where_one_image_is_too_much_it_is_said_what_the_memory_went_to(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("planted")

    plant(monkeypatch, fail)
    one = changed(config, optim__accumulate=16)
    with pytest.raises(
        FaultError, match=r"micro-batch 1: weights \d+ MB, gradients .* resident"
    ) as e:
        train(one)
    assert e.value.code == 1
    assert "averaged weights" not in str(e.value)  # of which there are none


# Numbers


def spoil_step(number: int) -> Callable[[int, Tensor], Tensor]:
    """Make the loss of one step nan."""
    return lambda step, loss: loss * float("nan") if step == number else loss


def test_a_loss_that_is_no_number_ends_the_run_before_it_spoils_the_weights(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(config, run__save_every_steps=1)
    plant(monkeypatch, spoil_step(6))
    with pytest.raises(FaultError, match="the loss is not finite in steps 6 to 6"):
        train(config)
    assert last(config)["state"]["step"] == 5
    assert is_finite(last(config)["state"])


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_a_spoiled_gradient_moves_no_weight_and_no_momentum(
    config: Config, name: str, clip_norm: float
) -> None:
    optim = changed(config, optim__name=name, optim__clip_norm=clip_norm).optim
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = build_optimizer(optim, model)
    precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
    states = []
    for factor in (1.0, float("inf"), 1.0):
        (model(torch.ones(2, 4)).square().sum() * factor).backward()
        precision.step(optimizer)
        found = [*model.parameters()]
        found += [v for state in optimizer.state.values() for v in state.values() if v is not None]
        states.append([tensor.detach().clone() for tensor in found])
    assert all(map(torch.equal, states[0], states[1]))
    assert not all(map(torch.equal, states[1], states[2]))


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_a_step_whose_gradients_overflow_in_fp16_changes_nothing(config: Config, name: str) -> None:
    optim = changed(config, optim__name=name, optim__lr=1e-6).optim
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = build_optimizer(optim, model)
    precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for step in range(40):
        precision.backward(100 * model(torch.ones(2, 4)).square().sum())
        precision.step(optimizer)
        if step == 0:
            assert all(map(torch.equal, model.parameters(), before))
    assert not all(map(torch.equal, model.parameters(), before))
    assert all(weight.isfinite().all() for weight in model.parameters())


# Disks


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A disk that has no space for the checkpoints of the steps in this list."""
    steps: list[int] = []
    save = checkpoint.torch.save

    def save_or_fail(saved: dict, file: object) -> None:
        file.write(b"half of it")
        if saved["state"]["step"] in steps:
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError:
                raise RuntimeError("unexpected pos 8000832 vs 8000784")  # noqa: B904 - as torch
        file.seek(0)
        save(saved, file)

    monkeypatch.setattr(checkpoint.torch, "save", save_or_fail)
    return steps


def test_a_run_goes_on_when_a_save_finds_the_disk_full(
    config: Config, full_disk: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    full_disk += [4, 6]
    train(changed(config, run__save_every_steps=2, run__keep=10))
    said = capsys.readouterr().out
    assert "cannot save step 4 in" in said
    assert "that of step 2 is kept; training goes on" in said
    names = {path.name for path in Path(config.run.dir, "checkpoints").iterdir()}
    steps = {"step_00000002.pt", "step_00000008.pt"}
    assert names == steps | {"last.pt", "best.pt", "best.safetensors"}
    assert last(config)["state"]["step"] == 8


def test_a_run_whose_last_save_failed_has_failed(config: Config, full_disk: list[int]) -> None:
    full_disk += [8]
    with pytest.raises(SaveError, match=r"last save .* the checkpoint of step 4 is kept"):
        train(config)
    assert status(config)["state"] == "failed"
    full_disk.clear()
    train(config)
    assert last(config)["state"]["step"] == 8


def test_a_signal_after_which_nothing_could_be_saved_is_no_interruption(
    config: Config, full_disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk += [3, 4]
    plant(monkeypatch, signalling(signal.SIGTERM))
    with pytest.raises(SaveError, match=r"last save .* the checkpoint of step 2 is kept"):
        train(changed(config, run__save_every_steps=2))
    assert status(config)["state"] == "failed"


def test_three_saves_that_fail_in_a_row_end_the_run(config: Config, full_disk: list[int]) -> None:
    full_disk += range(2, 9)
    with pytest.raises(SaveError, match=r"step 4 in .* step 1 is kept; it is the third time"):
        train(changed(config, run__save_every_steps=1))
    assert last(config)["state"]["step"] == 1


def test_rows_that_a_full_disk_does_not_take_are_written_later(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from image_classifier.tracking import logger as report

    append = report.append_lines

    def fail_at_first(path: Path, lines: list[str]) -> None:
        append(path, lines)
        if len(lines) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "append_lines", fail_at_first)
    train(changed(config, run__log_every_steps=1))
    lines = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps)
    assert set(steps[:4]) == {1, 2, 3, 4}
    assert capsys.readouterr().out.count("its rows are kept for later") > 0


# The run folder


def hold(config: Config, path: Path) -> None:
    """Train for as long as `path` is not there."""

    def wait(_: RunLogger) -> None:
        path.with_name("began").touch()
        while not path.exists():
            time.sleep(0.01)

    when_counting(wait)
    train(config)


def test_a_second_run_in_a_folder_is_refused_and_a_dead_one_is_no_hindrance(
    config: Config, tmp_path: Path
) -> None:
    process, _ = start(hold, config, tmp_path / "go")
    while not (tmp_path / "began").exists():
        assert process.is_alive()
        time.sleep(0.01)
    with pytest.raises(UserError, match=rf"in use by another run \(process {process.pid} on "):
        train(config)
    process.kill()
    process.join()
    train(config)
    assert status(config)["state"] == "done"
