"""Heat lies where the evidence for a class is known to be, and nothing else of a run changes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import Shown, changed, tiny, untrained_run
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import VisionTransformer

from image_classifier.cli import main
from image_classifier.config import ModelConfig
from image_classifier.data import open_dataset, walk
from image_classifier.errors import UserError
from image_classifier.extensions import find_tool
from image_classifier.models import build_model
from image_classifier.tools.explain import files, heat
from image_classifier.train import train

SIDE, SQUARE = 32, 8  # in pixels
predict, galleries = find_tool("predict", "predict"), find_tool("galleries", "report")
VIT = find_tool("models", "imagenet")


def squares(seed, count=32):
    """Noise with two squares; their colors are classes, and `boxes` are their places."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    colors = torch.rand(count, 3, generator=generator).argsort(1)[:, :2]
    corners = torch.randint(0, SIDE - SQUARE + 1, (count, 2, 2), generator=generator)
    boxes = torch.zeros(2, count, SIDE, SIDE, dtype=torch.bool)
    for index in range(count):
        for number, (row, column) in enumerate(corners[index]):
            box = slice(row, row + SQUARE), slice(column, column + SQUARE)
            boxes[number, index][box] = True
            images[index, colors[index, number]][box] += 1.5
    return images, colors, boxes


def taught(model, steps, lr):
    """`model`, trained to name both colors of each image."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for step in range(steps):
        images, colors, _ = squares(step)
        logits = model(images)
        targets = torch.zeros_like(logits).scatter(1, colors, 1.0)
        binary_cross_entropy_with_logits(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def resnet9(_=None):
    torch.manual_seed(0)
    return build_model(ModelConfig(name="resnet9", width=8), 3, SIDE)


def mean_of_patches(monkeypatch):
    if VIT is None:
        pytest.skip("needs the tool imagenet")
    for name, value in {"WIDTH": 48, "DEPTH": 2, "HEADS": 3, "PATCH": 4}.items():
        monkeypatch.setattr(VIT, name, value)
    torch.manual_seed(0)
    return VIT.ViT(3, SIDE, channels=3)


def class_token(_):
    torch.manual_seed(0)
    return VisionTransformer(SIDE, 4, 2, 3, 48, 96, num_classes=3)


@pytest.mark.parametrize("build", [resnet9, mean_of_patches, class_token])
def test_heat_lies_on_the_evidence_for_the_class_that_is_asked_for(build, monkeypatch):
    model, (images, colors, boxes) = build(monkeypatch), squares(10**6)
    taught(model, 40, 3e-3)
    areas = boxes.float().mean((2, 3))
    for own, other in ((0, 1), (1, 0)):
        maps = heat.heat_maps(model, images, colors[:, own])
        assert maps.shape == (len(images), SIDE, SIDE)
        assert set(maps.amin((1, 2)).tolist() + maps.amax((1, 2)).tolist()) == {0, 1}
        # The share of the heat in each square, in multiples of the square's share of the area.
        on = ((maps * boxes).sum((2, 3)) / maps.sum((1, 2)) / areas).mean(1)
        assert on[own] > 3
        assert on[other] < 0.75 * on[own]


# https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
REFUSED = r"median\.dim|kthvalue|histc|put_|scatter_reduce|max_unpool"
REFUSED += r"|(_adaptive_|grid_sampler_|reflection_pad|upsample_\w*(linear|cubic)).*backward"


@pytest.mark.parametrize("build", [resnet9, mean_of_patches, class_token])
def test_maps_take_no_operation_that_a_deterministic_run_refuses_on_a_gpu(build, monkeypatch):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, _, args=(), kwargs=None):
            called.add(str(operation).removeprefix("aten."))
            return operation(*args, **(kwargs or {}))

    model, (images, colors, _) = build(monkeypatch), squares(0)
    called = set()
    with Watch():
        heat.heat_maps(model, images, colors[:, 0])
    assert any("backward" in name for name in called) == (build != resnet9)  # its head is linear
    assert not [name for name in called if re.match(REFUSED, name)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("build", [resnet9, mean_of_patches, class_token])
def test_a_deterministic_run_has_maps_on_a_gpu(build, monkeypatch):
    model, (images, colors, _) = build(monkeypatch).cuda(), squares(0)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        maps = [heat.heat_maps(model, images.cuda(), colors[:, 0].cuda()) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert maps[0].equal(maps[1])


def test_a_map_is_what_captum_multiplies():
    captum = pytest.importorskip("captum.attr")
    model, (images, colors, _) = resnet9().eval(), squares(0)
    found = heat.heat_maps(model, images, colors[:, 0])
    # Features after a ReLU: the positive part of the product is that of the gradient.
    layer = captum.LayerGradientXActivation(model, model.stage3)
    maps = layer.attribute(images, target=colors[:, 0]).relu().sum(1, keepdim=True)
    maps = interpolate(maps.detach(), (SIDE, SIDE), mode="bilinear")[:, 0]
    maps = maps - maps.amin((1, 2), keepdim=True)
    torch.testing.assert_close(found, maps / maps.amax((1, 2), keepdim=True))


def test_heat_is_where_it_is_in_features_whose_channels_are_last():
    class Last(nn.Module):
        def forward(self, images):
            return images.permute(0, 2, 3, 1)

    images = torch.zeros(1, 5, 8, 8)
    images[0, 1, 2, 6] = 1
    model = nn.Sequential(Last(), nn.Flatten(), nn.Linear(5 * 64, 2))
    nn.init.ones_(model[2].weight)
    assert heat.heat_maps(model, images, torch.tensor([0])).argmax() == 2 * 8 + 6


def test_queries_of_heads_and_tokens_are_no_map():
    class Heads(nn.Module):
        def forward(self, images):
            tokens = self.patches(images.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).flatten(2, 3))
            queries = self.queries(tokens.unflatten(3, (2, 4)).permute(0, 3, 2, 1, 4).flatten(3))
            return self.head(queries.mean(2).flatten(1))

    model = Heads()
    model.patches = nn.Linear(16, 8)
    model.queries = nn.Identity()  # gives (batch, heads, tokens, 12)
    model.head = nn.Linear(24, 3)
    with pytest.raises(UserError, match="Heads has no layer that returns a map of features"):
        heat.heat_maps(model, torch.rand(2, 3, 32, 32), torch.zeros(2, dtype=torch.long))


def test_images_of_16_bits_are_painted_as_those_of_8():
    pixels = torch.randint(256, (2, 4, 4, 3), generator=torch.Generator().manual_seed(0))
    deep = (257 * pixels).to(torch.uint16)
    assert heat.painted(deep, torch.zeros(2, 4, 4)).equal(
        heat.painted(pixels.byte(), torch.zeros(2, 4, 4))
    )


def test_the_model_stays_as_it_was_and_blocks_around_change_no_map():
    model, (images, colors, _) = resnet9(), squares(0)
    frozen = resnet9().requires_grad_(False)
    no_map = nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), 3))
    model.stage1.eval()  # such as frozen BatchNorm layers
    model.head.weight.requires_grad_(False)

    def state():
        flags = [layer.training for layer in model.modules()]
        hooks = [len(layer._forward_hooks) for layer in model.modules()]
        wants = [(weight.requires_grad, weight.grad) for weight in model.parameters()]
        return flags, hooks, wants, torch.get_rng_state().tolist()

    before, weights = state(), {k: v.clone() for k, v in model.state_dict().items()}
    maps = heat.heat_maps(model, images, colors[:, 0])
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert heat.heat_maps(model, images + 0, colors[:, 0]).equal(maps)
    assert heat.heat_maps(frozen, images, colors[:, 0]).equal(maps)
    with pytest.raises(UserError, match="Sequential has no layer that returns a map"):
        heat.heat_maps(no_map, images, colors[:, 0])
    assert no_map.training
    assert not no_map[1]._forward_hooks
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert state() == before


def test_a_page_shows_padded_images_where_the_model_sees_those(on_photos, monkeypatch):
    data = changed(on_photos, data__fit="pad", data__image_size=64).data
    source = open_dataset(data, "val")
    maps = torch.zeros(len(source), 64, 64)
    maps[1] = 1
    blank = Mock(return_value=maps)
    monkeypatch.setattr(heat, "heat_maps", blank)
    normalize = Mock(scale=torch.ones(1), side_effect=torch.Tensor.float)
    shown = heat.open_explainer(None, normalize, SimpleNamespace(data=data, source=source))
    classes = [0, 1, 1, 0]
    pictures = shown([*range(len(source))], classes)
    top = pictures[0, 0]  # of an image that is wide
    assert (top == top[0]).all()
    colored = pictures.int().amax(3) > pictures.int().amin(3)
    assert colored.flatten(1).any(1).tolist() == [False, True, False, False]
    assert blank.call_args.args[2].tolist() == classes
    assert blank.call_args.args[1][0, :, 0].std(1).max() == 0
    normalize.assert_called_once()
    images = blank.call_args.args[1]
    shown([2, 0, 3, 1], classes)
    assert blank.call_args.args[1].equal(images[[2, 0, 3, 1]])


def test_pictures_of_predict_are_of_images_as_the_network_gets_them(tmp_path, monkeypatch):
    blank = Mock(return_value=torch.zeros(2, 4, 4))
    monkeypatch.setattr(heat, "heat_maps", blank)
    trained = Mock(normalize=lambda images: images / 255 - 0.5)
    images = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    long = f"b/1 \n$({'x' * 250}.jpg"
    rows = [{"path": "a/1.jpg", "error": None}, {"path": long, "error": None}]
    files.write_pictures(tmp_path, trained, images, torch.tensor([1, 0]), rows, 8)
    assert (blank.call_args.args[1] == 0.5).all()
    names = {"0009-1.png", f"0010-1_{'x' * 48}.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    images[:, :, 0] = 0  # the upper row is black
    files.write_pictures(tmp_path, trained, images, torch.tensor([1, 0]), rows, 8)
    with Image.open(tmp_path / "0009-1.png") as image:
        assert [image.getpixel(place)[0] > 0 for place in ((3, 0), (0, 3))] == [False, True]


@pytest.mark.usefixtures("pages")
@pytest.mark.skipif(not galleries, reason="tools/report was deleted")
def test_a_run_shows_it_beside_its_mistakes_and_is_the_same_without_it(tmp_path, monkeypatch):
    def pictures(name):
        train(tiny(tmp_path / name))
        text = Path(tmp_path, name, "report.html").read_text(encoding="utf-8")
        assert len(text) < 800_000
        return Shown(text)

    def weights(name):
        return load_file(tmp_path / name / "checkpoints/best.safetensors")

    small = pictures("small")
    assert "No heat maps: they say little of images of 32 pixels" in small.words
    monkeypatch.setattr(heat, "SMALLEST", 32)
    with_it = pictures("a")
    assert galleries.HEAT in with_it.words
    monkeypatch.setattr(heat, "heat_maps", Mock(side_effect=UserError("no map")))
    failed = pictures("b")
    assert "No heat maps: no map" in failed.words
    monkeypatch.setattr(find_tool("observer", "report"), "function", lambda *_: None)
    without = pictures("c")
    assert galleries.HEAT not in without.words
    assert len(with_it.pictures) == len(without.pictures) + galleries.PICTURES
    assert set(with_it.pictures) > set(without.pictures) == set(failed.pictures)
    torch.testing.assert_close(weights("a"), weights("c"), rtol=0, atol=0)


@pytest.mark.skipif(not predict, reason="tools/predict was deleted")
def test_predict_writes_a_picture_for_each_image(tmp_path, photos, monkeypatch, refusal):
    run = untrained_run(tiny(tmp_path / "run"), photos)
    bad, out, folder = tmp_path / "x.jpg", tmp_path / "x.csv", tmp_path / "new/heat"
    bad.write_bytes(b"")
    words = ["predict", run, str(bad), str(photos / "val"), str(photos / "val/ant/12.jpg")]
    words += ["--device", "cpu", "--workers", "0", "--batch-size", "4"]
    explain = ["--explain", str(folder)]
    assert main([*words, "--out", str(out)]) == 0
    rows = out.read_bytes()
    assert main([*words, *explain, "--out", str(out), "--fresh"]) == 0
    assert out.read_bytes() == rows
    assert not [*walk(bytes(folder.parent))]  # they are of no class
    names = [path.name for path in sorted(folder.glob("*.png"))]
    assert names == ["0002-12.png", "0003-14.png", "0004-13.png", "0005-15.png", "0006-12.png"]
    shown = {path: path.read_bytes() for path in folder.glob("*.png")}
    for path in shown:
        path.unlink()
    assert main([*words, *explain]) == 0
    assert {path: path.read_bytes() for path in folder.glob("*.png")} == shown
    with Image.open(next(iter(shown))) as image:
        assert (image.mode, image.size) == ("RGB", (32, 32))
    files.open_folder(folder, files.MOST)
    monkeypatch.setattr(files, "MOST", 3)
    assert "of 3 at most: there are 6" in refusal(*words, *explain)
    monkeypatch.undo()
    assert "--explain '/proc/x'" in refusal(*words, "--explain", "/proc/x")


def test_a_folder_that_has_images_stays_a_class(tmp_path):
    (tmp_path / "1.jpg").touch()
    files.open_folder(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["1.jpg"]


def test_places_are_the_more_in_color_the_hotter_they_are_and_cold_ones_are_gray():
    pixels = torch.tensor([[[[40, 80, 120]] * 3]], dtype=torch.uint8)
    cold, warm, hot = heat.painted(pixels, torch.tensor([[[0.0, 0.5, 1.0]]]))[0, 0].int()
    assert len(cold.unique()) == 1
    far = [int((torch.tensor(heat.COLOR) - color).abs().sum()) for color in (cold, warm, hot)]
    assert far[0] > far[1] > far[2]


@pytest.mark.skipif(not predict, reason="tools/predict was deleted")
def test_the_heat_of_predict_is_that_of_the_class_that_it_names(tmp_path, photos, monkeypatch):
    blank = Mock(side_effect=lambda _, images, __: torch.zeros(len(images), SIDE, SIDE))
    monkeypatch.setattr(heat, "heat_maps", blank)
    run = untrained_run(tiny(tmp_path / "run"), photos)
    words = ["predict", run, str(photos / "train"), "--device", "cpu", "--workers", "0"]
    words += ["--explain", str(tmp_path / "heat"), "--out", str(tmp_path / "x.jsonl")]
    assert main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    classes = [number for call in blank.call_args_list for number in call.args[2].tolist()]
    assert 1 in classes
    assert [("ant", "bee")[number] for number in classes] == [row["label"] for row in rows]
