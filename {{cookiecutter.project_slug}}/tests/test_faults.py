"""Whatever ends a run: what was saved is kept, one line says why, the same command resumes."""

import errno
import json
import os
import signal
import threading
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from conftest import changed, logged, losses, run_alone, run_ranks, start, wait_for
from test_resume import assert_same
from torch import nn

from image_classifier import train as train_module
from image_classifier.checkpoints import saving as checkpoint
from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import OPTIMIZERS
from image_classifier.errors import FaultError, UserError
from image_classifier.models.resnet9 import ResNet9
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime import consensus, launch
from image_classifier.runtime.distributed import World
from image_classifier.runtime.launch import attempt
from image_classifier.runtime.out_of_memory import (
    MicroBatch,
    OutOfMemoryError,
)
from image_classifier.runtime.signals import Signals, StoppedError
from image_classifier.tracking import logger
from image_classifier.train import train

CPU = World(torch.device("cpu"))


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
        loss, calls = build(*arguments), iter(range(1, 1000))
        return replace(loss, of=lambda *given: fault(next(calls), loss.of(*given)))

    monkeypatch.setattr(train_module, "build_loss", build_faulty)


# What torch and the libraries below it raise where memory runs out, as torch 2.15 words it.
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
    torch.AcceleratorError("CUDA error: out of memory"),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for "
        "details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.95 GiB, max allowed: 9.07 GiB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory"),
]


def lack_memory(monkeypatch, most, first=1, error=NO_MEMORY[0]):
    """Let training fail with more than `most` images, from pass `first` on; the sizes of passes."""
    sizes, forward = [], ResNet9.forward

    def forward_or_fail(model, images):
        if model.training:
            sizes.append(len(images))
            if len(images) > most and len(sizes) >= first:
                raise error
        return forward(model, images)

    monkeypatch.setattr(ResNet9, "forward", forward_or_fail)
    return sizes


def sends(number):
    """A fault: the third step sends a signal to this process."""
    return lambda step, loss: (step == 3 and os.kill(os.getpid(), number)) or loss


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_a_run_after_its_step_with_all_saved(config, number, monkeypatch):
    plant(monkeypatch, sends(number))
    before = signal.signal(number, signal.SIG_DFL)  # even where the tests run under `nohup`
    with pytest.raises(StoppedError, match=f"received {number.name}: saved .* of 8") as error:
        train(config)
    assert signal.signal(number, before) == signal.SIG_DFL  # it acts as before the run
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


def stuck(config, interrupts):
    """Train, with a first step that gets Ctrl-C so often and never ends."""

    def hang(*_):
        for _ in range(interrupts):
            os.kill(os.getpid(), signal.SIGINT)
        signal.pause()

    plant(pytest.MonkeyPatch(), hang)
    train(config)


def test_a_second_ctrl_c_waits_for_nothing(config):
    assert run_alone(stuck, config, 2) == (130, None)


def test_the_status_of_a_run_has_the_step_of_its_last_evaluation(config, monkeypatch):
    told = Mock(wraps=logger.write_json)
    monkeypatch.setattr(logger, "write_json", told)
    train(config)
    written = [content for (path, content), _ in told.call_args_list if path.name == "status.json"]
    steps = [(content["state"], content["step"]) for content in written]
    assert steps == [("running", 0), ("running", 4), ("done", 8)]


def test_a_second_run_in_a_folder_is_refused_but_not_after_the_first_was_killed(config):
    process, _ = start(stuck, config, 0)
    wait_for(Path(config.run.dir, "status.json").exists)
    with pytest.raises(UserError, match=rf"in use by another run \(process {process.pid} on "):
        train(config)
    process.kill()
    process.join()
    train(config)
    assert status(config)["state"] == "done"


def stopped_on_one_rank(config):
    """Train, with a signal to rank 1 alone; the message, and the step that was saved."""
    if os.environ["RANK"] == "1":
        plant(pytest.MonkeyPatch(), sends(signal.SIGTERM))
    consensus.EXCHANGE_SECONDS = 0
    with pytest.raises(StoppedError) as error:
        train(config)
    return str(error.value), last(config)["step"]


def test_all_ranks_end_after_the_same_step_whichever_got_the_signal(config):
    (message, step), (other_message, other_step) = run_ranks(2, stopped_on_one_rank, config)
    assert message.startswith("received SIGTERM: saved ")
    assert other_message == ""
    assert 3 <= step == other_step < 8


