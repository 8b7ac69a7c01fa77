"""`--model.head layers`: the last layer sees several depths; all else is as without it."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch

from image_classifier.config import Config, ModelConfig
from image_classifier.errors import UserError
from image_classifier.models import (
    build_model,
    find_head,
    models_by_name,
)
from image_classifier.tools.head_layers.network import (
    change_training,
)

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def build(name, side=32, **knobs):
    """A small network in evaluation, whose weights do not depend on its head."""
    torch.manual_seed(0)
    return build_model(ModelConfig(name=name, width=8, **knobs), 3, side).eval()


BLOCKS = {
    "resnet9": (["stem", "stage1", "stage2", "stage3"], 0.25),  # and what scales the logits
    "airbench96": (["stages.1", "stages.2", "stages.3"], 1 / 9),
    "resnet18": (["layer1", "layer2", "layer3", "layer4"], 1),
}


def pooled(features):
    """(batch, channels, places) -> mean and maximum, (batch, 2 x channels)."""
    return torch.cat((features.mean(2), features.amax(2)), dim=1)


@pytest.mark.parametrize("name", sorted(BLOCKS.keys() & {*models_by_name(), "resnet18"}))
def test_the_last_layer_gets_mean_and_maximum_of_the_last_block_of_each_size(name):
    blocks, scale = BLOCKS[name]
    model, found = build(name, head="layers"), []
    for block in blocks:
        model.get_submodule(block).register_forward_hook(
            lambda *call: found.append(pooled(call[2].flatten(2)))
        )
    logits = model(IMAGES)
    layer = find_head(model)[1]
    bias = 0 if layer.bias is None else layer.bias
    expected = scale * (torch.cat(found, dim=1) @ layer.weight.T + bias)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_of_a_vision_transformer_it_gets_four_blocks_to_the_last():
    pytest.importorskip("image_classifier.tools.imagenet")
    model, found = build("vit_s", head="layers"), []
    for number in (2, 5, 8, 11):
        model.get_submodule(f"blocks.{number}").register_forward_hook(
            lambda *call: found.append(pooled(call[2].transpose(1, 2)))
        )
    logits, layer = model(IMAGES), find_head(model)[1]
    assert layer.in_features == 4 * 2 * 384
    expected = torch.cat(found, dim=1) @ layer.weight.T + layer.bias
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet9", "swin_t", "densenet121", "vgg11_bn"])
def test_all_other_weights_keep_their_names_and_shapes(name):
    plain, model = build(name, 64), build(name, 64, head="layers")
    head, _ = find_head(plain)
    theirs, ours = (
        {key: weight.shape for key, weight in network.state_dict().items()}
        for network in (plain, model)
    )
    assert theirs.keys() == ours.keys()
    assert {key for key in ours if ours[key] != theirs[key]} == {f"{head}.weight"}


@pytest.mark.parametrize("name", ["resnet9", "swin_t"])  # swin_t has a norm behind its blocks
def test_every_weight_that_learns_has_a_gradient_which_other_ranks_wait_for(name):
    model = build(name, head="layers").train()
    change_training(model, Config(model=ModelConfig(head="layers")))
    model(IMAGES).sum().backward()
    learned = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
    assert all(weight.grad is not None for weight in learned.values())
    frozen = {key for key, _ in model.named_parameters()} - learned.keys()
    assert frozen == ({"norm.weight", "norm.bias"} if name == "swin_t" else set())


@pytest.mark.parametrize("name", ["resnet9", "densenet121"])  # densenet overwrites its features
def test_all_of_it_learns_and_a_copy_has_features_of_its_own(name):
    model = build(name, head="layers").train()
    average = deepcopy(model)
    model(IMAGES).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    expected = model.eval()(IMAGES)
    with torch.no_grad():
        for weight in average.parameters():
            weight.zero_()
    assert not average.eval()(IMAGES).any()
    assert torch.equal(model(IMAGES), expected)


def test_a_network_without_a_linear_last_layer_is_refused():
    with pytest.raises(UserError, match="layers needs a network of blocks with a linear"):
        build("squeezenet1_1", 64, head="layers")


def test_threads_that_share_a_network_do_not_mix_their_images():
    model = build("resnet9", head="layers")
    images = torch.rand(16, 8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    predict = torch.inference_mode()(model)
    alone = [predict(batch) for batch in images]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            together = list(threads.map(predict, images))
            assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_a_copy_that_is_made_while_the_network_computes_has_none_of_its_features():
    model = build("resnet9", head="layers")
    copies = []
    model.stage1.register_forward_hook(lambda *_: copies.append(deepcopy(model)))
    with torch.inference_mode():
        model(IMAGES)
        logits = copies[0].head(torch.zeros(1, model.head.in_features))
    assert torch.equal(logits, model.head.bias[None])
