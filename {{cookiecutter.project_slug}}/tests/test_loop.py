"""The loop never waits for the device, and divides a batch without changing its gradients."""

import contextlib
import os
from copy import deepcopy
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from weakref import WeakSet

import pytest
import torch
from conftest import (
    after_each_step,
    changed,
    count_exchanges,
    logged,
    losses,
    mixed,
    run_alone,
    run_ranks,
)
from safetensors.torch import load_file
from test_resume import final
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from image_classifier import train as train_module
from image_classifier.checkpoints import saving as checkpoint
from image_classifier.config import OPTIMIZERS
from image_classifier.data import Augmented, Batch, loader
from image_classifier.data.loader import TrainData
from image_classifier.optim import (
    build_optimizer,
    build_schedule,
)
from image_classifier.precision import Precision
from image_classifier.runtime.distributed import World
from image_classifier.runtime.seeding import seed_everything
from image_classifier.tasks import Loss
from image_classifier.tracking import logger
from image_classifier.train import init_model, train

CPU = torch.device("cpu")
# Operations that make the host read a value which a GPU may not have computed yet.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")


class Waits(TorchDispatchMode):
    """Lists the operations that would have waited for the device, by the steps done before."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Look at the operation, and do it."""
        if (name := func.overloadpacket.__name__) in WAITING:
            self.found[self.step].append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def quiet(config):
    """One epoch with all that may happen in a step, and nothing beside it before the last."""
    config = changed(config, epochs=1, optim__warmup_epochs=0.5, run__log_every_steps=100)
    config = changed(config, optim__ema_decay=0.9, optim__clip_norm=1.0, optim__accumulate=2)
    return changed(config, model__dropout=0.1, **mixed(cutout=4, mixup=0.2))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_waits_for_the_device(quiet, monkeypatch, name):
    with Waits() as waits:
        waits.step, waits.found = 0, [[] for _ in range(5)]
        after_each_step(monkeypatch, lambda log, _: setattr(waits, "step", log.step_done))
        train(changed(quiet, optim__name=name))
    assert waits.found[1:4] == [[], [], []]
    assert waits.found[4]  # the last logs and evaluates: so it does find them


def test_no_graph_outlives_its_step(quiet, monkeypatch):
    graphs, alive, backward = WeakSet(), [], Precision.backward

    def remember(precision, loss):
        alive.append(len(graphs))
        loss.grad_fn.metadata["mark"] = mark = torch.zeros(())  # alive as long as what holds it
        graphs.add(mark)
        backward(precision, loss)

    monkeypatch.setattr(Precision, "backward", remember)
    train(quiet)
    assert alive == [0] * 8  # two micro-batches in each of 4 steps


@pytest.mark.parametrize(("schedule", "at_40"), [("cosine", 0.853553), ("linear", 0.75)])
def test_the_learning_rate_rises_then_falls_to_nothing(config, schedule, at_40):
    optim = replace(config.optim, lr=1.0, warmup_epochs=2.0, schedule=schedule)
    lr_at = build_schedule(optim, steps_per_epoch=10, total_steps=100)
    rates = [lr_at(step) for step in range(101)]
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[0] < 1.0 == rates[20] > rates[99] > rates[100] == pytest.approx(0.0)
    assert rates[40] == pytest.approx(at_40)


def gpu_settings(config, steps=10_000):
    """What torch is told about a GPU: matrix products, TF32, choice of kernels, determinism."""
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]  # of conftest.py
    seed_everything(0, config.deterministic, torch.device("cuda"))
    Precision("fp32", config.compute, config.optim, torch.device("cuda"), steps)
    Precision("fp32", config.compute, config.optim, torch.device("cuda"))  # of a teacher
    cudnn, workspace = torch.backends.cudnn, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    exact = torch.are_deterministic_algorithms_enabled()
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, exact, workspace


def test_a_gpu_is_set_for_speed_and_repeats_its_kernels_where_asked(config):
    fast, exact = (run_alone(gpu_settings, changed(config, deterministic=d)) for d in (False, True))
    assert fast == (0, ("high", True, True, False, None))
    assert exact == (0, ("high", True, False, True, ":4096:8"))


def exact_and_not():
    """Whether kernels are deterministic in a run after one that is."""
    for is_exact in (True, False):
        seed_everything(0, is_exact, torch.device("cpu"))
    return torch.are_deterministic_algorithms_enabled()


def test_a_run_is_not_deterministic_because_one_before_it_was():
    assert run_alone(exact_and_not) == (0, False)


def test_a_short_run_does_not_begin_with_a_search_for_the_fastest_convolutions(config):
    code, settings = run_alone(gpu_settings, config, 500)
    assert code == 0
    assert settings[2] is False


