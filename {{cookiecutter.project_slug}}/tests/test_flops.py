"""FLOPs are counted right, and counting changes nothing."""

import pytest
import torch
from conftest import changed
from torch import nn

from image_classifier.config import Config, ModelConfig
from image_classifier.models import build_model
from image_classifier.precision import Precision
from image_classifier.tracking.flops import (
    amount,
    build_training_flops,
    count_flops,
    datasheet,
    find_peak,
)


def test_flops_are_those_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 10))
    assert count_flops(model, 8) == 2 * (64 * 3 * 9 * 4 + 256 * 10)


def test_attention_is_counted_although_frozen_weights_have_a_kernel_of_their_own() -> None:
    class Attention(nn.Module):
        """One layer over 16 tokens of 12 numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.layer(images.reshape(1, 16, 12))

    model = Attention()
    trained = count_flops(model, 8)
    assert trained > 2 * 16 * 12 * (4 * 12 + 2 * 24)
    assert count_flops(model.requires_grad_(False), 8) == trained


def test_small_images_and_frozen_layers_cost_less(config: Config) -> None:
    config = changed(
        config,
        run__init_from="weights.pt",
        data__image_size=32,
        augment__min_size=16,
        augment__growth=(0.5, 0.5),
        optim__frozen_epochs=1.0,
    )
    flops_at = build_training_flops(config, 12, unfreeze_step=2, steps_per_epoch=2, total_steps=8)
    assert [flops_at(step) for step in (0, 1, 2, 3, 4, 7)] == [3, 3, 9, 9, 36, 36]


def test_counting_leaves_a_model_and_randomness_as_they_were() -> None:
    model = build_model(ModelConfig(width=8, dropout=0.5), 10, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert count_flops(model, 32) > 1e6
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 156),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", torch.bfloat16, None),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65),
        ("Tesla T4", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, None),
    ],
)
def test_a_datasheet_is_that_of_the_very_gpu(
    name: str, dtype: torch.dtype, teraflops: float | None
) -> None:
    assert datasheet(name, dtype) == (teraflops and pytest.approx(teraflops * 1e12))


def test_a_device_without_a_datasheet_is_measured(config: Config) -> None:
    cpu = Precision("fp32", config.compute, config.optim, torch.device("cpu"))
    flops, source = find_peak(cpu)
    assert 1e8 < flops < 1e15
    assert "measured" in source


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 "), (999.4, "999 "), (999.6, "1 k"), (3627132928, "3.63 G"), (2e18, "2e+03 P")],
)
def test_amounts_have_three_digits(number: float, words: str) -> None:
    assert amount(number) == words
