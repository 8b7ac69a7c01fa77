"""Whatever ends a run: what was saved is kept, one line says why, the same command resumes."""

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import after_each_step, changed, losses, run_alone, run_ranks, start
from torch import Tensor, nn

from image_classifier import checkpoint
from image_classifier import train as train_module
from image_classifier.errors import FaultError, UserError
from image_classifier.models import read_checkpoint
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime import consensus
from image_classifier.runtime.launch import attempt
from image_classifier.runtime.out_of_memory import OutOfMemoryError
from image_classifier.runtime.signals import StoppedError
from image_classifier.tracking import logger
from image_classifier.train import train

Fault = Callable[[int, Tensor], Tensor]


def last(config):
    """The state in the newest checkpoint of a run."""
    return read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))["state"]


def status(config):
    """The status of a run, as it is written for other programs."""
    return json.loads(Path(config.run.dir, "status.json").read_text())


def plant(monkeypatch, fault):
    """Let `fault` change the loss of each micro-batch; it is told the micro-batch's number."""
    build = train_module.build_loss

    def build_faulty(*arguments):
        loss_of, calls = build(*arguments), iter(range(1, 1000))
        return lambda logits, labels: fault(next(calls), loss_of(logits, labels))

    monkeypatch.setattr(train_module, "build_loss", build_faulty)


def in_each_step(act):
    """Let `act` happen in every step, in a process of its own."""
    after_each_step(pytest.MonkeyPatch(), lambda log, _: act(log))


def out_of_memory():
    """A fault: there is no memory for this micro-batch."""
    raise torch.OutOfMemoryError("planted")


def sends(number):
    """A fault: the third step sends a signal to this process."""
    return lambda step, loss: (step == 3 and os.kill(os.getpid(), number)) or loss


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_a_run_after_its_step_with_all_of_it_saved(config, number, monkeypatch):
    plant(monkeypatch, sends(number))
    # SIGHUP ends a process, even where the tests themselves run under `nohup`.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(StoppedError, match=f"received {number.name}: saved .* of 8") as error:
            train(config)
        assert signal.getsignal(number) == signal.SIG_DFL  # it acts as before the run
    finally:
        signal.signal(number, before)
    assert error.value.code == 128 + number
    assert (step := last(config)["step"]) in (3, 4)
    found = status(config)
    assert (found["state"], found["signal"], found["step"]) == ("interrupted", number.name, step)


