"""The loop: it never waits for the device, and divides a batch without changing its gradients."""

import json
import os
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from conftest import after_each_step, changed, count_exchanges, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from image_classifier import train as train_module
from image_classifier.config import Config, OptimConfig
from image_classifier.data.loader import Batch, TrainData
from image_classifier.models import (
    load_best,
    read_checkpoint,
)
from image_classifier.optim import (
    build_loss,
    build_optimizer,
    build_schedule,
    orthogonal,
)
from image_classifier.precision import Precision
from image_classifier.runtime.seeding import seed_everything
from image_classifier.train import train
from image_classifier.train_state import TrainState

# What makes the host read a value that a GPU may not have computed yet.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
GOLDEN = [2.31165, 2.32053]  # validation losses of the tiny run


class Waits(TorchDispatchMode):
    """Names the operations that would have waited for the device, while it is `counting`."""

    def __init__(self) -> None:
        """Not counting yet."""
        super().__init__()
        self.counting, self.found = False, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Look at the operation, and do it."""
        name = func.overloadpacket.__name__
        if self.counting and name in WAITING:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def waits_in_the_loop(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that wait in a run's steps, apart from the last of each epoch, which logs."""
    batches = TrainData.batches

    def watched(data: TrainData, start: int, stop: int) -> Iterator[Batch]:
        waits.counting = True
        for step, batch in enumerate(batches(data, start, stop), start=1):
            waits.counting = step % data.steps_per_epoch != 0
            yield batch

    monkeypatch.setattr(TrainData, "batches", watched)
    with Waits() as waits:
        train(config)
    return waits.found


