"""What published recipes are made of: sizes that change, rectangles, branches that are left out."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import changed
from torch import nn
from torch.nn.functional import conv2d
from torchvision import transforms

from image_classifier.augment import (
    ERASING_DRAWS,
    build_augment,
    build_size,
    erase,
)
from image_classifier.config import (
    AugmentConfig,
    Config,
    ModelConfig,
    UserError,
)
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.data.samples import build_policy
from image_classifier.models import build_model
from image_classifier.models.surgery import blurred, leave_out
from image_classifier.models.vit import positions
from image_classifier.optim import build_schedule
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.presets import PRESETS
from image_classifier.runtime.distributed import World, join_world
from image_classifier.runtime.seeding import seed_layers

CPU = World(torch.device("cpu"))


def test_erasing_blanks_a_rectangle_of_the_right_size_in_a_share_of_the_images() -> None:
    images = torch.ones(1000, 3, 40, 40)
    draws = torch.rand((1000, ERASING_DRAWS), generator=torch.Generator().manual_seed(0))
    erase(images, draws, 0.5)
    blank = (images == 0).all(dim=1)  # (1000, 40, 40)
    assert torch.equal(blank, (images == 0).any(dim=1))
    erased = blank.flatten(1).any(dim=1)
    assert torch.equal(erased, draws[:, 0] < 0.5)
    rows, columns = blank.any(dim=2), blank.any(dim=1)
    assert torch.equal(blank, rows[:, :, None] & columns[:, None, :])  # whole rectangles
    heights, widths = rows.sum(1)[erased], columns.sum(1)[erased]
    area, ratio = heights * widths / 40**2, heights / widths
    assert 0.01 < area.min() < 0.03
    assert 0.3 < area.max() < 0.35
    assert 0.2 < ratio.min() < 0.4
    assert 2.7 < ratio.max() < 4
    assert rows[:, 0].any()  # they reach every border
    assert rows[:, -1].any()


def of_ffcv(epoch: int, begin: int, end: int) -> int:
    """FFCV's `get_resolution`, for 160 to 192 pixels."""
    if not begin < epoch < end:
        return 160 if epoch <= begin else 192
    return round(np.interp(epoch, [begin, end], [160, 192]) / 32) * 32


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
        assert sizes == {of_ffcv(epoch, begin, end)}
        lr = np.interp(epoch, [0, 2, epochs], [1.7e-4, 1.7, 0])
        assert lr_at(epoch * per_epoch) == pytest.approx(lr, abs=0.01)
    assert config.data.eval_size == 256
    assert config.data.batch_size == 8 * 512


def test_the_vits_recipe_has_its_learning_rates_and_decay() -> None:
    config, per_epoch = PRESETS["imagenet_vit_s"](), 1251
    lr_at = build_schedule(config.optim, per_epoch, 90 * per_epoch)
    assert lr_at(5000) == pytest.approx(5e-4, rel=0.01)
    assert lr_at(10_000) == pytest.approx(1e-3, rel=0.01)
    middle = (10_000 + 90 * per_epoch) // 2
    assert lr_at(middle) == pytest.approx(5e-4, rel=0.01)
    assert lr_at(10_000) * config.optim.weight_decay == pytest.approx(1e-4, rel=0.01)


def test_sizes_grow_by_steps_from_the_first_to_the_last() -> None:
    augment = AugmentConfig(min_size=17, growth=(0, 0.8))
    size_at = build_size(augment, 32, steps_per_epoch=3, total_steps=30)
    assert [size_at(3 * epoch) for epoch in range(10)] == [17, 20, 20, 24, 24, 28, 28, 32, 32, 32]


def augmented(config: Config, steps: range) -> list[torch.Tensor]:
    """The images of these steps, as a model sees them."""
    with join_world(config.compute) as world:
        data = TrainData(config, world)
        precision = Precision("fp32", config.compute, config.optim, world.device)
        normalize = Normalize(data.source, config.data.max_size, precision)
        augment = build_augment(config.augment, data, normalize, world, config.seed)
        batches = zip(steps, data.batches(steps.start, steps.stop), strict=True)
        return [augment(batch, step)[0] for step, batch in batches]


@pytest.mark.parametrize("where", ["device", "stream"])
def test_images_grow_in_a_run_wherever_it_goes_on(config: Config, where: str) -> None:
    config = changed(config, data__where=where, data__workers=0, data__test_size=40)
    growing = changed(
        config,
        augment__min_size=16,
        augment__growth=(0.5, 0.5),
        augment__random_erasing=0.5,
        augment__cutout=8,
    )
    images = augmented(growing, range(2, 6))
    assert [batch.shape[2:] for batch in images] == 2 * [(16, 16)] + 2 * [(32, 32)]
    assert torch.equal(augmented(growing, range(3, 4))[0], images[1])
    small, large = augmented(
        changed(growing, augment__random_erasing=0.0, augment__cutout=0), range(3, 5)
    )
    full = augmented(config, range(3, 5))
    assert torch.equal(large, full[1])
    means = nn.functional.avg_pool2d(full[0], 2)
    assert (small - means).abs().mean() < 0.15  # the same pictures, smaller


