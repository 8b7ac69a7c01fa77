"""Small maps side by side: the gradients are those of the maps one by one."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy

from image_classifier.config import ModelConfig
from image_classifier.models import build_model
from image_classifier.models.strips import (
    STRIP,
    Convolve,
    StripConv2d,
    learn_from_strips,
    strips,
)


@pytest.mark.parametrize("side", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_the_gradients_are_those_of_the_maps_one_by_one(side: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(side + batch)
    shape = (batch, 3, side + 1, side)
    images = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(Convolve.apply(images, weight).square().sum(), (images, weight))
    known = torch.autograd.grad(conv2d(images, weight, padding=1).square().sum(), (images, weight))
    torch.testing.assert_close(found, known)


def test_a_strip_is_as_wide_as_said_and_has_zeros_between_its_images() -> None:
    maps = torch.ones(50, 2, 4, 4)
    laid = strips(maps)
    assert laid.shape[:3] == (5, 2, 4)
    assert abs(laid.shape[3] - STRIP) < 5
    assert laid.sum() == maps.sum()
    assert not laid[..., 4::5].any()
    assert laid[..., 3::5].all()
    assert laid.is_contiguous(memory_format=torch.channels_last)


def test_only_convolutions_that_keep_the_size_of_a_map_are_taken() -> None:
    odd: list[dict] = [{"stride": 2}, {"padding": 0}, {"dilation": 2}, {"groups": 2}]
    odd += [{"padding_mode": "reflect"}, {"bias": True}, {"kernel_size": 5}]
    plain = {"kernel_size": 3, "padding": 1, "bias": False}
    network = nn.Sequential(*(nn.Conv2d(2, 2, **plain | knobs) for knobs in [{}, *odd]))
    names = list(network.state_dict())
    learn_from_strips(network)
    assert [type(layer) for layer in network] == [StripConv2d] + [nn.Conv2d] * len(odd)
    assert list(network.state_dict()) == names
    learn_from_strips(network, does=False)
    assert {type(layer) for layer in network} == {nn.Conv2d}


@pytest.mark.parametrize("name", ["resnet9", "airbench96"])
def test_a_network_learns_the_same_from_strips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    apply = Convolve.apply
    monkeypatch.setattr(Convolve, "apply", lambda *what: used.append(what) or apply(*what))
    network = build_model(ModelConfig(name=name, width=8), 5, 32)
    other = deepcopy(network)
    learn_from_strips(other)
    images, labels = torch.randn(6, 3, 32, 32), torch.arange(6) % 5
    gradients = []
    for model in (network, other):
        assert not used
        with torch.autocast("cpu", torch.bfloat16):
            cross_entropy(model(images), labels).backward()
        gradients.append({name: w.grad for name, w in model.named_parameters()})
    assert used
    assert all(images.shape[3] <= 8 for images, _ in used)
    for weight, gradient in gradients[0].items():
        if gradient is None:
            assert gradients[1][weight] is None
        else:
            away = (gradients[1][weight] - gradient).norm() / gradient.norm()
            assert away < 0.02, weight


def test_what_does_not_learn_is_computed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Convolve, "apply", lambda *_: pytest.fail("a strip is for learning"))
    layer = nn.Conv2d(2, 2, 3, padding=1, bias=False)
    learn_from_strips(layer)
    images = torch.randn(2, 2, 4, 4)
    layer(images)  # in float32, AMX has no part
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(images)
        layer(torch.randn(2, 2, 9, 9))
        layer.requires_grad_(False)(images)
