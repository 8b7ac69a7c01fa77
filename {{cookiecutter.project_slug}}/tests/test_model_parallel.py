"""The example of docs/model_parallel.md: halves of a network on two devices."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import run_ranks
from torch import nn

from image_classifier.config import (
    ComputeConfig,
    ModelConfig,
    OptimConfig,
)
from image_classifier.data import Augmented
from image_classifier.models import build_model
from image_classifier.runtime.distributed import join_world
from image_classifier.tasks import Loss, class_loss

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="docs/examples is not there")
IMAGES = 8


def example():
    """The module of the example."""
    sys.path.insert(0, str(EXAMPLES))
    import model_parallel

    return model_parallel


def network():
    """A ResNet whose BatchNorm does not see the batch, so it does not see how that is divided."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="resnet18"), 10, 224)  # which halves 32 pixels at once
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    return model.to(memory_format=torch.channels_last)


def batch():
    """Images, channels_last as in training, and labels."""
    torch.manual_seed(1)
    images = torch.randn(IMAGES, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(10, (IMAGES,))


def gradients_of(model):
    """The gradients of a network by the name of the weight."""
    return {name: weight.grad for name, weight in model.named_parameters()}


@cache
def whole():
    """Loss and gradients of the network on one device."""
    model, (images, labels) = network(), batch()
    loss = class_loss(OptimConfig(), IMAGES)(model(images), Augmented(None, labels))
    loss.backward()
    return loss.item(), gradients_of(model)


def of_rank(schedule, micro_batches):
    """Loss, or None, and gradients of this rank's half."""
    loss_fn = Loss(class_loss(OptimConfig(), IMAGES))
    with join_world(ComputeConfig(device="cpu")) as world:
        half, step = example().pipeline_step(network(), world, loss_fn, schedule, micro_batches)
        loss = step(*batch())
        return loss and loss.item(), gradients_of(half)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_split_network_has_the_gradients_of_the_whole(micro_batches):
    model, (images, labels) = network(), batch()
    split = example().Split(model, [torch.device("cpu")] * 2, micro_batches)
    loss = class_loss(OptimConfig(), IMAGES)(split(images), Augmented(None, labels))
    loss.backward()
    torch.testing.assert_close((loss.item(), gradients_of(model)), whole())
    assert [*split.first.state_dict(), *split.second.state_dict()] == [*model.state_dict()]


@pytest.mark.parametrize(("schedule", "micro_batches"), [("gpipe", 4), ("1f1b", 2)])
def test_a_pipeline_of_two_ranks_has_the_gradients_of_the_whole(schedule, micro_batches):
    (no_loss, first), (loss, second) = run_ranks(2, of_rank, schedule, micro_batches)
    assert no_loss is None
    torch.testing.assert_close((loss, first | second), whole())