@pytest.fixture
def one_step(config):
    """A single step of plain gradient descent: the change of the weights is their gradient."""
    config = changed(config, optim__warmup_epochs=0.0, epochs=0.25, optim__lr=0.1)
    return changed(config, optim__momentum=0.0, optim__weight_decay=0.0)


@pytest.mark.parametrize("is_scaled", [False, True])  # the loss, as fp16 needs it
def test_gradients_are_clipped_to_the_norm_that_was_asked_for(one_step, is_scaled):
    optim = replace(one_step.optim, lr=1.0, clip_norm=0.5)
    model = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(model.weight)
    precision = Precision("fp32", one_step.compute, optim, CPU)
    precision.scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
    precision.backward(100 * model.weight.sum())
    precision.step(build_optimizer(optim, model))
    assert model.weight.norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(("precision", "channels_last"), [("fp32", False), ("bf16", True)])
def test_layers_compute_in_the_chosen_precision_and_memory_layout(
    one_step, monkeypatch, precision, channels_last
):
    found, forward = set(), nn.Conv2d.forward
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def look(layer, images):
        features = forward(layer, images)
        # FLOPs are counted with a single image, heat maps need the gradients of images.
        if images.shape[1] == 3 and len(images) > 1 and not images.requires_grad:
            pair = (images, layer.weight)
            layouts = [tensor.is_contiguous(memory_format=layout) for tensor in pair]
            found.add((*layouts, layer.weight.dtype, features.dtype))
        return features

    monkeypatch.setattr(nn.Conv2d, "forward", look)
    train(changed(one_step, precision=precision, compute__channels_last=channels_last))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert found == {(True, True, torch.float32, dtype)}


def test_the_smoke_run_learns_what_it_always_learned(trained_once):
    # A change that is to change nothing must leave these; other processors round differently.
    golden = [2.4137, 2.31165, 2.2375, 2.3839, 2.32053]
    assert losses(trained_once) == pytest.approx(golden, rel=2e-3)


@pytest.mark.parametrize(("patience", "told"), [(0.0, (2, 3, 4, 6, 7, 8)), (1e9, (3, 4, 6, 8))])
def test_a_slow_run_says_how_far_it_is_between_its_rows(
    config, monkeypatch, capsys, patience, told
):
    monkeypatch.setattr(logger, "FIRST_LINE", patience)  # seconds
    monkeypatch.setattr(logger, "NEXT_LINE", patience)
    train(changed(config, run__log_every_steps=3))
    lines = [line for line in capsys.readouterr().out.splitlines() if " ETA " in line]
    assert [int(line[5]) for line in lines] == [*told]
    assert all("images/s" in line for line in lines)
    assert [row["step"] for row in logged(config.run.dir) if "train/loss" in row] == [3, 4, 6, 8]


def exchanges_of(config):
    """How often this rank exchanges gradients in a run."""
    exchanges = count_exchanges()
    train(config)
    return exchanges


def test_accumulated_gradients_and_those_of_ranks_are_those_of_the_whole_batch(one_step):
    whole = changed(one_step, run__fresh=True)
    divided = changed(whole, optim__accumulate=4)
    # One exchange in a step, in however many micro-batches.
    assert run_ranks(2, exchanges_of, divided) == [[1], [1]]
    of_ranks = final(divided)["state"]["model"]
    for config in (divided, whole):
        train(config)
        torch.testing.assert_close(final(config)["state"]["model"], of_ranks, rtol=1e-3, atol=1e-5)


