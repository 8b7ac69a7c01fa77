"""LoRA: few weights learn, in any network, and what is saved fits the network without it."""

from argparse import Namespace
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import changed, logged, losses, run_ranks, train_until
from safetensors.torch import load_file
from torch import nn

from image_classifier.checkpoints import (
    PretrainedWeights,
    load_model,
)
from image_classifier.checkpoints.reading import (
    load_best,
    read_checkpoint,
)
from image_classifier.config import ModelConfig
from image_classifier.data import EvalData
from image_classifier.errors import UserError
from image_classifier.evaluate import evaluate
from image_classifier.extensions import find_tool
from image_classifier.models import build_model, models_by_name
from image_classifier.runtime.distributed import World
from image_classifier.tools.lora.network import (
    MARK,
    add_adapters,
    merged,
)
from image_classifier.train import init_model, train

CPU = World(torch.device("cpu"))


class Attending(nn.Module):
    """Attention, which reads the weights of its layers, over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, images):
        """(batch, 3, side, 32) -> (batch, 3)."""
        rows = images.mean(1)
        return self.head(self.attention(rows, rows, rows)[0].mean(1))


def networks(name):
    """A small network and the same with adapters that have learned."""
    torch.manual_seed(0)
    plain = Attending() if name == "attention" else build_model(ModelConfig(name, 8), 3, 32)
    plain.eval()
    model = deepcopy(plain)
    add_adapters(model, 4)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(model(images), plain(images))
    for weight in model.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, std=0.1)
    return plain, model, images


NETWORKS = ["attention", "resnet9", *{"airbench"} & models_by_name().keys(), "shufflenet_v2_x0_5"]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_matrix_but_those_of_the_last_layer_gets_two_thin_ones(name):
    plain, model, images = networks(name)
    model(images).sum().backward()
    learn = {name: w for name, w in model.named_parameters() if w.requires_grad}
    assert all(weight.grad is not None for weight in learn.values())
    assert sum(w.numel() for w in learn.values()) < 0.7 * sum(w.numel() for w in plain.parameters())
    alone = [name for name in learn if not name.endswith((".0.a", ".0.b"))]
    assert alone == list(learn)[-2:] or name == "airbench"  # its last layer has no bias
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    plain.load_state_dict(merged(model.state_dict()))  # strictly
    torch.testing.assert_close(model(images), plain(images), rtol=1e-5, atol=1e-6)
    average, changed_weight = deepcopy(model), next(iter(learn.values()))
    nn.init.ones_(changed_weight)
    assert not torch.equal(average(images), model(images))
    model.load_state_dict(before)  # as weights to start from are named
    for weight in (w for name, w in learn.items() if name.endswith(".0.b")):
        nn.init.zeros_(weight)
    plain.load_state_dict(before)
    assert torch.equal(model(images), plain(images))


def test_weights_without_a_matrix_of_the_network_are_refused():
    plain, model, _ = networks("resnet9")
    weights = plain.state_dict()
    del weights["stage2.0.weight"]
    with pytest.raises(UserError, match=r"only one of the two has .*stage2"):
        PretrainedWeights("weights", weights).load_into(model, ("ant", "bee", "cat"))


def test_a_weight_of_several_layers_has_no_adapter():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    plain[1].weight = plain[0].weight
    model = deepcopy(plain)
    add_adapters(model, 2)
    assert [hasattr(layer, "parametrizations") for layer in model] == [False, False, True, False]
    nn.init.ones_(model[2].parametrizations.weight[0].b)
    plain.load_state_dict(merged(model.state_dict()))
    torch.testing.assert_close(plain(torch.ones(4)), model(torch.ones(4)))


@pytest.fixture
def adapted(config, trained_once):
    """A run that fine-tunes another by LoRA."""
    weights = trained_once / "checkpoints" / "best.pt"
    config = changed(config, run__init_from=str(weights))
    config = changed(
        config,
        model__lora_rank=2,
        optim__ema_decay=0.9,
        optim__accumulate=2,
    )
    config = changed(config, optim__name="adamw", optim__lr=1e-2)
    if find_tool("groups", "layer-decay"):
        config = changed(config, optim__layer_decay=0.8)
    return changed(config, run__evaluate_every_epochs=0.5)


def test_filters_for_colors_are_adapted_with_adapters_too():
    small = ModelConfig("resnet9", 8)
    weights = PretrainedWeights("weights", build_model(small, 3, 32).state_dict())
    gray = build_model(small, 3, 32, channels=1)
    add_adapters(gray, 4)
    plain = build_model(small, 3, 32, channels=1)
    for network in (gray, plain):
        assert "adapted from 3 channels: stem.0.weight" in weights.load_into(
            network, ("a", "b", "c")
        )
    images = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(gray.eval()(images), plain.eval()(images))


def checkpoint(run, name):
    """The path of a checkpoint."""
    return Path(run.run.dir, "checkpoints", name)


def test_a_run_changes_no_pretrained_matrix_and_saves_weights_that_fit_without_lora(adapted):
    train(adapted)
    before = load_best(Path(adapted.run.init_from)).weights
    state = read_checkpoint(checkpoint(adapted, "last.pt"))["state"]
    for net in (state["model"], state["ema"]):
        kept = [name for name in net if name.endswith(".original")]
        assert len(kept) == 8
        assert {len(weight) for name, weight in net.items() if name.endswith(".0.a")} == {2}
        for name in kept:
            assert torch.equal(net[name], before[name.replace(f"{MARK}weight.original", ".weight")])
        assert all(weight.any() for name, weight in net.items() if name.endswith(".0.b"))
    best = load_best(checkpoint(adapted, "best.pt")).weights
    assert best.keys() == before.keys()
    assert not any(torch.equal(w, before[name]) for name, w in best.items() if w.ndim == 4)
    saved = load_file(checkpoint(adapted, "best.safetensors"))
    torch.testing.assert_close(saved, best, rtol=0, atol=0)
    trained = load_model(adapted.run.dir, adapted.compute, CPU)
    val = EvalData(adapted.data, "val", CPU, adapted.run, 16)
    scores = evaluate(trained.model, val, trained.normalize, trained.precision)
    logged_losses = [row["val/loss"] for row in logged(adapted.run.dir) if "val/loss" in row]
    assert min(abs(loss - scores.value("loss")) for loss in logged_losses) < 1e-5
    # Another run begins with what this one has learned, with other adapters or none.
    for rank in (0, 3):
        onward = changed(adapted, optim__warmup_epochs=0.0, epochs=0.25, model__lora_rank=rank)
        onward = changed(onward, run__init_from=str(checkpoint(adapted, "best.pt")))
        train(changed(onward, run__dir=f"{adapted.run.dir}-{rank}"))


def test_a_file_cannot_ask_for_more_memory_than_it_has():
    thin = {"original": (1, 1), "0.b": (10**6, 1), "0.a": (1, 10**6)}
    weights = {f"x{MARK}weight.{name}": torch.zeros(shape) for name, shape in thin.items()}
    with pytest.raises(RuntimeError, match="size"):
        merged(weights)


def test_adapters_depend_on_the_seed_alone(adapted):
    models = []
    for drawn in range(2):
        torch.rand(drawn)  # by others, before
        models.append(init_model(adapted, Namespace(num_classes=10), None).state_dict())
    torch.testing.assert_close(*models, rtol=0, atol=0)


def test_an_interrupted_run_ends_as_an_unbroken_one_and_ranks_agree(adapted, tmp_path):
    unbroken, ranks = (changed(adapted, run__dir=str(tmp_path / name)) for name in ("a", "b"))
    train(unbroken)
    train_until(adapted, 3, kill=False)
    train(adapted)
    run_ranks(2, train, ranks)
    one, other = (read_checkpoint(checkpoint(run, "last.pt")) for run in (adapted, unbroken))
    for part in ("model", "ema", "optimizer"):
        torch.testing.assert_close(one["state"][part], other["state"][part], rtol=0, atol=0)
    assert losses(ranks.run.dir) == pytest.approx(losses(unbroken.run.dir), rel=1e-3)


def test_what_it_needs_is_said_in_a_line(config):
    with pytest.raises(UserError, match=r"--model.lora-rank 2 trains only.*--run.init-from FILE"):
        changed(config, model__lora_rank=2)
