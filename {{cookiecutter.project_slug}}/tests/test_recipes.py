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
from image_classifier.models.surgery import blurred, leave_out
from image_classifier.models.vit import positions
from image_classifier.optim import build_schedule
from image_classifier.presets import PRESETS
from image_classifier.runtime.seeding import seed_layers

CPU = torch.device("cpu")


def on_meta(size: int, **knobs: object) -> nn.Module:
    """A model without numbers in its weights, for images of `size` pixels of 3 classes."""
    with torch.device("meta"):
        return build_model(ModelConfig(**knobs), 3, size)


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
    assert config.data.eval_size == 256
    assert config.data.batch_size == 8 * 512


def test_the_vits_recipe_has_its_learning_rates_and_decay() -> None:
    config, total = PRESETS["imagenet_vit_s"](), 90 * 1251
    lr_at = build_schedule(config.optim, 1251, total)
    found = [lr_at(step) for step in (5000, 10_000, (10_000 + total) // 2)]
    assert found == pytest.approx([5e-4, 1e-3, 5e-4], rel=0.01)
    assert lr_at(10_000) * config.optim.weight_decay == pytest.approx(1e-4, rel=0.01)


def test_whole_branches_are_left_out_and_the_others_make_up_for_it() -> None:
    layer, branch = nn.Identity(), torch.ones(4000, 2, 3)
    seed_layers(0, 7, 0, CPU)
    kept = leave_out(0.25, layer, (branch,), branch)
    assert torch.equal(kept, kept[:, :1, :1].expand(-1, 2, 3))
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert kept.mean() == pytest.approx(1, abs=0.05)
    seed_layers(0, 7, 0, CPU)
    assert torch.equal(leave_out(0.25, layer, (branch,), branch), kept)  # the step decides
    assert leave_out(0.25, layer.eval(), (branch,), branch) is branch


@pytest.mark.parametrize(("name", "num_blocks"), [("resnet9", 2), ("resnet18", 8), ("vit_s", 12)])
def test_deeper_branches_are_left_out_more_often(name: str, num_blocks: int) -> None:
    model = on_meta(32, name=name, width=8, stochastic_depth=0.6)
    plain = on_meta(32, name=name, width=8)
    assert model.state_dict().keys() == plain.state_dict().keys()  # weights of others still fit
    hooks = [h for m in model.modules() for h in m._forward_hooks.values()]
    found = sorted({hook.args[0] for hook in hooks if hook.func is leave_out})
    assert found == pytest.approx([0.6 * n / num_blocks for n in range(1, num_blocks + 1)])


def test_models_that_come_with_stochastic_depth_take_the_knob() -> None:
    model = on_meta(64, name="convnext_tiny", stochastic_depth=0.9)
    found = [m.p for m in model.modules() if type(m).__name__ == "StochasticDepth"]
    assert found == pytest.approx([0.9 * number / 18 for number in range(1, 19)])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"stochastic_depth": 0.1}, "--model.stochastic-depth 0.1: airbench has no residual"),
        ({"blurpool": True}, "--model.blurpool: airbench has no convolution"),
    ],
)
def test_a_model_without_branches_or_strides_is_refused(knobs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(ModelConfig(name="airbench", width=8, **knobs), 3, 32)


def test_features_are_blurred_before_each_stride_but_the_first() -> None:
    features = torch.rand(2, 16, 9, 9)
    kernel = torch.outer(*2 * [torch.tensor([1.0, 2.0, 1.0])]).expand(16, 1, 3, 3) / 16
    expected = conv2d(features, kernel, padding=1, groups=16)
    torch.testing.assert_close(blurred(nn.Identity(), (features,)), expected)
    model = on_meta(96, name="resnet18", blurpool=True)
    hooked = {name for name, m in model.named_modules() if m._forward_pre_hooks}
    assert hooked == {f"layer{n}.0.{last}" for n in (2, 3, 4) for last in ("conv1", "downsample.0")}


def test_a_vit_finds_a_place_again_in_a_larger_image() -> None:
    small, large = positions(2, 2).view(2, 2, -1), positions(6, 2).view(6, 6, -1)
    torch.testing.assert_close(large[1::3, 1::3], small)
    assert small.flatten(0, 1).unique(dim=0).shape == (4, 384)


def test_a_vit_takes_whole_patches_only() -> None:
    with pytest.raises(UserError, match=r"vit_s can't take images of --data.image-size 40"):
        on_meta(40, name="vit_s")
    model = on_meta(32, name="vit_s")
    assert model(torch.zeros(2, 3, 64, 64, device="meta")).shape == (2, 3)
    with pytest.raises(UserError, match="40 is not a multiple of 16"):
        model(torch.zeros(2, 3, 40, 40, device="meta"))