@pytest.fixture
def quiet(config: Config) -> Config:
    """A run with all that may happen in a step, and nothing beside it before the last."""
    return changed(
        config,
        optim__ema_decay=0.9,
        optim__clip_norm=1.0,
        optim__accumulate=2,
        augment__cutout=4,
        augment__mixup=0.2,
        model__dropout=0.1,
        run__log_every_steps=100,
        run__evaluate_every_epochs=100.0,
    )


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_no_step_waits_for_the_device(
    quiet: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert waits_in_the_loop(changed(quiet, optim__name=name), monkeypatch) == []


def test_a_planted_item_is_noticed(quiet: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    after_each_step(monkeypatch, lambda _, loss: loss.item())
    assert "_local_scalar_dense" in waits_in_the_loop(quiet, monkeypatch)


class Mark:
    """Something that is alive for as long as what holds it."""


def test_nothing_of_a_steps_graph_outlives_it(
    quiet: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: WeakSet[Mark] = WeakSet()
    alive, backward = [], Precision.backward

    def remember(precision: Precision, loss: torch.Tensor) -> None:
        alive.append(len(graphs))
        ahead = [loss.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is not None and not hasattr(node, "variable"):
                node.metadata["mark"] = mark = Mark()
                graphs.add(mark)
                ahead += [following for following, _ in node.next_functions]
        assert len(graphs) > 20
        backward(precision, loss)

    monkeypatch.setattr(Precision, "backward", remember)
    train(quiet)
    assert alive == [0] * 16


def test_each_step_has_its_learning_rate(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    step = Precision.step

    def look(precision: Precision, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        rates.append([group["lr"] for group in optimizer.param_groups])
        return step(precision, optimizer)

    monkeypatch.setattr(Precision, "step", look)
    train(config)
    lr_at = build_schedule(config.optim, steps_per_epoch=4, total_steps=8)
    assert rates == [[lr_at(step)] * 2 for step in range(8)]


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(config: Config) -> None:
    optim = changed(config, optim__clip_norm=0.5, optim__momentum=0.0, optim__lr=1.0).optim
    model = torch.nn.Linear(3, 3, bias=False)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(replace(optim, weight_decay=0.0), model)
    precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
    precision.backward(100 * model.weight.sum())
    precision.step(optimizer)
    assert (model.weight.detach() - before).norm() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_forward_pass_is_in_the_chosen_precision(config: Config, name: str) -> None:
    precision = Precision(name, config.compute, config.optim, torch.device("cpu"))
    model = torch.nn.Conv2d(3, 4, 3)
    with precision.autocast():
        assert model(torch.zeros(1, 3, 4, 4)).dtype == precision.dtype
    assert model.weight.dtype == torch.float32


@pytest.fixture
def restored_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch's process-wide settings after a test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for name in ("benchmark", "deterministic", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    precision, fill = (
        torch.get_float32_matmul_precision(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.usefixtures("restored_switches")
@pytest.mark.parametrize("is_on", [False, True])
def test_switches_of_a_gpu_are_set_for_speed(config: Config, is_on: bool) -> None:
    torch.use_deterministic_algorithms(not is_on)
    Precision("fp32", config.compute, config.optim, torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.benchmark == is_on  # it may choose otherwise each time


@pytest.mark.usefixtures("restored_switches")
def test_kernels_repeat_themselves_where_that_is_asked_for() -> None:
    torch.backends.cudnn.benchmark = True
    seed_everything(0, True, torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_and_weights_share_a_memory_layout(
    config: Config, monkeypatch: pytest.MonkeyPatch, channels_last: bool
) -> None:
    layouts = set()
    forward = torch.nn.Conv2d.forward

    def look(layer: torch.nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        if images.shape[1] == 3 and len(images) > 1:  # FLOPs are counted with a single one
            wanted = torch.channels_last if channels_last else torch.contiguous_format
            layouts.add(images.is_contiguous(memory_format=wanted))
            layouts.add(layer.weight.is_contiguous(memory_format=wanted))
        return forward(layer, images)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", look)
    train(changed(config, compute__channels_last=channels_last))
    assert layouts == {True}


def test_labels_are_smoothed(config: Config) -> None:
    logits, labels = torch.tensor([[4.0, 0.0]]), torch.tensor([0])
    plain = build_loss(config.optim, 1)(logits, labels)
    smooth = build_loss(replace(config.optim, label_smoothing=0.2), 1)(logits, labels)
    wrong = build_loss(config.optim, 1)(logits, 1 - labels)
    assert float(smooth) == pytest.approx(0.9 * float(plain) + 0.1 * float(wrong))


def test_the_averaged_weights_are_what_is_evaluated_and_kept(config: Config) -> None:
    config = changed(config, optim__ema_decay=0.9)
    train(config)
    folder = Path(config.run.dir, "checkpoints")
    saved = read_checkpoint(folder / "best.pt")["state"]
    best = load_best(folder / "best.pt").weights
    assert all(torch.equal(tensor, saved["ema"][name]) for name, tensor in best.items())
    assert not torch.equal(saved["ema"]["head.weight"], saved["model"]["head.weight"])


def test_the_best_is_the_best(config: Config) -> None:
    precision = Precision("fp32", config.compute, config.optim, torch.device("cpu"))
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(config.optim, model)
    state = TrainState(model, optimizer, precision)
    found = []
    for top1 in (0.2, 0.5, 0.4, 0.5, 0.6):
        state.advance()
        state.record(top1)
        found.append(state.is_best)
    assert found == [True, True, False, False, True]


def test_muon_moves_all_directions_alike() -> None:
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix @ torch.diag(torch.linspace(0.1, 9, 20))))
    assert 0.6 < values.min() < values.max() < 1.3


def test_the_smoke_run_learns_what_it_always_learned(finished: Config) -> None:
    rows = Path(finished.run.dir, "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row).get("val/loss") for row in rows]
    # A change that is to change nothing must leave these; other processors round differently.
    assert [loss for loss in losses if loss] == pytest.approx(GOLDEN, rel=2e-3)


def trained_weights(config: Config) -> dict[str, torch.Tensor]:
    """The weights after a run, from memory."""
    states: list[TrainState] = []

    def remember(*arguments: object) -> TrainState:
        states.append(TrainState(*arguments))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "TrainState", remember)
        train(config)
    return {name: tensor.clone() for name, tensor in states[0].model.state_dict().items()}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Equal but for rounding."""
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.fixture
def one_step(config: Config) -> Config:
    """A single step of plain gradient descent: the change of the weights is their gradient."""
    return changed(
        config,
        optim__momentum=0.0,
        optim__weight_decay=0.0,
        optim__warmup_epochs=0.0,
        optim__lr=0.1,
        epochs=0.25,
    )


def test_accumulation_is_a_large_batch(one_step: Config) -> None:
    whole = trained_weights(one_step)
    assert_close(trained_weights(changed(one_step, run__fresh=True, optim__accumulate=4)), whole)


def test_the_seed_decides_the_weights_that_a_run_begins_with(one_step: Config) -> None:
    begun = changed(one_step, optim__lr=0.0)
    weights = [
        trained_weights(changed(begun, run__fresh=True, seed=seed))["head.weight"]
        for seed in (1, 2, 1)
    ]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.are_deterministic_algorithms_enabled()


def trained_and_counted(config: Config) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights after a run, and how often its ranks exchanged gradients."""
    exchanges = count_exchanges()
    return trained_weights(config), exchanges


def test_gradients_of_two_ranks_are_those_of_one_process(one_step: Config) -> None:
    whole = trained_weights(one_step)
    divided = changed(one_step, run__fresh=True, optim__accumulate=4)
    (parts, exchanges), (other_parts, _) = run_ranks(2, trained_and_counted, divided)
    assert exchanges == [1]  # one in a step, in however many micro-batches
    undivided = run_ranks(2, trained_weights, changed(one_step, run__fresh=True))
    for one, other in ((parts, other_parts), undivided):
        assert_close(one, whole)
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name])


def test_norms_and_biases_do_not_decay() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2)
    )
    optimizer = build_optimizer(Config().optim, model)
    decaying, others = optimizer.param_groups
    assert [weight.ndim for weight in decaying["params"]] == [4, 2]
    assert decaying["weight_decay"] > 0 == others["weight_decay"]
    assert len(others["params"]) == 4


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_rises_then_falls_to_nothing(schedule: str) -> None:
    optim = replace(Config().optim, lr=1.0, warmup_epochs=2.0, schedule=schedule)
    lr_at = build_schedule(optim, steps_per_epoch=10, total_steps=100)
    rates = [lr_at(step) for step in range(101)]
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[20] == 1.0 > rates[99] > rates[100] == pytest.approx(0.0)
    assert rates[0] > 0


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_every_optimizer_learns(config: Config, name: str) -> None:
    lr = {"sgd": 0.05, "adamw": 3e-3, "muon": 3e-3}[name]
    config = changed(config, data__limit=128, augment__flip="none", augment__crop="none")
    config = changed(config, epochs=12, optim__name=name, optim__lr=lr)
    losses: list[float] = []
    loss_of = build_loss(config.optim, 32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 32), torch.nn.ReLU())
        model.append(torch.nn.Linear(32, 32)).append(torch.nn.Linear(32, 4))
        inputs, labels = torch.randn(32, 3, 2, 2), torch.arange(32) % 4
    optimizer = build_optimizer(config.optim, model)
    precision = Precision("fp32", config.compute, config.optim, torch.device("cpu"))
    for _ in range(60):
        loss = loss_of(model(inputs), labels)
        precision.backward(loss)
        precision.step(optimizer)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


def averaging(model: torch.nn.Module, optim: OptimConfig, precision: Precision) -> TrainState:
    """The state of a run that averages its weights."""
    ema = deepcopy(model).requires_grad_(False)
    return TrainState(model, build_optimizer(optim, model), precision, ema, optim.ema_decay)


def test_averaged_weights_follow_the_model(config: Config) -> None:
    model = torch.nn.Linear(2, 2)
    optim = changed(config, optim__ema_decay=0.5).optim
    precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
    state = averaging(model, optim, precision)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    for _ in range(30):
        state.advance()
    assert not torch.equal(state.best_model.weight, before)
    torch.testing.assert_close(state.best_model.weight, model.weight.detach())
    assert not state.best_model.weight.requires_grad


@pytest.mark.parametrize("steps", [20, 100, 400])
def test_the_window_of_averaged_weights_shrinks_with_a_short_run(
    config: Config, steps: int
) -> None:
    model = torch.nn.Linear(1, 1)
    optim = changed(config, optim__ema_decay=0.9999).optim
    precision = Precision("fp32", config.compute, optim, torch.device("cpu"))
    state = averaging(model, optim, precision)
    for step in range(1, steps + 1):
        with torch.no_grad():
            model.weight.fill_(float(step))
        state.advance()
    lag = steps - float(state.best_model.weight.detach())  # of the average behind the weights
    assert 0 < lag < steps / 9


class Short(torch.nn.Module):
    """A network that is traced in no time."""

    def __init__(self) -> None:
        """With random weights."""
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) -> (batch, 10) logits."""
        return self.head(self.conv(images).relu().mean((2, 3)))


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_later_epochs_compile_nothing_anew(
    config: Config, monkeypatch: pytest.MonkeyPatch, ema_decay: float
) -> None:
    from torch._dynamo.utils import counters

    from image_classifier import train as story

    compile_module, evaluate = torch.nn.Module.compile, story.evaluate
    graphs = []

    def evaluate_and_count(*arguments: object) -> object:
        scores = evaluate(*arguments)
        graphs.append(counters["stats"]["unique_graphs"])
        return scores

    # As any backend would, but without minutes of compiling.
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module: compile_module(module, backend="eager")
    )
    monkeypatch.setattr(story, "evaluate", evaluate_and_count)
    monkeypatch.setattr(story, "build_model", lambda *_, **__: Short())
    counters.clear()
    torch._dynamo.reset()  # what it knows of sizes that change
    # 68 images: the last batch of an evaluation is smaller than the others.
    config = changed(config, epochs=3, data__limit=68, optim__ema_decay=ema_decay)
    story.train(changed(config, compute__compile=True))
    assert graphs == [3, 3, 3]  # training, evaluation, and evaluation of any number of images
