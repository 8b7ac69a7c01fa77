"""Published recipes, epoch by epoch, and the vision transformer of one."""

from types import SimpleNamespace

import pytest
import torch

from image_classifier.config import ModelConfig
from image_classifier.errors import UserError
from image_classifier.extensions import finding
from image_classifier.models import build_model
from image_classifier.optim import build_schedule
from image_classifier.tools.imagenet import models
from image_classifier.tools.imagenet.presets import (
    PRESETS,
    imagenet_rn50_88,
    imagenet_vit_s,
)


def test_a_recipe_names_the_tool_that_it_needs(monkeypatch):
    monkeypatch.setattr(finding, "find_tool", lambda *_: None)
    with pytest.raises(UserError, match=r"^imagenet_vit_s needs .*: pretuned add policies$"):
        imagenet_vit_s()
    with pytest.raises(UserError, match=r"imagenet_rn50.* needs .* add progressive-resizing$"):
        imagenet_rn50_88()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_model_of_every_preset_builds(preset):
    pytest.importorskip("image_classifier.tools.policies")
    pytest.importorskip("image_classifier.tools.mixup")
    tool = "progressive_resizing"
    pytest.importorskip(f"image_classifier.tools.{tool}")
    config = preset()
    size = config.data.image_size
    with torch.device("meta"):
        logits = build_model(config.model, 7, size).eval()(torch.zeros(1, 3, size, size))
    assert logits.shape == (1, 7)


def test_recipes_for_imagenet_have_the_rates_and_decay_that_were_published():
    pytest.importorskip("image_classifier.tools.policies")
    pytest.importorskip("image_classifier.tools.mixup")
    module = "tools.progressive_resizing.crops"
    resizing = pytest.importorskip(f"image_classifier.{module}")
    published = {preset.__name__: preset for preset in PRESETS}
    for name, knobs, expected in (  # test size, batch, decay; size and learning rate by epoch
        ("rn50_16", (256, 4096, 1e-4), {2: (160, 1.7), 12: (160, 0.486), 13: (192, 0.364)}),
        ("rn50_88", (256, 4096, 1e-4), {2: (160, 1.7), 68: (160, 0.395), 69: (192, 0.376)}),
        ("vit_s", (224, 1024, 0.1), {4: (224, 5e-4), 8: (224, 1e-3), 49: (224, 5e-4)}),
    ):
        config = published[f"imagenet_{name}"]()
        data, steps = config.data, 1_281_167 // config.data.batch_size
        assert (data.eval_size, data.batch_size, config.optim.weight_decay) == knobs
        whole = torch.zeros(1, data.image_size, data.image_size, 3)
        run = SimpleNamespace(data=data, steps_per_epoch=steps, total_steps=config.epochs * steps)
        crops = resizing.change_crops(lambda images, *_: images, config.augment, run)
        lr_at = build_schedule(config.optim, steps, config.epochs * steps)
        for epoch, (size, lr) in expected.items():
            begin = epoch * steps
            for step in (begin, begin + steps // 2, begin + steps - 1):
                assert crops(whole, None, step).shape == (1, size, size, 3)
            assert lr_at(begin) == pytest.approx(lr, rel=0.01)


def test_a_vit_finds_a_place_again_in_a_larger_image():
    small, large = models.positions(2, 2).view(2, 2, -1), models.positions(6, 2).view(6, 6, -1)
    torch.testing.assert_close(large[1::3, 1::3], small)
    assert small.flatten(0, 1).unique(dim=0).shape == (4, 384)
    with torch.device("meta"):
        model = build_model(ModelConfig(name="vit_s"), 3, 32)
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
        with pytest.raises(UserError, match="vit_s takes images of multiples of 16, not 40"):
            model(torch.zeros(2, 3, 40, 40))
        with pytest.raises(UserError, match=r"takes a --data.image-size in steps of 16, not"):
            build_model(ModelConfig(name="vit_s"), 3, 40)