def test_out_of_memory_halves_the_micro_batch_alone(config, trained_once, monkeypatch, capsys):
    sizes = lack_memory(monkeypatch, most=5)
    # The half of 11, which does not divide the batch of 16.
    Path(config.run.dir).mkdir()
    Path(config.run.dir, "micro_batch.json").write_text('{"micro_batch": 11}')
    assert [attempt(lambda: train(config)) for _ in range(2)] == [OutOfMemoryError.code, 0]
    lines = capsys.readouterr().err
    assert "out of memory at step 1 with micro-batch 11" in lines
    assert "from the last save with 5 (the batch stays 16)" in lines
    assert sizes == [11] + 8 * [5, 5, 5, 1]
    assert losses(config.run.dir) == pytest.approx(losses(trained_once), rel=1e-3)


def test_a_restart_in_the_same_process_begins_with_an_empty_gpu(config, monkeypatch):
    done = Mock()
    done.attempt.side_effect = [OutOfMemoryError.code, 0]
    monkeypatch.setattr(launch, "attempt", done.attempt)
    monkeypatch.setattr(torch.cuda, "empty_cache", done.empty_cache)
    monkeypatch.setattr(os, "environ", {})
    run = changed(config, run__processes=1).run
    assert launch.run_in_processes(train, run, config.compute) == 0
    assert done.mock_calls == [call.attempt(train), call.empty_cache(), call.attempt(train)]


@pytest.mark.parametrize("error", NO_MEMORY[1:])
def test_whatever_reports_the_lack_of_memory_the_micro_batch_is_halved(config, monkeypatch, error):
    lack_memory(monkeypatch, most=15, error=error)
    with pytest.raises(OutOfMemoryError, match="started again from the last save with 8"):
        train(config)


@pytest.mark.parametrize(
    "text", ["CUDA error: an illegal memory access was encountered", "CUDNN_STATUS_INTERNAL_ERROR"]
)
def test_another_error_of_a_gpu_is_not_taken_for_a_lack_of_memory(config, monkeypatch, text):
    lack_memory(monkeypatch, most=15, error=RuntimeError(text))
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        train(config)


def test_where_one_image_is_too_much_the_message_says_what_needs_less(config, monkeypatch):
    lack_memory(monkeypatch, most=0)
    said = r"micro-batch 1: .* a smaller --data.image-size .*\(CUDA out of memory\. "
    with pytest.raises(FaultError, match=said) as error:
        train(changed(config, optim__accumulate=16))
    assert error.value.code == 1


def test_a_loss_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(config, monkeypatch):
    plant(monkeypatch, lambda step, loss: loss * float("nan") if step == 6 else loss)
    with pytest.raises(FaultError, match="the loss is not finite in steps 6 to 6"):
        train(changed(config, run__evaluate_every_epochs=0.25))
    assert last(config)["step"] == 5
    assert all(tensor.isfinite().all() for tensor in last(config)["model"].values())


@pytest.mark.parametrize("is_scaled", [False, True])  # as fp16's loss is
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layer", [0, 1, 2])  # where it is born: the first, a hidden, the last
def test_a_gradient_that_is_not_finite_moves_nothing(config, layer, name, clip_norm, is_scaled):
    optim = replace(config.optim, name=name, clip_norm=clip_norm)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = build_optimizer(optim, model)
    precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
    precision.scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
    states = []
    for factor in (0.0, float("inf"), 0.0):  # one number of one gradient becomes nan, or none
        spot = torch.zeros(4, 4).index_put_(
            (torch.tensor(3), torch.tensor(1)), factor * torch.ones(())
        )
        hook = model[layer].weight.register_hook(lambda gradient, spot=spot: gradient + spot)
        precision.backward(model(torch.ones(2, 4)).square().sum())
        hook.remove()
        precision.step(optimizer)
        states.append(deepcopy((model.state_dict(), optimizer.state_dict()["state"])))
    assert_same(states[0], states[1])  # weights and momentum
    with pytest.raises(AssertionError):
        assert_same(states[1], states[2])
    ((later, (weight,)),) = precision.find_skipped()
    assert (later, weight is model[layer].weight) == (1, True)
    assert precision.find_skipped() == []


def test_an_optimizer_that_knows_nothing_of_it_takes_no_step_whose_gradients_are_not_finite(config):
    precision = Precision("fp32", config.compute, config.optim, torch.device("cpu"))
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.RMSprop([weight])
    for factor in (float("nan"), 1.0):
        precision.backward(factor * weight.sum())
        precision.step(optimizer)
    assert weight.isfinite().all()
    assert (weight < 1).all()


class AppleWeight(nn.Parameter):
    """A weight on the CPU that says it is on an Apple GPU."""

    device = torch.device("mps")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_an_apple_gpu_no_fused_kernel_decides_whether_a_step_is_skipped(config, name):
    optim = replace(config.optim, name=name)
    precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        layer.weight, layer.bias = AppleWeight(layer.weight), AppleWeight(layer.bias)
    optimizer = build_optimizer(optim, model)
    assert [group["fused"] for group in optimizer.param_groups] == [False, False]
    before = deepcopy(model.state_dict())
    for factor in (float("nan"), 1.0):
        assert_same(before, model.state_dict())
        precision.backward(factor * model(torch.ones(2, 4)).square().sum())
        precision.step(optimizer)
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert not torch.equal(before["0.weight"], model[0].weight)


