"""Each block has a learning rate of its own, whatever the network."""

from dataclasses import replace

import pytest
import torch
from test_transfer import DONOR

from image_classifier.config import ModelConfig
from image_classifier.models import build_model, find_head
from image_classifier.optim import build_optimizer, set_lr
from image_classifier.runtime.command_line import (
    all_presets,
    take_preset,
)
from image_classifier.tools.layer_decay.groups import find_blocks


def test_lower_blocks_learn_more_slowly(config):
    optim = replace(config.optim, layer_decay=0.5, weight_decay=0.1)
    optimizer = build_optimizer(optim, DONOR)
    set_lr(optimizer, 1.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == sorted(rates)
    assert rates[-4:] == [0.5, 0.5, 1.0, 1.0]
    assert rates[0] == 0.5 ** (len(rates) // 2 - 1)
    lowest = {weight for group in optimizer.param_groups[:2] for weight in group["params"]}
    assert DONOR.stem[0].weight in lowest
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.1, 0.0] * (len(rates) // 2)  # never of biases and norms


@pytest.mark.parametrize("name", ["resnet50", "convnext_tiny", "vit_b_16", "efficientnet_b0"])
def test_blocks_are_found_in_any_network(name):
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), 7, 64)
    found, weights = find_blocks(model), list(model.parameters())
    assert 9 <= len(found) <= 14
    assert found[0][0] is weights[0]
    assert found[-1] == list(find_head(model)[1].parameters())
    assert sorted(id(w) for block in found for w in block) == sorted(map(id, weights))


def test_two_last_layers_learn_alike():
    pytest.importorskip("timm")
    pytest.importorskip("image_classifier.tools.timm")
    name = "timm/deit_tiny_distilled_patch16_224"
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), 7, 32)
    names = {weight: path for path, weight in model.named_parameters()}
    last = {names[weight] for weight in find_blocks(model)[-1]}
    assert last == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


def test_fine_tuning_has_it():
    for name in all_presets():
        if name.startswith("finetune"):  # some are of tools
            assert take_preset([name], "shapes")[1].optim.layer_decay == 0.8
    assert take_preset(["folder"], "shapes")[1].optim.layer_decay == 1