def test_under_nohup_a_run_outlives_its_terminal(config, monkeypatch):
    plant(monkeypatch, sends(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    train(config)
    signal.signal(signal.SIGHUP, before)
    assert status(config)["state"] == "done"


def interrupted_twice(config):
    """Train, and get Ctrl-C twice in a step that takes for ever."""

    def hang(_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.read(os.pipe()[0], 1)

    in_each_step(hang)
    train(config)


def test_a_second_ctrl_c_waits_for_nothing(config):
    assert run_alone(interrupted_twice, config) == (130, None)


def stopped_on_one_rank(config):
    """Train, with a signal to rank 1 alone; the message, and the step that was saved."""

    def send(log):
        if log.world.rank == 1 and log.step_done == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    in_each_step(send)
    consensus.EXCHANGE_SECONDS = 0
    with pytest.raises(StoppedError) as error:
        train(config)
    return str(error.value), last(config)["step"]


def test_all_ranks_end_after_the_same_step_whichever_got_the_signal(config):
    (message, step), (other_message, other_step) = run_ranks(2, stopped_on_one_rank, config)
    assert message.startswith("received SIGTERM: saved ")
    assert other_message == ""
    assert 2 <= step == other_step < 8


def test_out_of_memory_halves_the_micro_batch_and_nothing_else(
    config, trained_once, monkeypatch, capsys
):
    sizes, forward = [], nn.Module.__call__

    def look(module, *arguments, **options):
        if type(module).__name__ == "ResNet9" and module.training:
            sizes.append(len(arguments[0]))
        return forward(module, *arguments, **options)

    plant(monkeypatch, lambda _, loss: out_of_memory() if sizes[-1] > 5 else loss)
    monkeypatch.setattr(nn.Module, "__call__", look)
    # The half of 11, which does not divide the batch of 16.
    Path(config.run.dir).mkdir()
    Path(config.run.dir, "micro_batch.json").write_text('{"micro_batch": 11}')
    assert [attempt(lambda: train(config)) for _ in range(2)] == [OutOfMemoryError.code, 0]
    lines = capsys.readouterr().err
    assert "out of memory at step 1 with micro-batch 11" in lines
    assert "from the last save with 5 (the batch stays 16)" in lines
    assert sizes == [11] + 8 * [5, 5, 5, 1]
    assert losses(config.run.dir) == pytest.approx(losses(trained_once), rel=1e-3)


def test_where_one_image_is_too_much_the_message_says_what_needs_less(config, monkeypatch):
    plant(monkeypatch, lambda *_: out_of_memory())
    message = r"micro-batch 1: .* a smaller --data.image-size"
    with pytest.raises(FaultError, match=message) as error:
        train(changed(config, optim__accumulate=16))
    assert error.value.code == 1


def test_a_loss_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(config, monkeypatch):
    plant(monkeypatch, lambda step, loss: loss * float("nan") if step == 6 else loss)
    with pytest.raises(FaultError, match="the loss is not finite in steps 6 to 6"):
        train(changed(config, run__save_every_steps=1))
    assert last(config)["step"] == 5
    assert all(tensor.isfinite().all() for tensor in last(config)["model"].values())


@pytest.mark.parametrize("is_scaled", [False, True])  # as fp16's loss is
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_a_gradient_that_is_not_finite_moves_no_weight_and_no_momentum(
    config, name, clip_norm, is_scaled
):
    optim = replace(config.optim, name=name, clip_norm=clip_norm)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = build_optimizer(optim, model)
    precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
    precision.scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
    states = []
    for factor in (1.0, float("inf"), 1.0):
        precision.backward(factor * model(torch.ones(2, 4)).square().sum())
        precision.step(optimizer)
        kept = [*model.parameters()]
        kept += [v for state in optimizer.state.values() for v in state.values() if v is not None]
        states.append([tensor.detach().clone() for tensor in kept])
    assert all(map(torch.equal, states[0], states[1]))
    assert not all(map(torch.equal, states[1], states[2]))


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that has no space for the checkpoints of the steps in this list."""
    steps, save = [], checkpoint.torch.save

    def save_or_fail(saved, file):
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


@pytest.mark.parametrize(
    ("full_at", "number", "message"),
    [
        ([4], 0, r"cannot save step 4 in .* step 2 is kept"),
        ([8], 0, r"cannot save step 8 in .* step 6 is kept"),
        ([3], signal.SIGTERM, r"cannot save step 3 in .* step 2 is kept"),
    ],
)
def test_a_run_that_could_not_be_saved_has_failed_and_resumes(
    config, full_disk, monkeypatch, *, full_at, number, message
):
    config = changed(config, run__save_every_steps=2)
    full_disk += full_at
    with monkeypatch.context() as patch:
        # Time for the writer to fail, which ends the run before the next save.
        plant(patch, lambda step, loss: time.sleep(0.05) or sends(number)(step, loss))
        with pytest.raises(FaultError, match=message):
            train(config)
    found = status(config)
    assert (found["state"], found["step"]) == ("failed", min(8, full_at[0] + (not number)))
    full_disk.clear()
    train(config)
    assert (status(config)["state"], last(config)["step"]) == ("done", 8)


def test_rows_that_a_full_disk_does_not_take_are_written_later(config, monkeypatch, capsys):
    append = logger.append_lines

    def fail_at_first(path, lines):
        append(path, lines)
        if len(lines) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logger, "append_lines", fail_at_first)
    train(changed(config, run__log_every_steps=1))
    lines = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps)
    assert set(steps[:4]) == {1, 2, 3, 4}
    assert "its rows are kept for later" in capsys.readouterr().out


def hold(config, path):
    """Train until `path` exists; `began` beside it says that the first step is done."""

    def wait(_):
        path.with_name("began").touch()
        while not path.exists():
            time.sleep(0.01)

    in_each_step(wait)
    train(config)


def test_a_second_run_in_a_folder_is_refused_but_not_after_the_first_was_killed(config, tmp_path):
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