def test_evaluation_sees_images_of_the_size_it_asks_for(photos: Path) -> None:
    config = changed(Config(), data__name="folder", data__root=str(photos))
    (batch,) = EvalData(changed(config, data__test_size=48).data, "val", CPU).batches()
    assert batch.images.shape == (4, 3, 48, 48)
    (batch,) = EvalData(config.data, "val", CPU).batches()
    assert batch.images.shape == (4, 3, 32, 32)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"data__test_size": 5}, "--data.test-size 5"),
        ({"augment__min_size": 40}, r"--augment.min-size 40 is not in 8 .. 32"),
        ({"augment__growth": (0.7, 0.5)}, "--augment.growth 0.7 0.5: it ends"),
    ],
)
def test_sizes_that_no_run_can_have_are_refused(knobs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        changed(Config(), **knobs)


def test_randaugment_is_as_strong_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(RandAugment=lambda ops, magnitude: (ops, magnitude))
    monkeypatch.setattr(transforms, "v2", told, raising=False)  # to import it takes seconds
    augment = AugmentConfig(policy="randaugment-m30-n3")
    assert build_policy(augment) == (3, 30)


def test_whole_branches_are_left_out_and_the_others_make_up_for_it() -> None:
    layer, branch = nn.Identity(), torch.ones(4000, 2, 3)
    seed_layers(0, 7, 0, torch.device("cpu"))
    kept = leave_out(0.25, layer, (branch,), branch)
    assert torch.equal(kept, kept[:, :1, :1].expand(-1, 2, 3))
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert kept.mean() == pytest.approx(1, abs=0.05)
    seed_layers(0, 7, 0, torch.device("cpu"))
    assert torch.equal(leave_out(0.25, layer, (branch,), branch), kept)  # the step decides
    assert leave_out(0.25, layer.eval(), (branch,), branch) is branch


@pytest.mark.parametrize(("name", "num_blocks"), [("resnet9", 2), ("resnet18", 8), ("vit_s", 12)])
def test_deeper_branches_are_left_out_more_often(name: str, num_blocks: int) -> None:
    plain = ModelConfig(name=name, width=8)
    deep = ModelConfig(name=name, width=8, stochastic_depth=0.6)
    with torch.device("meta"):
        model, expected = build_model(deep, 10, 32), build_model(plain, 10, 32).state_dict()
    assert model.state_dict().keys() == expected.keys()  # weights of others still fit
    hooks = [h for m in model.modules() for h in m._forward_hooks.values()]
    found = sorted({hook.args[0] for hook in hooks if hook.func is leave_out})
    assert found == pytest.approx([0.6 * n / num_blocks for n in range(1, num_blocks + 1)])


def test_models_that_come_with_stochastic_depth_take_the_knob() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name="convnext_tiny", stochastic_depth=0.9), 10, 64)
    found = [m.p for m in model.modules() if type(m).__name__ == "StochasticDepth"]
    assert found == pytest.approx([0.9 * number / 18 for number in range(1, 19)])


def test_training_and_evaluation_differ_by_what_is_left_out() -> None:
    model = build_model(ModelConfig(name="resnet9_gn", width=8, stochastic_depth=0.99), 3, 32)
    images = torch.rand(8, 3, 32, 32)
    with torch.no_grad():
        assert not torch.equal(model(images), model.eval()(images))
        assert torch.equal(model(images), model(images))


def test_a_model_without_branches_or_strides_is_refused() -> None:
    with pytest.raises(UserError, match=r"--model.stochastic-depth 0.1: airbench has no residual"):
        build_model(ModelConfig(name="airbench", width=8, stochastic_depth=0.1), 3, 32)
    with pytest.raises(UserError, match=r"--model.blurpool: airbench has no convolution"):
        build_model(ModelConfig(name="airbench", width=8, blurpool=True), 3, 32)


def test_features_are_blurred_before_each_stride_but_the_first() -> None:
    features = torch.rand(2, 16, 9, 9)
    kernel = torch.outer(*2 * [torch.tensor([1.0, 2.0, 1.0])]).expand(16, 1, 3, 3) / 16
    expected = conv2d(features, kernel, padding=1, groups=16)
    torch.testing.assert_close(blurred(nn.Identity(), (features,)), expected)
    with torch.device("meta"):
        model = build_model(ModelConfig(name="resnet18", blurpool=True), 3, 96)
    hooked = {name for name, m in model.named_modules() if m._forward_pre_hooks}
    assert hooked == {f"layer{n}.0.{last}" for n in (2, 3, 4) for last in ("conv1", "downsample.0")}


def test_a_vit_finds_a_place_again_in_a_larger_image() -> None:
    small, large = positions(2, 2).view(2, 2, -1), positions(6, 2).view(6, 6, -1)
    torch.testing.assert_close(large[1::3, 1::3], small)
    assert small.flatten(0, 1).unique(dim=0).shape == (4, 384)


def test_a_vit_takes_whole_patches_only() -> None:
    with torch.device("meta"):
        with pytest.raises(UserError, match=r"vit_s can't take images of --data.image-size 40"):
            build_model(ModelConfig(name="vit_s"), 3, 40)
        model = build_model(ModelConfig(name="vit_s"), 3, 32)
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
        with pytest.raises(UserError, match="40 is not a multiple of 16"):
            model(torch.zeros(2, 3, 40, 40))
