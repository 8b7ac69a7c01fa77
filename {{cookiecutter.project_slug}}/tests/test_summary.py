"""What a network costs is counted right, without computing anything with it."""

import pytest
import torch
from conftest import changed
from torch import nn

from image_classifier.config import Config
from image_classifier.models import build_model
from image_classifier.precision import Precision
from image_classifier.tracking.flops import (
    amount,
    build_effort,
    cost_of,
)
from image_classifier.tracking.peak import datasheet, find_peak

CPU = torch.device("cpu")


def precision(config: Config, name: str = "fp32") -> Precision:
    """A number format, on a CPU."""
    return Precision(name, config.compute, config.optim, CPU)


def small(kind: type[nn.Module] = nn.Sequential) -> nn.Module:
    """A network whose costs can be told by hand."""
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10))
    return kind(*layers)


@pytest.mark.parametrize(("name", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_small_network_costs_what_it_costs_by_hand(config: Config, name: str, size: int) -> None:
    config = changed(config, compute__channels_last=False)  # or `Flatten` makes a copy
    cost = cost_of(small(), 8, precision(config, name))
    assert cost.weights == cost.trainable == 3 * 9 * 4 + 4 + 256 * 10 + 10
    assert cost.flops == 2 * (64 * 3 * 9 * 4 + 256 * 10)
    assert cost.training_flops == 3 * cost.flops
    # The image, and what ReLU gives, which the last layer takes as well.
    assert cost.activation_bytes == size * (3 * 64 + 4 * 64)
    assert cost.phrase(8).startswith("an image: 18.9 kFLOP forward, 56.8 kFLOP in training")


def test_small_images_and_frozen_layers_count_for_what_they_take(config: Config) -> None:
    config = changed(
        config,
        run__init_from="weights.pt",
        data__image_size=32,
        augment__min_size=16,
        augment__growth=(0.5, 0.5),
        optim__frozen_epochs=1.0,
    )
    effort_at = build_effort(config, steps_per_epoch=2, total_steps=8)
    assert [effort_at(step) for step in (0, 1, 2, 3, 4, 7)] == [1 / 12, 1 / 12, 1 / 4, 1 / 4, 1, 1]


def test_counting_leaves_a_network_and_randomness_as_they_were(config: Config) -> None:
    config = changed(config, model__name="resnet9", model__dropout=0.5)
    model = build_model(config.model, 10, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert cost_of(model, 32, precision(config)).flops > 1e6
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(tensor.is_meta for tensor in model.parameters())


def test_weights_that_are_not_trained_are_told(config: Config) -> None:
    model = small()
    model[0].requires_grad_(False)
    cost = cost_of(model, 8, precision(config))
    assert (cost.weights, cost.trainable) == (2682, 2570)
    assert cost.activation_bytes == 4 * 4 * 64  # what the last layer takes


def test_layers_that_rest_at_first_cost_what_they_will(config: Config) -> None:
    model = small().requires_grad_(False)
    model[3].requires_grad_(True)
    expected = cost_of(small(), 8, precision(config))
    assert cost_of(model, 8, precision(config), list(model[0].parameters())) == expected
    assert not model[0].weight.requires_grad


class Asking(nn.Sequential):
    """A network that goes by the values of its images, which are not there."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Two ways."""
        return super().forward(images if images.sum() > 0 else -images)


def test_a_network_that_can_not_be_counted_is_told_in_a_line(config: Config) -> None:
    cost = cost_of(small(Asking), 8, precision(config))
    assert cost.weights == 2682
    assert cost.training_flops is None
    assert cost.phrase(8).startswith("operations and activations of Asking are not known: ")
    assert "\n" not in cost.phrase(8)


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, True, 989),
        ("NVIDIA H100 PCIe", torch.float16, True, 756),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156),
        ("NVIDIA A100 80GB PCIe", torch.float32, False, 19.5),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", torch.bfloat16, True, None),
        ("NVIDIA A10", torch.bfloat16, True, 125),
        ("NVIDIA A10G", torch.bfloat16, True, None),
        ("Tesla T4", torch.float16, True, 65),
        ("Tesla T4", torch.bfloat16, True, None),
        ("Tesla V100-SXM2-16GB", torch.float32, True, 15.7),
        ("NVIDIA GeForce RTX 3090", torch.bfloat16, True, 71),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, True, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, True, None),
        ("AMD Instinct MI300X", torch.bfloat16, True, None),
    ],
)
def test_a_datasheet_is_of_the_very_device(
    name: str, dtype: torch.dtype, tf32: bool, teraflops: float | None
) -> None:
    flops = datasheet(name, dtype, tf32)
    assert flops == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_a_device_without_a_datasheet_is_measured(config: Config) -> None:
    peak = find_peak(precision(config))
    assert 1e8 < peak.flops < 1e15
    assert "measured" in peak.origin


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 "), (999.4, "999 "), (999.6, "1 k"), (3627132928, "3.63 G"), (2e18, "2e+03 P")],
)
def test_amounts_have_three_digits(number: float, words: str) -> None:
    assert amount(number) == words
