"""Published recipes: their schedules, and what they do to a model."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from image_classifier.augment import build_size
from image_classifier.config import ModelConfig
from image_classifier.errors import UserError
from image_classifier.models import build_model
from image_classifier.models.surgery import blurred
from image_classifier.models.vit import positions
from image_classifier.optim import build_schedule
from image_classifier.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "begin", "end"), [("imagenet_rn50_16", 11, 13), ("imagenet_rn50_88", 65, 76)]
)
def test_ffcvs_recipes_have_its_sizes_and_learning_rates(name: str, begin: int, end: int) -> None:
    config, per_epoch = PRESETS[name](), 312
    epochs = round(config.epochs)
    size_at = build_size(config.augment, config.data.image_size, per_epoch, epochs * per_epoch)
    lr_at = build_schedule(config.optim, per_epoch, epochs * per_epoch)
    for epoch in range(epochs):
        sizes = {size_at(epoch * per_epoch + k) for k in (0, per_epoch // 2, per_epoch - 1)}
        # FFCV's `get_resolution`, for 160 to 192 pixels.
        assert sizes == {round(np.interp(epoch, [begin, end], [160, 192]) / 32) * 32}
        lr = np.interp(epoch, [0, 2, epochs], [1.7e-4, 1.7, 0])
        assert lr_at(epoch * per_epoch) == pytest.approx(lr, abs=0.01)
    assert (config.data.eval_size, config.data.batch_size) == (256, 8 * 512)


def test_the_vits_recipe_has_its_learning_rates_and_decay() -> None:
    config, total = PRESETS["imagenet_vit_s"](), 90 * 1251
    lr_at = build_schedule(config.optim, 1251, total)
    found = [lr_at(step) for step in (5000, 10_000, (10_000 + total) // 2)]
    assert found == pytest.approx([5e-4, 1e-3, 5e-4], rel=0.01)
    assert lr_at(10_000) * config.optim.weight_decay == pytest.approx(1e-4, rel=0.01)


def test_features_are_blurred_before_each_stride_but_the_first() -> None:
    features = torch.rand(2, 16, 9, 9)
    kernel = torch.outer(*2 * [torch.tensor([1.0, 2.0, 1.0])]).expand(16, 1, 3, 3) / 16
    expected = conv2d(features, kernel, padding=1, groups=16)
    torch.testing.assert_close(blurred(nn.Identity(), (features,)), expected)
    with torch.device("meta"):
        model = build_model(ModelConfig(name="resnet18", blurpool=True), 3, 96)
        with pytest.raises(UserError, match=r"--model.blurpool: airbench has no convolution"):
            build_model(ModelConfig(name="airbench", blurpool=True), 3, 32)
    hooked = {name for name, m in model.named_modules() if m._forward_pre_hooks}
    assert hooked == {f"layer{n}.0.{last}" for n in (2, 3, 4) for last in ("conv1", "downsample.0")}


def test_a_vit_finds_a_place_again_in_a_larger_image() -> None:
    small, large = positions(2, 2).view(2, 2, -1), positions(6, 2).view(6, 6, -1)
    torch.testing.assert_close(large[1::3, 1::3], small)
    assert small.flatten(0, 1).unique(dim=0).shape == (4, 384)
    with torch.device("meta"):
        model = build_model(ModelConfig(name="vit_s"), 3, 32)
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
        with pytest.raises(UserError, match="vit_s takes images of multiples of 16, not 40"):
            model(torch.zeros(2, 3, 40, 40))