def test_the_seed_decides_the_weights_the_order_and_the_augmentation_of_a_run(config):
    pixels = torch.randint(256, (16, 32, 32, 3)).byte()
    batch = Batch(pixels, torch.zeros(16).long(), torch.arange(16))

    def begun(seed):
        own = changed(config, seed=seed)
        with contextlib.closing(TrainData(own, World(CPU))) as data:
            training = train_module.Training(own, World(CPU), data, 16)
            augmented = training.augment(batch, 0).images
            return training.model.head.weight, data.indices_at(0), augmented

    for one, other, again in zip(*map(begun, (1, 2, 1)), strict=True):
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(config, name):
    optim = replace(config.optim, name=name, lr=0.05 if name == "sgd" else 3e-3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    inputs, labels, found = torch.randn(32, 12), torch.arange(32) % 4, []
    precision = Precision("fp32", config.compute, optim, CPU)
    optimizer = build_optimizer(optim, model)
    for _ in range(60):
        found.append(nn.functional.cross_entropy(model(inputs), labels))
        precision.backward(found[-1])
        precision.step(optimizer)
    assert found[-1] < found[0] / 2


THEIRS = {
    "sgd": partial(torch.optim.SGD, momentum=0.8, nesterov=True),
    "adamw": partial(torch.optim.AdamW, betas=(0.8, 0.999)),
}


@pytest.mark.parametrize("name", THEIRS)
def test_sgd_and_adamw_take_the_steps_of_torchs_with_the_same_options(config, name):
    optim = replace(config.optim, name=name, lr=0.1, momentum=0.8, weight_decay=0.3)
    ours = nn.Linear(3, 3, bias=False)
    theirs = deepcopy(ours)
    by_torch = THEIRS[name](theirs.parameters(), lr=0.1, weight_decay=0.3)
    for model, optimizer in ((ours, build_optimizer(optim, ours)), (theirs, by_torch)):
        for scale in (1.0, 3.0, 0.1):
            optimizer.zero_grad()
            (scale * model(torch.eye(3))).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_the_kept_weights_are_a_moving_average_with_a_window_that_grows(config, monkeypatch):
    monkeypatch.setattr(checkpoint, "KEEP", 9)
    config = changed(config, model__name="resnet9", optim__ema_decay=0.3)
    train(changed(config, run__evaluate_every_epochs=0.25))
    folder = Path(config.run.dir, "checkpoints")
    average = init_model(config, SimpleNamespace(num_classes=10), None).state_dict()
    for step in range(1, 9):
        state = checkpoint.read_checkpoint(folder / f"step_0000000{step}.pt")["state"]
        decay = min(0.3, (1 + step) / (10 + step))
        for name, weight in state["model"].items():
            is_count = not weight.is_floating_point()  # of batches, by a BatchNorm
            average[name] = weight if is_count else weight.lerp(average[name], decay)
        torch.testing.assert_close(state["ema"], dict(average))
    best = checkpoint.read_checkpoint(folder / "best.pt")["state"]["ema"]
    torch.testing.assert_close(load_file(folder / "best.safetensors"), best, rtol=0, atol=0)


def test_later_epochs_compile_nothing_anew(config, monkeypatch):
    from torch._dynamo.utils import counters

    class Flat(nn.Linear):  # torch 2.11 compiles none of its own layers by themselves
        def forward(self, images):
            return super().forward(images.flatten(1))

    def backend(graph, inputs):  # as any would, but without minutes of compiling
        sizes.extend(map(type, inputs))
        return graph.forward

    graphs, sizes = [], []
    monkeypatch.setattr(train_module, "build_model", lambda *_, **__: Flat(3072, 10))
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    after_each_step(monkeypatch, lambda *_: graphs.append(counters["stats"]["unique_graphs"]))
    counters.clear()
    torch._dynamo.reset()  # what it knows of sizes that change
    # 68 images: the last batch of an evaluation is smaller than the others.
    train(changed(config, epochs=3, data__limit=68, compute__compile=True))
    # Training; evaluation, and that of the last batch.
    assert graphs == [1] * 4 + [3] * 8
    assert counters["stats"]["unique_graphs"] == 3
    # A graph for any size takes minutes to compile where kernels are chosen for sizes.
    assert torch.SymInt not in sizes


def test_each_micro_batch_has_the_weights_of_its_images(config):
    model, given = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), []

    def loss_fn(logits, part):
        _, targets, weights = part
        given.append((targets.tolist(), (10 * weights).int().tolist()))
        return (logits.sum(1) * weights).sum()

    batch = Augmented(torch.ones(5, 3, 2, 2), torch.arange(5), torch.arange(5) / 2)
    precision = Precision("fp32", config.compute, config.optim, CPU)
    train_module.train_step(model, batch, Loss(loss_fn), precision, 2)
    assert given == [([0, 1], [0, 5]), ([2, 3], [10, 15]), ([4], [20])]


def test_each_step_of_each_rank_draws_anew_for_its_layers(config, monkeypatch):
    monkeypatch.setattr(train_module, "seed_layers", seeded := Mock())
    third = World(CPU, rank=2)
    with contextlib.closing(TrainData(config, World(CPU))) as data:
        training = train_module.Training(changed(config, seed=7), third, data, 16)
        training.begin()
        for loaded in data.batches(0, 2):
            training.step(loaded, 0.1, 16)
    assert [call.args[:3] for call in seeded.call_args_list] == [(7, 0, 2), (7, 1, 2)]


def test_waiting_is_counted_over_all_batches(config, monkeypatch):
    ticks = iter(range(100))
    with contextlib.closing(TrainData(config, World(CPU))) as data:
        monkeypatch.setattr(loader.time, "perf_counter", lambda: next(ticks))
        list(data.batches(0, 3))
    assert data.waited_seconds == 4  # the end is waited for, too
