"""The loop never waits for the device, and divides a batch without changing its gradients."""

import json
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from conftest import changed, count_exchanges, run_alone, run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from image_classifier import train as train_module
from image_classifier.config import Config
from image_classifier.data.loader import TrainData
from image_classifier.models import read_checkpoint
from image_classifier.optim import (
    build_loss,
    build_optimizer,
    build_schedule,
    orthogonal,
)
from image_classifier.precision import Precision
from image_classifier.runtime.seeding import seed_everything
from image_classifier.train import init_model, train
from image_classifier.train_state import TrainState

CPU = torch.device("cpu")
# Operations that make the host read a value which a GPU may not have computed yet.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
GOLDEN = [2.31165, 2.32053]  # validation losses of the tiny run


class Waits(TorchDispatchMode):
    """Names the operations that would have waited for the device, by whether it is in a step."""

    in_step = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Look at the operation, and do it."""
        if (name := func.overloadpacket.__name__) in WAITING:
            self.found[self.in_step].append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def quiet(config):
    """One epoch with all that may happen in a step, and nothing beside it before the last."""
    return changed(
        config,
        epochs=1,
        optim__warmup_epochs=0.5,
        optim__ema_decay=0.9,
        optim__clip_norm=1.0,
        optim__accumulate=2,
        augment__cutout=4,
        augment__mixup=0.2,
        model__dropout=0.1,
        run__log_every_steps=100,
    )


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_no_step_waits_for_the_device(quiet, monkeypatch, name):
    batches = TrainData.batches

    def watched(data, start, stop):
        for step, batch in enumerate(batches(data, start, stop), start=1):
            waits.in_step = step < stop  # the last logs and evaluates
            yield batch
        waits.in_step = False

    monkeypatch.setattr(TrainData, "batches", watched)
    with Waits() as waits:
        waits.found = {True: [], False: []}
        train(changed(quiet, optim__name=name))
    assert waits.found[True] == []
    assert waits.found[False]  # so it does find them


class Mark:
    """Something that is alive for as long as what holds it."""


def test_each_step_has_its_learning_rate_and_no_graph_outlives_it(quiet, monkeypatch):
    graphs = WeakSet()
    alive, rates, backward, step = [], [], Precision.backward, Precision.step

    def remember(precision, loss):
        alive.append(len(graphs))
        loss.grad_fn.metadata["mark"] = mark = Mark()
        graphs.add(mark)
        backward(precision, loss)

    def look(precision, optimizer):
        rates.append([group["lr"] for group in optimizer.param_groups])
        step(precision, optimizer)

    monkeypatch.setattr(Precision, "backward", remember)
    monkeypatch.setattr(Precision, "step", look)
    train(quiet)
    assert alive == [0] * 8  # two micro-batches in each of 4 steps
    lr_at = build_schedule(quiet.optim, steps_per_epoch=4, total_steps=4)
    assert rates == [[lr_at(step)] * 2 for step in range(4)]


@pytest.mark.parametrize(("schedule", "at_40"), [("cosine", 0.853553), ("linear", 0.75)])
def test_the_learning_rate_rises_then_falls_to_nothing(schedule, at_40):
    optim = replace(Config().optim, lr=1.0, warmup_epochs=2.0, schedule=schedule)
    lr_at = build_schedule(optim, steps_per_epoch=10, total_steps=100)
    rates = [lr_at(step) for step in range(101)]
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[0] < 1.0 == rates[20] > rates[99] > rates[100] == pytest.approx(0.0)
    assert rates[40] == pytest.approx(at_40)


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(config):
    optim = replace(config.optim, clip_norm=0.5, momentum=0.0, lr=1.0, weight_decay=0.0)
    model = nn.Linear(3, 3, bias=False)
    before = model.weight.detach().clone()
    precision = Precision("fp32", config.compute, optim, CPU)
    optimizer = build_optimizer(optim, model)
    precision.backward(100 * model.weight.sum())
    precision.step(optimizer)
    assert (model.weight.detach() - before).norm() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_forward_pass_is_in_the_chosen_precision(config, name):
    precision, model = Precision(name, config.compute, config.optim, CPU), nn.Conv2d(3, 4, 3)
    with precision.autocast():
        assert model(torch.zeros(1, 3, 4, 4)).dtype == precision.dtype
    assert model.weight.dtype == torch.float32


def gpu_settings(config):
    """What torch is told about a GPU: matrix products, TF32, choice of kernels, determinism."""
    seed_everything(0, config.deterministic, torch.device("cuda"))
    Precision("fp32", config.compute, config.optim, torch.device("cuda"))
    cudnn, workspace = torch.backends.cudnn, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    exact = torch.are_deterministic_algorithms_enabled()
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, exact, workspace


def test_a_gpu_is_set_for_speed_and_repeats_its_kernels_where_asked(config):
    fast, exact = (run_alone(gpu_settings, changed(config, deterministic=d)) for d in (False, True))
    assert fast == (0, ("high", True, True, False, None))
    assert exact == (0, ("high", True, False, True, ":4096:8"))


@pytest.fixture
def one_step(config):
    """A single step of plain gradient descent: the change of the weights is their gradient."""
    return changed(
        config,
        optim__momentum=0.0,
        optim__weight_decay=0.0,
        optim__warmup_epochs=0.0,
        optim__lr=0.1,
        epochs=0.25,
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_and_weights_share_a_memory_layout(one_step, monkeypatch, channels_last):
    layouts, forward = set(), nn.Conv2d.forward
    wanted = torch.channels_last if channels_last else torch.contiguous_format

    def look(layer, images):
        if images.shape[1] == 3 and len(images) > 1:  # FLOPs are counted with a single one
            pair = (images, layer.weight)
            layouts.update(tensor.is_contiguous(memory_format=wanted) for tensor in pair)
        return forward(layer, images)

    monkeypatch.setattr(nn.Conv2d, "forward", look)
    train(changed(one_step, compute__channels_last=channels_last))
    assert layouts == {True}


def test_the_smoke_run_learns_what_it_always_learned(trained_once):
    rows = map(json.loads, (trained_once / "metrics.jsonl").read_text().splitlines())
    # A change that is to change nothing must leave these; other processors round differently.
    found = [row["val/loss"] for row in rows if "val/loss" in row]
    assert found == pytest.approx(GOLDEN, rel=2e-3)


def trained_weights(config):
    """The weights after a run, from memory."""
    states = []
    build = lambda *arguments: states.append(TrainState(*arguments)) or states[-1]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "TrainState", build)
        train(config)
    return {name: tensor.clone() for name, tensor in states[0].model.state_dict().items()}


def trained_and_counted(config):
    """The weights after a run, and how often its ranks exchanged gradients."""
    exchanges = count_exchanges()
    return trained_weights(config), exchanges


def test_accumulated_gradients_and_those_of_ranks_are_those_of_the_whole_batch(one_step):
    whole = trained_weights(one_step)
    divided = changed(one_step, run__fresh=True, optim__accumulate=4)
    (one, exchanges), (other, _) = run_ranks(2, trained_and_counted, divided)
    assert exchanges == [1]  # one in a step, in however many micro-batches
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    for parts in (trained_weights(divided), one):
        torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-5)


def test_the_seed_decides_the_weights_that_a_run_begins_with(config):
    data = SimpleNamespace(num_classes=10)
    one, other, again = (
        init_model(changed(config, seed=seed), data, None).head.weight for seed in (1, 2, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("name", "lr"), [("sgd", 0.05), ("adamw", 3e-3), ("muon", 3e-3)])
def test_every_optimizer_learns(config, name, lr):
    optim = replace(config.optim, name=name, lr=lr)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
        inputs, labels = torch.randn(32, 12), torch.arange(32) % 4
    loss_of, losses = build_loss(optim, 32), []
    precision = Precision("fp32", config.compute, optim, CPU)
    optimizer = build_optimizer(optim, model)
    for _ in range(60):
        losses.append(loss_of(model(inputs), labels))
        precision.backward(losses[-1])
        precision.step(optimizer)
    assert losses[-1] < losses[0] / 2


def test_muon_moves_all_directions_alike():
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix @ torch.diag(torch.linspace(0.1, 9, 20))))
    assert 0.6 < values.min() < values.max() < 1.3


def new_state(optim, model):
    """The state of a run that averages its weights."""
    precision = Precision("fp32", Config().compute, optim, CPU)
    ema = deepcopy(model).requires_grad_(False)
    return TrainState(model, build_optimizer(optim, model), precision, ema, optim.ema_decay)


def test_the_moving_average_follows_with_a_window_that_grows():
    model, expected, average = nn.BatchNorm1d(1), [1.0], []
    state = new_state(replace(Config().optim, ema_decay=0.9), model)
    for step in range(1, 200):
        with torch.no_grad():
            model.weight.fill_(float(step))
            model.num_batches_tracked.fill_(step)
        state.advance()
        decay = min(0.9, (1 + step) / (10 + step))
        expected.append(decay * expected[-1] + (1 - decay) * step)
        average.append(float(state.best_model.weight))
    assert average == pytest.approx(expected[1:], rel=1e-5)
    assert state.best_model.num_batches_tracked == 199


def test_the_averaged_weights_are_kept(one_step):
    config = changed(one_step, optim__ema_decay=0.9)
    train(config)
    path = Path(config.run.dir, "checkpoints", "best.pt")
    saved, kept = read_checkpoint(path)["state"], load_file(path.with_suffix(".safetensors"))
    assert all(torch.equal(tensor, saved["ema"][name]) for name, tensor in kept.items())
    assert not torch.equal(saved["ema"]["head.weight"], saved["model"]["head.weight"])


def test_the_best_is_the_first_with_the_highest_top1():
    state, found = new_state(Config().optim, nn.Linear(2, 2)), []
    for top1 in (0.2, 0.5, 0.4, 0.5, 0.6):
        state.advance()
        state.record(top1)
        found.append(state.is_best)
    assert found == [True, True, False, False, True]


def test_later_epochs_compile_nothing_anew(config, monkeypatch):
    from torch._dynamo.utils import counters

    compile_module, evaluate, graphs = nn.Module.compile, train_module.evaluate, []

    def evaluate_and_count(*arguments):
        scores = evaluate(*arguments)
        graphs.append(counters["stats"]["unique_graphs"])
        return scores

    # As any backend would, but without minutes of compiling.
    eager = lambda module: compile_module(module, backend="eager")  # noqa: E731
    monkeypatch.setattr(nn.Module, "compile", eager)
    monkeypatch.setattr(train_module, "evaluate", evaluate_and_count)
    model = lambda *_, **__: nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))  # noqa: E731
    monkeypatch.setattr(train_module, "build_model", model)
    counters.clear()
    torch._dynamo.reset()  # what it knows of sizes that change
    # 68 images: the last batch of an evaluation is smaller than the others.
    train(changed(config, epochs=3, data__limit=68, compute__compile=True))
    assert graphs == [3, 3, 3]  # training, evaluation, and evaluation of any number of images