def harm(monkeypatch, layer, steps):
    """Let the gradient of the weight `layer` and of those below it be nan in these steps."""
    build = train_module.build_model

    def build_harmed(*words, **knobs):
        model, numbers = build(*words, **knobs), iter(range(1, 1000))

        def look(module, _, features):
            if module.training and torch.is_grad_enabled() and next(numbers) in steps:
                return features + (0 * features).sqrt()  # 0, whose gradient is 0 / 0
            return None

        model.get_submodule(layer).register_forward_hook(look)
        return model

    monkeypatch.setattr(train_module, "build_model", build_harmed)


def test_a_step_whose_gradients_are_not_finite_is_told_with_the_layer(config, monkeypatch, capsys):
    harm(monkeypatch, "stage1", {3, 4})
    config = changed(config, model__name="resnet9", optim__ema_decay=0.5)
    train(config)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "not finite" in line]
    assert warnings == [
        "warning: gradients are not finite (in step 3 first that of stage1.1.body.1.1.bias, and "
        "1 later): such a step changes no weights"
    ]
    assert all(tensor.isfinite().all() for tensor in last(config)["ema"].values())


def test_a_run_none_of_whose_steps_has_finite_gradients_ends(config, monkeypatch):
    monkeypatch.setattr(logger, "MOST_SKIPPED", 5)
    harm(monkeypatch, "stem", range(2, 1000))
    with pytest.raises(FaultError, match=r"in step 5 first that of stem.1.bias, and 1 later\), 5 "):
        train(changed(config, run__log_every_steps=3))


@pytest.mark.parametrize(
    ("full_at", "kept", "number"), [(4, 2, 0), (8, 6, 0), (3, 2, signal.SIGTERM)]
)
def test_a_run_that_is_not_saved_has_failed_and_resumes(config, monkeypatch, full_at, kept, number):
    save = torch.save

    def save_or_fail(saved, file):
        if saved["state"]["step"] == full_at:
            file = Mock(write=Mock(side_effect=[0, OSError(errno.ENOSPC, "after half of it")]))
        save(saved, file)

    config = changed(config, run__evaluate_every_epochs=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.torch, "save", save_or_fail)
        # Time for the writer to fail, which ends the run before the next save.
        plant(patch, lambda step, loss: time.sleep(0.05) or sends(number)(step, loss))
        with pytest.raises(FaultError, match=f"cannot save step {full_at} in .* {kept} is kept"):
            train(config)
    found = status(config)
    assert (found["state"], found["step"]) == ("failed", min(8, full_at + (not number)))
    train(config)
    assert (status(config)["state"], last(config)["step"]) == ("done", 8)


def test_rows_that_a_full_disk_does_not_take_are_written_later(config, monkeypatch, capsys):
    append = logger.append_lines

    def fail_at_first(path, lines):
        append(path, lines)
        if len(lines) < 3:
            append(Path("/dev/full"), lines)

    monkeypatch.setattr(logger, "append_lines", fail_at_first)
    train(changed(config, run__log_every_steps=1))
    steps = [row["step"] for row in logged(config.run.dir)]
    assert steps == sorted(steps)
    assert set(steps[:4]) == {1, 2, 3, 4}
    assert "its rows are kept for later" in capsys.readouterr().out


def test_the_first_of_several_signals_is_told():
    with Signals() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert noted.number == signal.SIGTERM


def test_a_run_in_a_thread_leaves_signals_to_the_program():
    found = []

    def work():
        with Signals() as noted:
            found.append(noted.number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]


def test_a_signal_in_the_last_step_does_not_keep_a_run_from_its_end(config, monkeypatch):
    plant(monkeypatch, lambda step, loss: (step == 4 and os.kill(os.getpid(), 15)) or loss)
    train(changed(config, epochs=1))
    assert status(config)["state"] == "done"


def test_a_micro_batch_that_did_not_fit_is_forgotten_by_a_run_that_starts_over(config):
    Path(config.run.dir).mkdir()
    Path(config.run.dir, "micro_batch.json").write_text('{"micro_batch": 4}')
    assert MicroBatch(config, CPU).size == 4
    assert MicroBatch(changed(config, run__fresh=True), CPU).size == 16
    assert MicroBatch(changed(config, optim__accumulate=8), CPU).size == 2  # as asked for


def test_ranks_compute_in_the_smallest_micro_batch_of_any(config, monkeypatch):
    monkeypatch.setattr(World, "all_reduce_min", lambda _, size: min(size, 4))
    assert MicroBatch(config, CPU).size == 4
