"""Any network by name, fitted to the images and the classes; published recipes."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from image_classifier.config import (
    Config,
    ModelConfig,
    OptimConfig,
)
from image_classifier.errors import UserError
from image_classifier.models import (
    adapted,
    blocks,
    build_model,
    find_head,
    load_weights,
    models_by_name,
)
from image_classifier.models.blocks import drop_before_head
from image_classifier.optim import build_optimizer
from image_classifier.precision import Precision
from image_classifier.presets import PRESETS


@pytest.mark.parametrize("preset", PRESETS.values())
def test_the_model_of_every_preset_builds(preset):
    model, size = preset().model, preset().data.image_size
    with torch.device("meta"):
        logits = build_model(model, 7, size).eval()(torch.zeros(1, 3, size, size))
    assert logits.shape == (1, 7)


def test_models_of_torchvision_get_a_head_dropout_and_blocks():
    for name, head in (("mobilenet_v3_small", "classifier.3"), ("squeezenet1_1", "classifier.1")):
        model = build_model(ModelConfig(name=name, dropout=0.5), 3, 64)
        found, layer = blocks.find_head(model)
        assert found == head  # dropout before it changes no names
        features = torch.ones(2, *layer.weight.shape[1:])
        assert layer(features).shape[:2] == (2, 3)
        assert not torch.equal(layer(features), layer(features))
        model.eval()
        assert torch.equal(layer(features), layer(features))


def test_dropout_is_before_both_heads_of_a_distilled_network():
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.head_dist = nn.Linear(4, 3)

        def get_classifier(self):
            return self.head, self.head_dist

    network = Distilled()
    drop_before_head(network, 1.0)
    for head in (network.head, network.head_dist):
        assert torch.equal(head(torch.ones(4)), head.bias)
        assert not torch.equal(head.eval()(torch.ones(4)), head.bias)


def test_filters_of_images_alone_are_channels_last():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.Linear(2, 2))
    config = Config()
    Precision("fp32", config.compute, config.optim, torch.device("cpu")).place(network)
    flat, deep, _ = (layer.weight for layer in network)
    assert flat.is_contiguous(memory_format=torch.channels_last)
    assert deep.is_contiguous()


def test_small_images_keep_their_resolution():
    with torch.device("meta"):
        for size, stride, pool in ((65, 2, nn.MaxPool2d), (64, 1, nn.Identity)):
            model = build_model(ModelConfig(name="resnet18"), 3, size)
            assert model.conv1.stride == (stride, stride)
            assert isinstance(model.maxpool, pool)


def test_a_network_whose_branches_shrink_alike_keeps_its_first_layers():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Conv2d(3, 4, 3, stride=2, padding=1)
            self.narrow = nn.Conv2d(3, 4, 1, stride=2)

        def forward(self, images):
            return (self.wide(images) + self.narrow(images)).mean((2, 3))

    network = adapted(Branches(), ModelConfig(name="branches"), 32, 3)
    assert network.wide.stride == (2, 2)
    assert network.training


def test_a_model_that_cannot_be_is_refused():
    with torch.device("meta"), pytest.raises(UserError, match="alexnet can't take images of"):
        build_model(ModelConfig(name="alexnet"), 3, 16)


@pytest.mark.parametrize(("width", "groups"), [(8, 8), (12, 4), (9, 1)])
def test_groups_of_channels_fit_any_width(width, groups):
    model = build_model(ModelConfig(name="resnet9_gn", width=width), 3, 32)
    found = [layer.num_groups for layer in model.modules() if isinstance(layer, nn.GroupNorm)]
    assert found[0] == groups
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_a_network_that_fails_on_images_of_that_size_is_refused():
    network = nn.Conv2d(3, 4, 1)
    network.register_forward_hook(lambda *_: 1 % 0)
    with pytest.raises(UserError, match="resnet18 can't take images of"):
        adapted(network, ModelConfig(name="resnet18"), 32, 3)


def test_a_network_that_fails_without_a_word_is_refused_with_the_kind_of_error():
    network = nn.Conv2d(3, 4, 1)
    network.register_forward_hook(lambda *_: next(iter(())))
    with pytest.raises(UserError, match="StopIteration"):
        adapted(network, ModelConfig(name="resnet18"), 32, 3)


def test_a_network_that_needs_a_version_of_its_weights_takes_those_of_a_file():
    network = build_model(ModelConfig(name="mnasnet0_5"), 3, 32)
    weights = {name: torch.zeros_like(weight) for name, weight in network.state_dict().items()}
    load_weights(network, weights)
    assert_close(dict(network.state_dict()), weights)


# Norms, scales, tokens, positions, biases of places, groups.
@pytest.mark.parametrize(
    "name", ["resnext50_32x4d", "convnext_tiny", "swin_v2_t", *models_by_name()]
)
def test_weights_of_layers_decay(name):
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), 10, 32)
    layers = [m for m in model.named_modules() if isinstance(m[1], nn.Linear | nn.Conv2d)]
    decaying = [f"{path}.weight" for path, _ in layers]
    names = {weight: path for path, weight in model.named_parameters()}
    optimizer = build_optimizer(OptimConfig(), model)
    found = [[names[weight] for weight in group["params"]] for group in optimizer.param_groups]
    assert found == [decaying, [path for path in names.values() if path not in decaying]]
    assert [group["weight_decay"] > 0 for group in optimizer.param_groups] == [True, False]


DEEP = [*{"vit_s"} & models_by_name().keys()]


@pytest.mark.parametrize("name", ["convnext_tiny", *DEEP])
def test_stochastic_depth_skips_branches_in_training_alone(name):
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name, drop_path=0.9), 3, 32)
    nn.init.normal_(find_head(model)[1].weight)
    one, other = model.train()(images := torch.randn(2, 3, 32, 32)), model(images)
    assert not torch.equal(one, other)
    assert torch.equal(model.eval()(images), model(images))
    for other in ("swin_t", "efficientnet_b0"):  # in torchvision's Swin it is no option
        network = build_model(ModelConfig(name=other, drop_path=0.1), 3, 64)
        rates = [m.p for m in network.modules() if type(m).__name__ == "StochasticDepth"]
        assert rates == sorted(rates)
        assert rates[-1] == pytest.approx(0.1)
    for other in ("resnet9", "resnet18"):
        with pytest.raises(UserError, match=f"{other} has no stochastic depth: --model.drop-path"):
            build_model(ModelConfig(name=other, drop_path=0.1), 3, 32)
