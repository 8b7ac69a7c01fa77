"""Gradient checkpointing: the same training in less memory, for any network that has blocks."""

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import changed, losses, run_ranks
from torch import nn

from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import ModelConfig
from image_classifier.errors import UserError
from image_classifier.models import build_model
from image_classifier.tools.gradient_checkpointing import (
    network as recompute,
)
from image_classifier.train import train


def build(name):
    """A small network, all of whose weights have gradients."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name, width=16), 3, 32)
    nn.init.normal_(list(model.parameters())[-2], std=0.1)  # zeros in a transformer's head
    return model


def passed(model, precision=None):
    """Bytes of activations that two images leave for the backward pass; gradients, buffers."""
    kept, images = {}, torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    weights = {weight.data_ptr() for weight in model.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(2)  # of dropout and stochastic depth
    in_precision = torch.autocast("cpu", precision) if precision else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), in_precision:
        logits = model(images)
    logits[:, 0].float().square().sum().backward()
    return sum(kept.values()), [weight.grad for weight in model.parameters()], list(model.buffers())


# Residual blocks, transformers, stages with stochastic depth.
NAMES = ["resnet18", "vit_s", "resnet9", "efficientnet_b0", "timm/resnet10t"]


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, None) for name in NAMES), ("resnet9", torch.bfloat16)]
)
def test_blocks_that_recompute_learn_the_same_in_less_memory(name, precision):
    if name.startswith("timm/"):
        pytest.importorskip("timm")
        pytest.importorskip("image_classifier.tools.timm")
    if name == "vit_s":
        pytest.importorskip("image_classifier.tools.imagenet")
    plain = build(name)
    model = deepcopy(plain)
    recompute.checkpoint_blocks(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    (before, *plainly), (after, *again) = (passed(net, precision) for net in (plain, model))
    torch.testing.assert_close(again, plainly, rtol=0, atol=0)  # BatchNorm's statistics, too
    assert after < before / 2
    assert passed(model.eval())[0] == passed(plain.eval())[0]  # in evaluation nothing is saved


@pytest.mark.parametrize("has_own", [False, True])
def test_a_block_that_changes_its_list_has_the_same_gradients(has_own):
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())

        def forward(self, parts):
            if has_own:
                parts.append(self.layer(parts[-1]))
                return parts
            parts[0] = self.layer(parts[0])  # as in HRNet
            return [parts[0] * parts[0], parts[1]]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(Replacing(), Replacing()), nn.Identity())
    plain.head = nn.Linear(4, 3)
    model = deepcopy(plain)
    recompute.checkpoint_blocks(model)
    for network in (plain, model):
        parts = network[0]([torch.ones(2, 4), torch.ones(2, 4)])
        network.head(sum(parts)).sum().backward()
    ours, theirs = ([w.grad for w in each.parameters()] for each in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_copy_of_the_model_has_weights_of_its_own():
    model = build("resnet9")
    recompute.checkpoint_blocks(model)
    average, other = deepcopy(model), build("resnet9")  # as the EMA is one
    for changed_model in (average, other):
        nn.init.ones_(changed_model.stage1[0][0].weight)
    torch.testing.assert_close(passed(average)[1:], passed(other)[1:])
    torch.testing.assert_close(passed(model)[1:], passed(build("resnet9"))[1:])


def test_a_compiled_model_recomputes_and_counts_each_batch_once():
    plain, model = build("resnet9"), build("resnet9")
    recompute.checkpoint_blocks(model)
    model.compile(backend="aot_eager")
    before, after = passed(plain), passed(model)
    torch.testing.assert_close(after[1:], before[1:], rtol=1e-3, atol=1e-5)
    assert after[0] < before[0] / 2
    torch._dynamo.reset()


def recomputing(config):
    """The same run with gradient checkpointing."""
    return changed(config, compute__gradient_checkpointing=True)


def test_a_run_that_recomputes_has_the_same_weights(config, trained_once):
    train(recomputing(config))
    folders = config.run.dir, trained_once
    states = [read_checkpoint(Path(f, "checkpoints", "last.pt"))["state"] for f in folders]
    for part in ("model", "optimizer"):
        torch.testing.assert_close(states[0][part], states[1][part], rtol=0, atol=0)


def test_two_ranks_recompute(config, trained_once):
    run_ranks(2, train, recomputing(config))
    assert losses(config.run.dir) == pytest.approx(losses(trained_once), rel=1e-3)


@pytest.mark.parametrize("name", ["vgg11", "alexnet"])
def test_a_model_without_blocks_is_refused(name):
    with torch.device("meta"), pytest.raises(UserError, match="the model has no blocks"):
        recompute.checkpoint_blocks(build_model(ModelConfig(name=name), 3, 64))
