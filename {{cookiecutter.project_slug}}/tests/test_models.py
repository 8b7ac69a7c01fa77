"""Any network by name, fitted to the images and the classes."""

import pytest
import torch
from torch import Tensor, nn

from image_classifier.config import Config, ModelConfig, UserError
from image_classifier.models import build_model
from image_classifier.precision import Precision
from image_classifier.presets import PRESETS
from image_classifier.summary import cost_of


@pytest.mark.parametrize("name", PRESETS)
def test_the_model_of_every_preset_builds(name: str) -> None:
    config = PRESETS[name]()
    size = config.data.image_size
    with torch.device("meta"), torch.inference_mode():
        logits = build_model(config.model, 7, size).eval()(torch.zeros(1, 3, size, size))
    assert logits.shape == (1, 7)


# One of each kind of head and of first layer.
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "squeezenet1_1", "googlenet"])
def test_models_of_torchvision_get_a_head_and_dropout(name: str) -> None:
    model = build_model(ModelConfig(name=name, dropout=0.5), 3, 64)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    assert any(isinstance(layer, nn.Dropout) and layer.p == 0.5 for layer in model.modules())


def test_small_images_keep_their_resolution() -> None:
    small = build_model(ModelConfig(name="resnet18"), 3, 32)
    assert small.conv1.stride == (1, 1)
    assert isinstance(small.maxpool, nn.Identity)
    large = build_model(ModelConfig(name="resnet18"), 3, 96)
    assert large.conv1.stride == (2, 2)
    forced = build_model(ModelConfig(name="resnet18", stem="imagenet"), 3, 32)
    assert forced.conv1.stride == (2, 2)


@pytest.mark.parametrize(("name", "enlarged"), [("resnet18", 4), ("vgg11", 1)])
def test_full_resolution_costs_what_is_said_of_it(config: Config, name: str, enlarged: int) -> None:
    precision = Precision("fp32", config.compute, config.optim, torch.device("meta"))
    flops = {}
    for stem, size in (("auto", 64), ("imagenet", 64), ("imagenet", 128)):
        with torch.device("meta"):
            model = build_model(ModelConfig(name=name, stem=stem), 10, size)
        flops[stem, size] = cost_of(model, size, precision).flops
        assert getattr(model, "enlarged", 1) == (enlarged if stem == "auto" else 1)
    assert flops["auto", 64] / flops["imagenet", 64] == pytest.approx(enlarged**2, rel=0.2)
    times = (enlarged * 64 / 128) ** 2
    assert flops["auto", 64] / flops["imagenet", 128] == pytest.approx(times, rel=0.2)


@pytest.mark.parametrize("name", ["resnet9", "airbench96"])
def test_gradients_are_laid_out_as_the_maps_are(name: str) -> None:
    model = build_model(ModelConfig(name=name, width=8), 3, 32)
    model.to(memory_format=torch.channels_last)
    agrees = []

    def watch(_layer: nn.Module, _inputs: tuple[Tensor], maps: Tensor) -> None:
        maps.register_hook(lambda gradient: agrees.append(gradient.stride() == maps.stride()))

    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(watch)
    images = torch.rand(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    model(images).sum().backward()
    assert agrees
    assert all(agrees)


def test_a_wrong_name_says_which_is_right() -> None:
    with pytest.raises(UserError, match=r"no model 'resnt18'; did you mean resnet18"):
        build_model(ModelConfig(name="resnt18"), 3, 32)


def test_a_model_that_cannot_take_the_images_is_refused() -> None:
    with pytest.raises(UserError, match=r"alexnet can't take images of --data.image-size 16"):
        build_model(ModelConfig(name="alexnet", stem="imagenet"), 3, 16)


def test_a_stem_that_cannot_be_small_is_refused() -> None:
    with torch.device("meta"), pytest.raises(UserError, match=r"--model.stem small: vit_b_16"):
        build_model(ModelConfig(name="vit_b_16", stem="small"), 3, 32)
