"""Muon turns the matrices between the first and the last layer, in all directions alike."""

import math
from unittest.mock import Mock

import pytest
import torch
from test_launches import Operations
from torch import nn

from image_classifier.config import (
    ComputeConfig,
    ModelConfig,
    OptimConfig,
)
from image_classifier.models import build_model, models_by_name
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.runtime.command_line import take_preset
from image_classifier.runtime.config_dict import (
    flatten,
    of_others,
)
from image_classifier.tools.muon import optimizer
from image_classifier.tools.muon.optimizer import orthogonal


# Norms, scales, tokens, positions, biases of places, groups.
@pytest.mark.parametrize(
    "name", ["resnext50_32x4d", "convnext_tiny", "swin_v2_t", *models_by_name()]
)
def test_it_turns_the_matrices_between_stem_and_head(name):
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), 10, 32)
    layers = [m for m in model.named_modules() if isinstance(m[1], nn.Linear | nn.Conv2d)]
    names = {weight: path for path, weight in model.named_parameters()}
    hidden = {f"{p}.weight" for p, layer in layers[1:-1] if getattr(layer, "groups", 1) == 1}
    optimizer = build_optimizer(OptimConfig(name="muon"), model)
    assert {names[weight] for weight in optimizer.hidden} == hidden


@pytest.mark.parametrize("name", ["convnext_tiny", "vit_b_16", *models_by_name()])
def test_it_leaves_a_first_layer_of_any_channels(name):
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name, width=8), 3, 32, channels=5)
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    assert first.weight not in build_optimizer(OptimConfig(name="muon"), model).hidden


@pytest.mark.parametrize("is_bf16", [False, True])
def test_it_moves_all_directions_alike(is_bf16):
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    matrices = (matrix @ torch.diag(torch.linspace(0.1, 9, 20)))[None]
    found = orthogonal(matrices, is_bf16), orthogonal(matrices.mT, is_bf16).mT
    values = torch.linalg.svdvals(torch.cat(found))
    assert 0.6 < values.min() < values.max() < 1.3


def test_it_updates_a_matrix_as_torchs_own():
    start, *gradients = torch.randn(4, 8, 20, generator=torch.Generator().manual_seed(0))
    own = nn.Parameter(start.clone())
    other = nn.Parameter(start.clone())
    ours = optimizer.Muon([own], lr=0.1, betas=(0.9, 0.999), weight_decay=0.1)
    ours.hidden = {own}
    how = {"momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon([other], lr=0.1, **how)
    for gradient in gradients:
        own.grad = gradient.clone()
        other.grad = gradient.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(own, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("smallest", [1, 1e-6])
@pytest.mark.parametrize("columns", [17, 90])  # which are iterated themselves, or their squares
def test_in_fp32_it_is_the_exact_iteration(columns, smallest):
    noise = torch.randn(2, 16, columns, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(noise, full_matrices=False)
    matrices = left * torch.logspace(0, math.log10(smallest), 16) @ right
    exact = matrices.double()
    wanted = optimizer.iterated(exact / exact.norm(dim=(1, 2), keepdim=True))
    found = orthogonal(matrices, is_bf16=False)
    assert (found - wanted).norm() < 1e-3 * wanted.norm()
    assert torch.equal(found, orthogonal(matrices.mT, is_bf16=False).mT)


def test_weights_of_one_shape_are_updated_together_as_each_alone():
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(2, 3, 8, 8, 3, 3, generator=draws)  # weights and gradients of three filters
    ends = []
    for together in (True, False):
        weights = [nn.Parameter(filters.clone()) for filters in start[0]]
        muon = optimizer.Muon(weights, lr=0.1, betas=(0.9, 0.999), weight_decay=0.1)
        muon.is_bf16 = False
        (group,) = muon.param_groups
        for factor in (1.0, -0.5):
            for weight, gradient in zip(weights, start[1], strict=True):
                weight.grad = factor * gradient
            with torch.no_grad():
                for part in [weights] if together else [[weight] for weight in weights]:
                    muon.update_hidden(part, group)
        ends.append(torch.stack([weight.detach() for weight in weights]))
    assert torch.allclose(*ends, rtol=1e-4, atol=1e-5)
    assert (ends[0] - start[0]).abs().min() > 0


@pytest.mark.parametrize("usual", ["fp32", "bf16"])
def test_a_cpu_computes_it_in_bf16_only_if_it_has_that(usual, monkeypatch):
    monkeypatch.setattr(optimizer, "usual_precision", lambda _: usual)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    assert build_optimizer(OptimConfig(name="muon"), model).is_bf16 == (usual == "bf16")


def test_the_preset_folder_has_it():
    name, preset = take_preset(["folder"], "")
    assert (name, preset.optim.name, preset.optim.lr) == ("folder", "muon", 2e-3)
    assert of_others(flatten(preset)) == {}
    assert of_others({"optim.name": "lion"}) == {"optim.name": "lion"}


def test_a_step_of_resnet50_takes_operations_for_each_shape_of_its_filters(monkeypatch):
    monkeypatch.setattr(optimizer.AdamW, "step", Mock())  # fused, it takes no meta tensors
    meta = torch.device("meta")
    optim = OptimConfig(name="muon")
    with meta:
        model = build_model(ModelConfig(name="resnet50"), 1000, 224)
    muon = build_optimizer(optim, model)
    precision = Precision("bf16", ComputeConfig(), optim, meta)
    for _ in range(2):  # the first step allocates
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        with Operations() as found:
            precision.step(muon)
    assert len(muon.hidden) == 52
    assert len({weight.shape for weight in muon.hidden}) == 19
    assert len(found.calls) <= 820  # 2,190 if each filter were alone
