"""What only a GPU can show: every precision, no hidden waits, correct overlap, exactness."""

import gc
import re
import sys
from contextlib import closing, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import (
    GROWING,
    changed,
    losses,
    mixed,
    on_deep,
    reporter,
    run_alone,
    run_ranks,
    train_until,
    untrained_run,
)
from test_fake_gpu import of_several, read_after
from test_faults import NO_MEMORY, lack_memory, last, plant
from test_ranks import end_of_failing
from test_resume import assert_same

from image_classifier.checkpoints import state as state_module
from image_classifier.checkpoints.state import TrainState
from image_classifier.cli import commands, main
from image_classifier.config import (
    OPTIMIZERS,
    ComputeConfig,
    ModelConfig,
)
from image_classifier.data import Source, shared_memory
from image_classifier.data import batch as batch_module
from image_classifier.data.datasets import DATASETS
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.errors import EXIT_OUT_OF_MEMORY, FaultError
from image_classifier.extensions import find_tool, of_tools
from image_classifier.models import build_model, models_by_name
from image_classifier.parallel import Replicas
from image_classifier.runtime import distributed, launch
from image_classifier.runtime.distributed import World
from image_classifier.runtime.launch import run_in_processes
from image_classifier.train import train

GPU = torch.device("cuda", 0)
is_there = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_there, reason="needs a CUDA device")]


@pytest.fixture
def on_gpu(config):
    """A short run with all that may happen in a step."""
    config = changed(config, **mixed(cutout=4, mixup=0.2, cutmix=0.5))
    config = changed(config, optim__ema_decay=0.9, optim__clip_norm=1.0, model__dropout=0.1)
    config = changed(config, compute__device="cuda", model__name="resnet9")
    return changed(config, run__processes=1)  # however many GPUs there are


def trained_weights(config, **knobs):
    """The weights that a run with other values of some options ends with."""
    train(changed(config, **knobs))
    return last(changed(config, **knobs))["model"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["resnet9", *{"airbench"} & models_by_name().keys()])
def test_a_run_ends_well_in_every_precision(on_gpu, name, precision, compiled):
    config = changed(on_gpu, model__name=name, model__width=8, precision=precision)
    weights = trained_weights(config, compute__compile=compiled)
    assert all(tensor.isfinite().all() for tensor in weights.values())


def train_without_waits(monkeypatch, config):
    """Train an epoch; from its third step on, neither loading nor a step may wait for the GPU."""
    batches = TrainData.batches

    def watched(data, start, stop):
        for step, batch in enumerate(batches(data, start, stop), start=1):
            # The first two steps tune and allocate, the last one logs and evaluates.
            torch.cuda.set_sync_debug_mode("error" if 2 <= step < stop - 1 else "default")
            yield batch
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainData, "batches", watched)
    config = changed(config, run__log_every_steps=100, run__evaluate_every_epochs=100.0, epochs=1)
    try:
        train(config)
    finally:
        torch.cuda.set_sync_debug_mode("default")


allow_sync_debug = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
EVERYTHING = GROWING | {"precision": "fp16", "augment__flip": "alternating"}
EVERYTHING |= {"optim__accumulate": 2, "optim__label_smoothing": 0.1, "optim__freeze_bn": True}
EVERYTHING |= {"compute__channels_last": False}
EVERYTHING |= {"augment__crop": "resized"} if find_tool("crops", "device-crops") else {}
EVERYTHING |= {"data__balance": "loss"} if find_tool("order", "balance") else {}


