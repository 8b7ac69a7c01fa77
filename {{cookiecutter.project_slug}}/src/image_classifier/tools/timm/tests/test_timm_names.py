"""Models of timm by name, where that library is installed."""

import pytest
import torch

from image_classifier.config import ModelConfig
from image_classifier.errors import UserError
from image_classifier.models import build_model
from image_classifier.tools.timm import networks


def test_a_model_of_timm_takes_small_images_and_any_number_of_classes():
    pytest.importorskip("timm")
    network = build_model(ModelConfig(name="timm/test_resnet"), 5, 32)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    with pytest.raises(
        UserError, match=r"timm has no model 'test_resnett'; did you mean timm/test"
    ):
        build_model(ModelConfig(name="timm/test_resnett"), 5, 32)


def test_without_timm_one_line_says_what_to_install(monkeypatch):
    def missing(_):
        raise ImportError("No module named 'timm'")

    monkeypatch.setattr(networks, "import_module", missing)
    with pytest.raises(UserError, match=r"^models of timm need it: pip install timm \(No module"):
        build_model(ModelConfig(name="timm/test_resnet"), 5, 32)
