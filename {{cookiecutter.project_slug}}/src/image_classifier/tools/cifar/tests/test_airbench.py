"""The networks of airbench, whose first layer whitens the training images."""

from types import SimpleNamespace

import pytest
import torch
from conftest import changed

from image_classifier.config import ModelConfig
from image_classifier.errors import UserError
from image_classifier.extensions import finding
from image_classifier.models import build_model
from image_classifier.runtime.command_line import take_preset
from image_classifier.tools.cifar.models import Airbench
from image_classifier.tools.cifar.presets import cifar10_speed
from image_classifier.train import init_model, train


def test_what_they_cannot_take_is_refused():
    for knobs, size, said in (
        ({}, 8, "takes a --data.image-size from 9 on, not 8"),
        ({"drop_path": 0.1}, 32, "has no stochastic depth: --model.drop-path 0"),
    ):
        with torch.device("meta"), pytest.raises(UserError, match=f"airbench {said}"):
            build_model(ModelConfig(name="airbench", **knobs), 3, size)


def test_the_first_layer_whitens_the_training_images(config):
    gray, noise = torch.randn((2, 400, 3, 12, 12), generator=torch.Generator().manual_seed(0))
    images = gray[:, :1] + gray[:, :1].roll(1, 3) + noise / 2  # pixels and colors are alike
    data = SimpleNamespace(num_classes=7, sample=lambda count: images[:count])
    config = changed(config, model__name="airbench", data__image_size=12)
    layer = init_model(config, data, lambda images: images).whiten
    assert not layer.weight.requires_grad
    outputs = layer(images).transpose(0, 1).flatten(1)  # (filters, places)
    expected = torch.kron(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.eye(12))
    torch.testing.assert_close(outputs @ outputs.T / outputs.shape[1], expected, atol=0.01, rtol=0)


def test_a_run_resumes_with_the_first_layer_that_it_had(config, monkeypatch):
    fast = changed(config, model__name="airbench", model__width=8)
    scores = train(fast)
    monkeypatch.setattr(Airbench, "fit", lambda model, _: model.whiten.weight.data.zero_())
    assert train(fast).known == scores.known


@pytest.mark.parametrize("gone", ["muon", "progressive-resizing"])
def test_a_recipe_names_the_tool_that_it_needs(monkeypatch, gone):
    monkeypatch.setattr(finding, "find_tool", lambda _, name: None if name == gone else name)
    with pytest.raises(UserError, match=f"^cifar10_speed needs .*: pretuned add {gone}$"):
        cifar10_speed()


def test_the_preset_shapes_trains_one():
    _, preset = take_preset(["shapes"], "")
    assert (preset.model.name, preset.model.width) == ("airbench", 32)
