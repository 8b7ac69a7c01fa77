"""Any network by name, fitted to the images and the classes."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torchvision.models import get_model

from image_classifier.config import ModelConfig, OptimConfig
from image_classifier.errors import UserError
from image_classifier.models import MODELS, build_model, find_head
from image_classifier.optim import build_optimizer
from image_classifier.presets import PRESETS


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
    assert list(model.state_dict()) == list(build_model(ModelConfig(name=name), 3, 64).state_dict())
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    _, head = find_head(model)
    features = torch.ones(2, *head.weight.shape[1:])
    assert not torch.equal(head(features), head(features))
    model.eval()
    assert torch.equal(head(features), head(features))


def test_small_images_keep_their_resolution() -> None:
    small = build_model(ModelConfig(name="resnet18"), 3, 32)
    assert small.conv1.stride == (1, 1)
    assert isinstance(small.maxpool, nn.Identity)
    assert small.enlarged == 4
    assert build_model(ModelConfig(name="vgg11"), 3, 64).enlarged == 1
    for size, stem in ((96, "auto"), (32, "imagenet")):
        large = build_model(ModelConfig(name="resnet18", stem=stem), 3, size)
        assert large.conv1.stride == (2, 2)


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        (ModelConfig(name="alexnet", stem="imagenet"), 16, "alexnet can't take images of"),
        (ModelConfig(name="vit_b_16", stem="small"), 32, "--model.stem small: vit_b_16"),
        (ModelConfig(name="airbench"), 8, "airbench can't take images of --data.image-size 8"),
        (ModelConfig(name="vit_s"), 40, "vit_s can't take images of --data.image-size 40"),
    ],
)
def test_a_model_that_cannot_be_is_refused(model: ModelConfig, size: int, said: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=said):
        build_model(model, 3, size)


# Norms, scales, tokens, positions, biases of places, groups.
FAMILIES = ["resnext50_32x4d", "squeezenet1_1", "convnext_tiny", "swin_v2_t", "vit_b_16"]


@pytest.mark.parametrize("name", [*FAMILIES, *MODELS])
def test_weights_of_layers_decay_and_muon_turns_those_between_stem_and_head(name: str) -> None:
    with torch.device("meta"):
        own = MODELS.get(name, lambda *_: get_model(name, weights=None))
        model = own(ModelConfig(name=name), 10, 32)
    layers, decaying = [], []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layers.append(layer)
            decaying.append(f"{path}.weight")
        elif isinstance(layer, nn.MultiheadAttention):
            decaying.append(f"{path}.in_proj_weight")
    names = {weight: path for path, weight in model.named_parameters()}
    optimizer = build_optimizer(OptimConfig(name="muon"), model)
    found = [[names[weight] for weight in group["params"]] for group in optimizer.param_groups]
    assert found == [decaying, [path for path in names.values() if path not in decaying]]
    assert [group["weight_decay"] > 0 for group in optimizer.param_groups] == [True, False]
    apart = {layers[0].weight, layers[-1].weight}
    apart |= {layer.weight for layer in layers if getattr(layer, "groups", 1) > 1}
    hidden = {path for weight, path in names.items() if weight not in apart} & {*decaying}
    assert {names[weight] for weight in optimizer.hidden} == hidden


class Odd(nn.Module):
    """A network with weights of several dimensions that are no matrices, and one that hides."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(4, 6))
        self.prompts = nn.ParameterList([torch.zeros(4, 6)])
        self.positions = nn.ReLU()  # a layer by its looks
        self.positions.table = nn.Parameter(torch.zeros(1, 4, 6))
        self.positions.bias_table = nn.Parameter(torch.zeros(4, 6))
        self.head = nn.Linear(6, 3)
        self.names = nn.Embedding(5, 6)
        self.fourier = nn.Linear(2, 6)
        self.norm = nn.LayerNorm((2, 6))
        self.gate = nn.Linear(6, 1, bias=False)
        self.spare_head = nn.Linear(6, 3)
        self.normed = weight_norm(nn.Linear(6, 6))
        self.stem = nn.Conv2d(3, 6, 2)
        self.last = nn.Linear(6, 3)

    # As timm's models have them.
    no_weight_decay = staticmethod(lambda: {"fourier.*"})

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """Both heads."""
        return self.head, self.last


def test_what_is_no_matrix_does_not_decay_whatever_its_shape() -> None:
    model = Odd()
    names = {weight: path for path, weight in model.named_parameters()}
    optimizer = build_optimizer(OptimConfig(name="muon"), model)
    hidden = {"spare_head.weight", "normed.parametrizations.weight.original1"}
    assert {names[weight] for weight in optimizer.hidden} == hidden
    decaying = {names[weight] for weight in optimizer.param_groups[0]["params"]}
    assert decaying == hidden | {"head.weight", "stem.weight", "last.weight"}