@allow_sync_debug
@pytest.mark.parametrize("where", ["device", "host", "stream"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_neither_loading_nor_a_step_waits_for_the_device(on_gpu, monkeypatch, where, name):
    config = changed(on_gpu, data__where=where, optim__name=name, data__limit=160, data__workers=2)
    train_without_waits(monkeypatch, changed(config, precision="bf16"))


@allow_sync_debug
@pytest.mark.parametrize("where", ["device", "stream"])
def test_no_option_makes_a_step_wait_for_the_device(on_gpu, monkeypatch, where):
    config = changed(on_gpu, data__where=where, data__limit=160, data__workers=2, **EVERYTHING)
    train_without_waits(monkeypatch, config)


@allow_sync_debug
def test_several_labels_are_learned_without_a_wait(on_gpu, monkeypatch):
    monkeypatch.setitem(DATASETS, "noise", of_several)
    config = changed(on_gpu, data__name="noise", model__task="multi-label", data__batch_size=8)
    train_without_waits(monkeypatch, config)


@allow_sync_debug
def test_a_step_does_not_wait_for_a_teacher(on_gpu, photos, monkeypatch):
    if find_tool("loss", "distill") is None:
        pytest.skip("deleted")
    teacher = untrained_run(changed(on_gpu, run__dir=f"{on_gpu.run.dir}-teacher"), photos)
    config = changed(on_gpu, data__name="folder", data__root=str(photos), data__batch_size=2)
    train_without_waits(monkeypatch, changed(config, optim__teacher=teacher))


@allow_sync_debug
@pytest.mark.parametrize(("where", "load"), [("device", "_resident"), ("host", "_gathered")])
def test_loading_that_waits_for_the_device_is_found(on_gpu, monkeypatch, where, load):
    read_after(monkeypatch, TrainData, load)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        train_without_waits(monkeypatch, changed(on_gpu, data__where=where, data__limit=160))


@allow_sync_debug
def test_a_step_that_waits_for_the_device_is_found(on_gpu, monkeypatch):
    plant(monkeypatch, lambda step, loss: loss * loss.item() / loss.item() if step > 3 else loss)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        train_without_waits(monkeypatch, changed(on_gpu, data__limit=160))


@pytest.fixture
def digests(on_photos):
    """A function from a device and a number of workers to sums over each of many batches."""
    config = changed(on_photos, data__image_size=32, data__batch_size=12, augment__crop="resized")

    def digests_on(device, workers):
        data = TrainData(changed(config, data__workers=workers), World(device))
        factors = torch.arange(1, 3 * 12 * 32**2 + 1, device=device).view(12, 3, 32, 32)
        is_gpu = device.type == "cuda"
        bus = torch.cuda.Stream() if is_gpu else nullcontext()
        loads = [torch.empty(2**24).pin_memory() for _ in range(8 * is_gpu)]
        found = []
        with closing(data):
            for batch in data.batches(0, 500):
                # Half a GB in the queue of the bus: the next batch is copied long after it is told
                # to be, and workers are done with others by then.
                with torch.cuda.stream(bus) if is_gpu else bus:
                    for load in loads:
                        load.to(device, non_blocking=True)
                numbers = (batch.images * factors).sum(), batch.labels.sum(), batch.indices.sum()
                found.append(torch.stack(numbers))
        return torch.stack(found).tolist()

    return digests_on


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_streamed_batches_arrive_to_the_last_byte_while_the_bus_is_busy(digests, workers):
    assert digests(GPU, workers) == digests(torch.device("cpu"), workers=2)


def test_a_batch_that_is_overwritten_before_it_was_copied_would_be_found(digests, monkeypatch):
    monkeypatch.setattr(torch.cuda.Event, "synchronize", Mock())
    assert digests(GPU, 16) != digests(torch.device("cpu"), workers=2)


@pytest.mark.parametrize("is_refused", [False, True])
def test_batches_are_copied_out_of_page_locked_memory(on_gpu, monkeypatch, capsys, is_refused):
    batch_module.warn_not_pinned.cache_clear()
    if is_refused:  # which would be found
        monkeypatch.setattr(shared_memory, "page_lock", lambda _: False)
    train(changed(on_gpu, data__where="stream", data__workers=2))
    assert ("batches are not page-locked" in capsys.readouterr().out) == is_refused


@pytest.mark.parametrize("has_one_stream", [True, False])
def test_evaluations_share_the_memory_of_their_copies(on_gpu, monkeypatch, has_one_stream):
    if not has_one_stream:  # torch keeps memory for each, which would be found
        monkeypatch.setattr(batch_module, "copy_stream", torch.cuda.Stream)
    config = changed(on_gpu, data__where="stream", data__workers=2)
    gc.collect()
    torch.cuda.empty_cache()
    reserved = []
    with closing(EvalData(config.data, "val", World(GPU))) as data:
        for _ in range(9):
            list(data.batches())
            reserved.append(torch.cuda.memory_reserved())
    assert (reserved[-1] == reserved[1]) == has_one_stream


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deterministic_run_repeats_and_resumes_to_the_last_bit_wherever_its_images_are(
    on_gpu, tmp_path, precision
):
    exact = changed(on_gpu, deterministic=True, precision=precision, data__workers=2)
    assert_resumes_wherever_its_images_are(exact, tmp_path)


def test_a_run_that_resumes_without_its_momentum_would_be_found(on_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(state_module, "load_optimizer", Mock())
    with pytest.raises(AssertionError):
        assert_resumes_wherever_its_images_are(changed(on_gpu, deterministic=True), tmp_path)


def assert_resumes_wherever_its_images_are(exact, tmp_path):
    """A run that was interrupted ends with the weights of unbroken ones, to the last bit."""
    exact = changed(exact, run__evaluate_every_epochs=0.25)  # and saves each step
    train_until(exact, 3, kill=False)
    resumed = trained_weights(exact)
    for where in ("device", "host", "stream"):
        other = trained_weights(exact, data__where=where, run__dir=str(tmp_path / where))
        assert_same(resumed, other)


def test_a_loss_that_is_not_finite_is_found_on_the_device(on_gpu, monkeypatch):
    plant(monkeypatch, lambda step, loss: loss * (float("nan") if step == 3 else 1))
    with pytest.raises(FaultError, match="the loss is not finite in steps"):
        train(on_gpu)


def test_fp16_skips_a_step_that_overflows_and_resumes_with_its_scale(on_gpu, monkeypatch, tmp_path):
    half = changed(on_gpu, precision="fp16", deterministic=True, run__evaluate_every_epochs=0.25)
    plant(monkeypatch, lambda step, loss: loss * (1e30 if step == 3 else 1))
    after = []
    advance = TrainState.advance

    def noting(state):
        after.append([weight.detach().clone() for weight in state.model.parameters()])
        advance(state)

    monkeypatch.setattr(TrainState, "advance", noting)
    whole, broken = half, changed(half, run__dir=str(tmp_path / "broken"))
    plain = changed(half, run__dir=str(tmp_path / "plain"))
    train(whole)
    assert all(map(torch.equal, after[1], after[2]))
    train_until(broken, 4, kill=False)
    monkeypatch.undo()
    train(broken)
    train(plain)
    assert last(whole)["scaler"]["scale"] == last(plain)["scaler"]["scale"] / 2
    assert_same(last(whole), last(broken))


def test_photographs_train_on_the_device(on_gpu, photos):
    config = changed(on_gpu, data__name="folder", data__root=str(photos), data__batch_size=4)
    train(changed(config, augment__crop="resized"))


def test_a_gpu_with_too_little_memory_trains_in_smaller_micro_batches(on_gpu, monkeypatch, capsys):
    # Without norms over a batch, its parts have the loss of the whole.
    config = changed(on_gpu, model__name="resnet9_gn", model__width=128, data__limit=128)
    # Or cuDNN takes memory to try its algorithms.
    config = changed(config, deterministic=True, data__batch_size=128, model__dropout=0.0)
    monkeypatch.setenv("RUN_RESTARTS", "0")  # which a restart changes

    def peak(parts):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = changed(config, optim__accumulate=parts, run__dir=f"{config.run.dir}-{parts}")
        return train(run).value("loss"), torch.cuda.max_memory_reserved()

    (loss, whole), (_, less) = peak(1), peak(8)
    total = torch.cuda.get_device_properties(0).total_memory
    most = (whole + less) // 2
    # As a GPU of so much memory says it; and what a lack of it leaves in torch's cache is not free.
    rest = lambda *_: (max(0, most - torch.cuda.memory_reserved()), most)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", rest)
    scores = []
    capsys.readouterr()
    try:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(most / total)
        run_in_processes(lambda: scores.append(train(config)), config.run, config.compute)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    printed = capsys.readouterr()
    assert "started again from the last save with" in printed.err
    assert printed.out.count("images: device: ") == printed.err.count("started again") + 1
    assert abs(scores[0].value("loss") - loss) < 0.01


@pytest.mark.parametrize(("is_kept", "places"), [(False, "device device"), (True, "device host")])
def test_images_of_a_third_of_a_gpu_are_on_it_again_after_its_memory_ran_out(
    on_gpu, monkeypatch, capsys, is_kept, places
):
    def black(_, split):
        count = 2**17 if split == "train" else 64
        return Source(
            torch.arange(count) % 10, tuple("abcdefghij"), torch.zeros(count, 32, 32, 3).byte()
        )

    monkeypatch.setitem(DATASETS, "black", black)
    config = changed(on_gpu, data__name="black", data__limit=0, optim__warmup_epochs=0)
    config = changed(config, epochs=2**-11)  # four steps
    if is_kept:  # the images of the first attempt, which would be found
        kept = []
        monkeypatch.setattr(TrainData, "close", lambda data: kept.append(data.pixels))
    lack_memory(monkeypatch, most=8, first=2, error=torch.OutOfMemoryError)  # a new one
    monkeypatch.setenv("RUN_RESTARTS", "0")  # which a restart changes
    gc.collect()
    torch.cuda.empty_cache()
    most = torch.cuda.memory_allocated() + 2**17 * 32 * 32 * 3 * 10 // 3
    rest = lambda *_: (most - torch.cuda.memory_reserved(), most)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", rest)
    run_in_processes(lambda: train(config), config.run, config.compute)
    assert re.findall(r"images: (\w+):", capsys.readouterr().out) == places.split()


@pytest.mark.parametrize("where", ["device", "host", "stream"])
def test_numbers_of_16_bits_arrive_as_on_a_cpu(config, satellite, where):
    config = on_deep(config, satellite, 5, data__where=where, data__workers=2, augment__crop="pad")

    def arrived(device):
        with closing(TrainData(config, World(device))) as data:
            return torch.cat([batch.images.float().cpu() for batch in data.batches(0, 3)])

    assert torch.equal(arrived(GPU), arrived(torch.device("cpu")))


def test_every_command_takes_the_gpu_by_itself(tmp_path, photos, capsys):
    run, image = str(tmp_path / "run"), str(photos / "val" / "ant" / "12.jpg")
    best = f"{run}/checkpoints/best.pt"
    data = ["--data.root", str(photos), "--data.image-size", "64", "--data.batch-size", "4"]
    data += ["--model.name", "resnet9", "--model.width", "8", "--run.processes", "1"]
    train_words = ["train", "folder", "--epochs", "2", "--run.dir", run, *data]
    each = (
        train_words,
        ["evaluate", run],
        ["predict", run, image, "--out", f"{tmp_path}/labels.csv"],
        ["export", run, "--format", "safetensors"],
        ["compare", run, run],
        ["find-batch", "folder", "--run.dir", f"{run}-batch", *data],
        ["probe", "folder", "--run.init-from", best, "--run.dir", f"{run}-probe", *data],
    )
    for words in (words for words in each if words[0] in commands()):
        torch.cuda.reset_peak_memory_stats()
        capsys.readouterr()
        assert main(words) == 0, words
        took_gpu = torch.cuda.max_memory_allocated() > 0
        assert took_gpu or words[0] == "compare", capsys.readouterr()


@pytest.mark.skipif(not reporter, reason="tools/report was deleted")
@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("name", ["resnet9", "swin_t"])
def test_a_deterministic_run_leaves_its_report(on_gpu, name, capsys):
    # So large that it has maps of what the network looked at.
    config = changed(on_gpu, deterministic=True, model__name=name, data__image_size=64)
    train(changed(config, **({"profile": True} if "profile" in of_tools() else {})))
    assert "cannot write" not in capsys.readouterr().out
    assert Path(config.run.dir, "report.html").exists()


def as_ranks(config):
    """A run of which two ranks learn what one learns."""
    config = changed(config, model__name="resnet9_gn", model__dropout=0.0)
    return changed(config, **mixed(mixup=0.0, cutmix=0.0))  # which are of images of a rank


def train_on_the_same_gpu(config):
    """Train as one of several ranks that share a GPU, which NCCL refuses and gloo does not."""
    distributed.choose_device = lambda *_: (GPU, "")
    dist.is_nccl_available = lambda: False
    train(config)


def test_ranks_on_a_gpu_learn_as_one_process(on_gpu, tmp_path):
    config = changed(as_ranks(on_gpu), optim__accumulate=2)
    alone = changed(config, run__dir=str(tmp_path / "alone"))
    run_ranks(2, train_on_the_same_gpu, config)
    run_ranks(1, train_on_the_same_gpu, alone)
    assert losses(config.run.dir) == pytest.approx(losses(alone.run.dir), rel=1e-2)


def talk_by_nccl(gradient_dtype):
    """3 x 2 by NCCL in a group of one, beside one of gloo; if gradients of DDP are those of bf16.

    They meet in a file without a name, as ranks on one machine do.
    """
    torch.cuda.set_device(GPU)
    with launch.meeting_place() as (variables, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv(*variables.popitem())
        store = distributed.open_store(0, 1, 1, timedelta(seconds=60))
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=GPU)
        beside = dist.new_group(backend="gloo")
        number = torch.full((1,), 3.0, device=GPU)
        # A sum over one rank would be the same without NCCL.
        dist.all_reduce(number, op=dist._make_nccl_premul_sum(2.0))
        dist.all_reduce(torch.ones(1), group=beside)
        model = build_model(ModelConfig(name="resnet9", width=8), 10, 32)
        model = model.to(GPU, memory_format=torch.channels_last)
        world = SimpleNamespace(size=2, device=GPU)
        ddp_model = Replicas(ComputeConfig(gradient_dtype=gradient_dtype), world).wrap(model)
        ddp_model.compile()
        images = torch.randn(16, 3, 32, 32, device=GPU)
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = ddp_model(images).square().mean()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters()]
        are_rounded = all(torch.equal(one, one.bfloat16().float()) for one in gradients)
        dist.destroy_process_group()
    return number.item(), are_rounded


@pytest.mark.parametrize(("gradient_dtype", "are_rounded"), [("bf16", True), ("fp32", False)])
def test_nccl_serves_a_group_beside_one_of_gloo(gradient_dtype, are_rounded):
    assert run_alone(talk_by_nccl, gradient_dtype) == (0, (6.0, are_rounded))


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_gpus
def test_two_gpus_learn_as_one(on_gpu, tmp_path):
    config = as_ranks(on_gpu)
    alone = changed(config, run__dir=str(tmp_path / "alone"))
    run_ranks(2, train, config)
    train(alone)
    assert losses(config.run.dir) == pytest.approx(losses(alone.run.dir), rel=1e-2)


@two_gpus
def test_an_error_on_one_gpu_ends_its_process_while_the_other_waits_for_it(tmp_path):
    ended_with, text = end_of_failing(NO_MEMORY[0], tmp_path)  # NCCL would wait for six minutes
    assert ended_with == EXIT_OUT_OF_MEMORY
    assert "rank 1: out of memory at step 2 with micro-batch " in text


# What each of two ranks runs; the second is killed in its first attempt.
RANK = """
import os, sys
from conftest import changed, tiny, train, train_until

config = changed(tiny(sys.argv[1]), compute__device="cuda", deterministic=True)
config = changed(config, run__evaluate_every_epochs=0.25)
is_killed = os.environ["RUN_RESTARTS"] == "0" and os.environ["RANK"] == "1"
train_until(config, 5) if is_killed else train(config)
"""


@two_gpus
def test_a_process_that_is_killed_on_one_gpu_starts_again_with_that_on_the_other(
    tmp_path, monkeypatch, capfd
):
    for name, restarts in (("broken", "0"), ("whole", "1")):
        words = [sys.executable, "-c", RANK, str(tmp_path / name)]
        monkeypatch.setattr(sys, "orig_argv", words)
        monkeypatch.setenv("RUN_RESTARTS", restarts)
        assert launch.launch(2) == 0
    assert "restart 1 of 3, from the last save" in capfd.readouterr().err
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
