"""Images of any number of channels and of 16 bits: read, fitted, moved, measured and learned."""

import contextlib
import io
import signal
import struct
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import (
    GROWING,
    changed,
    mixed,
    on_deep,
    read_image,
    run_alone,
    run_ranks,
    train_until,
    write_deep,
)
from PIL import Image
from safetensors.torch import save_file
from test_order import opened, seen
from test_resume import assert_same, final
from torch import nn

from image_classifier.checkpoints.pretrained import (
    PretrainedWeights,
    load_pretrained,
)
from image_classifier.config import (
    AugmentConfig,
    Config,
    ModelConfig,
    RunConfig,
)
from image_classifier.data import (
    decode,
    fit_square,
    shift_and_flip,
)
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.source import Source
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.data.samples import Samples
from image_classifier.errors import UserError
from image_classifier.models import build_model, models_by_name
from image_classifier.preprocess import Normalize
from image_classifier.runtime.distributed import World
from image_classifier.train import train

CPU = World(torch.device("cpu"))
NOISE = np.random.default_rng(0)
DEEP = NOISE.integers(65536, size=(12, 9, 5), dtype=np.uint16)
COLOR = Image.fromarray(NOISE.integers(256, size=(4, 3, 3), dtype=np.uint8)).resize((40, 24))
RGB, GRAY = np.asarray(COLOR), np.asarray(COLOR.convert("L"))[:, :, None]
RGB16 = RGB.astype(np.uint16) * 256 + 77


def saved(image, form, **options):
    """An image in a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png16(pixels):
    """Colors of 16 bits in a PNG file, as other programs write them."""
    height, width, _ = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


GRAY16 = RGB16[:, :, :1]
GRAY_PNG = saved(Image.fromarray(GRAY16[:, :, 0]), "PNG")
JPEG = saved(COLOR, "JPEG", quality=95)


READ = {
    "a JPEG in gray": (
        lambda: JPEG,
        1,
        8,
        np.asarray(Image.open(io.BytesIO(JPEG)).convert("L"))[:, :, None],
    ),
    "a PNG in gray": (lambda: saved(COLOR, "PNG"), 1, 8, GRAY),
    "a PNG in gray and deep": (lambda: saved(COLOR, "PNG"), 1, 16, GRAY.astype(np.uint16) * 257),
    "a deep PNG of bytes": (lambda: saved(COLOR, "PNG"), 3, 16, RGB.astype(np.uint16) * 257),
    "gray 16.png": (lambda: GRAY_PNG, 1, 16, GRAY16),
    "gray 16.png as bytes": (lambda: GRAY_PNG, 1, 8, (GRAY16 >> 8).astype(np.uint8)),
    "gray 16.png in color": (lambda: GRAY_PNG, 3, 16, GRAY16.repeat(3, axis=2)),
    "gray 16.tif": (lambda: saved(Image.fromarray(GRAY16[:, :, 0]), "TIFF"), 1, 16, GRAY16),
    "alpha.png": (
        lambda: saved(COLOR.convert("RGBA"), "PNG"),
        4,
        8,
        np.asarray(COLOR.convert("RGBA")),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_has_the_channels_and_bits_that_are_asked_for(name, tmp_path):
    file, channels, bits, expected = READ[name]
    (tmp_path / "x.png").write_bytes(file())
    pixels = read_image(tmp_path / "x.png", channels, bits).numpy()
    assert pixels.dtype == expected.dtype
    if file() == JPEG:  # the luminance itself, which Pillow takes from the colors again
        assert np.abs(pixels.astype(int) - expected).max() <= 3
    else:
        assert np.array_equal(pixels, expected)


REFUSED = {
    "color 16.png": (lambda: png16(RGB16), 3, "of its 16-bit colors only 8 bits can be read"),
    "JPEG": (lambda: JPEG, 5, "it has 3 channels, not 5: --data.channels 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_such_image_is_refused_in_a_line(name, tmp_path):
    file, channels, message = REFUSED[name]
    path = tmp_path / "x.png"
    path.write_bytes(file())
    with pytest.raises(decode.BadImageError, match=f"x.png': .*{message}") as error:
        read_image(path, channels, 16)
    assert "\n" not in str(error.value)


def test_an_object_at_the_edge_is_seen_unless_it_is_cut_off():
    wide = torch.full((20, 100, 5), 1000, dtype=torch.uint16)
    wide[:, 90:] = 60_000
    squares = {}
    for fit in ("crop", "squash", "pad"):
        squares[fit] = torch.zeros(40, 40, 5, dtype=torch.uint16)
        fit_square(wide, squares[fit], fit, (0.5,) * 5)
    crop, squash, pad = (square.int() for square in squares.values())
    assert (crop == 1000).all()
    assert (squash[:, 37:] == 60_000).all()
    assert (pad[16:24, 37:] == 60_000).all()
    bars = torch.cat((pad[:16], pad[24:]))
    assert ((bars - 0.5 * 65535).abs() <= 0.5).all()  # 0 once it is normalized


def test_an_image_that_becomes_one_column_or_row_is_scaled_along_it():
    tall = torch.linspace(0, 65_535, 1000)[:, None, None].repeat(1, 20, 1).to(torch.uint16)
    squares = []
    for pixels in (tall, tall.transpose(0, 1)):
        squares.append(torch.zeros(32, 32, 1, dtype=torch.uint16))
        fit_square(pixels, squares[-1], "pad", (0.0,))
    column, row = (square.int().sum((1 - side, 2)) for side, square in enumerate(squares))
    assert (column.diff() > 1500).all()
    torch.testing.assert_close(column, row, rtol=0, atol=1)


@pytest.mark.parametrize("channels", [1, 5])
def test_numbers_of_16_bits_are_moved_as_they_are(channels):
    images = torch.from_numpy(NOISE.integers(65536, size=(6, 12, 10, channels), dtype=np.uint16))
    shifts, mirrored = torch.randint(-2, 3, (6, 2)), torch.arange(6) % 2 == 1
    rows = torch.tensor([5, 0, 3, 3, 1, 2])
    expected = shift_and_flip(images.int(), shifts, mirrored, rows)
    assert torch.equal(shift_and_flip(images, shifts, mirrored, rows).int(), expected)


@pytest.fixture(scope="module")
def medical(tmp_path_factory):
    """Gray PNGs of 16 bits."""
    save = lambda path, pixels: Image.fromarray(pixels[..., 0]).save(f"{path}.png")  # noqa: E731
    return write_deep(tmp_path_factory.mktemp("medical"), 1, save)


MEDICAL = {"augment__crop": "pad", "data__where": "device", "data__fit": "squash"}
MEDICAL |= {"augment__tta": "shift", "epochs": 4} | GROWING | mixed(cutout=4)
SATELLITE = {"augment__crop": "resized", "data__where": "stream", "data__fit": "pad"}
SATELLITE |= {"augment__flip": "alternating", "data__workers": 0} | mixed(mixup=0.5)


@pytest.mark.parametrize(
    ("kind", "channels", "knobs"), [("medical", 1, MEDICAL), ("satellite", 5, SATELLITE)]
)
def test_a_run_is_the_same_killed_and_on_two_ranks(
    kind, channels, knobs, *, config, request, tmp_path
):
    config = on_deep(config, request.getfixturevalue(kind), channels, **knobs)
    unbroken = changed(config, run__dir=str(tmp_path / "unbroken"))
    scores = train(unbroken)
    assert run_alone(partial(train_until, config, 4))[0] == -signal.SIGKILL
    train(config)
    assert_same(final(config), final(unbroken))
    alone, (first, second) = seen(config, stop=3), run_ranks(2, seen, config, 0, 3)
    for whole, one, other in zip(alone, first, second, strict=True):
        assert whole[0] == one[0] + other[0]
        assert [text[:16] for text in whole[1]] == [text[:16] for text in one[1] + other[1]]
    assert int(scores.predictions.class_counts().sum()) == 8


def test_mean_and_deviation_are_measured_where_none_is_known(config, satellite, capsys):
    config = on_deep(config, satellite, 5, epochs=1, augment__crop="none")
    train(config)
    mean, std = final(config)["mean"], final(config)["std"]
    line = f"mean {', '.join(f'{value:g}' for value in mean)}, std "
    assert f"{line}{', '.join(f'{value:g}' for value in std)} of the channels, measured on 24" in (
        capsys.readouterr().out
    )
    data, normalize, _ = opened(config, CPU)
    images = normalize(next(data.batches(0, 1)).images)
    assert images.mean((0, 2, 3)).abs().max() < 0.1
    assert (images.std((0, 2, 3)) - 1).abs().max() < 0.1
    given = TrainData(config, CPU, ((0.5,) * 5, (0.1,) * 5)).source
    assert (given.mean, given.std) == ((0.5,) * 5, (0.1,) * 5)


def test_images_in_memory_say_what_they_are(monkeypatch, config):
    labels, pixels = torch.arange(6) % 2, torch.from_numpy(DEEP).repeat(6, 1, 1, 1)
    source = Source(labels, ("a", "b"), pixels, channels=5, bits=16)
    monkeypatch.setitem(DATASETS, "mine", lambda *_: source)
    data = changed(config.data, name="mine", limit=0)
    with pytest.raises(UserError, match=r"mine have 5 channels of 16 bits: --data.channels 5"):
        open_dataset(data, "train")
    assert torch.equal(open_dataset(changed(data, channels=5, bits=16), "val").pixels, pixels)
    with pytest.raises(UserError, match="5 numbers, one for each channel"):
        Source(labels, ("a", "b"), pixels, channels=5, bits=16, mean=(0.5,) * 3)


@pytest.mark.parametrize("name", ["convnext_tiny", "vit_b_16", *models_by_name()])
def test_a_network_sees_all_channels(name):
    model = build_model(ModelConfig(name=name, width=8), 3, 32, 5)
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    assert first.in_channels == 5
    assert model(torch.randn(2, 5, 32, 32)).shape == (2, 3)


def test_filters_for_colors_are_adapted_to_other_channels():
    resnet = ModelConfig(name="resnet9", width=8)
    weights = PretrainedWeights("weights", build_model(resnet, 2, 32).state_dict())
    stem, images = weights.weights["stem.0.weight"], torch.randn(2, 1, 8, 8)
    for channels, seen_before in ((1, images.repeat(1, 3, 1, 1)), (6, images.repeat(1, 3, 1, 1))):
        model = build_model(resnet, 2, 32, channels=channels)
        note = weights.load_into(model, ("a", "b"))
        assert "adapted from 3 channels: stem.0.weight" in note
        adapted = model.state_dict()["stem.0.weight"]
        found = nn.functional.conv2d(images.repeat(1, channels, 1, 1), adapted)
        torch.testing.assert_close(found, nn.functional.conv2d(seen_before, stem))


def test_a_network_with_two_heads_begins_with_two_new_ones():
    class Distilled(nn.Module):
        """As timm's distilled transformers."""

        def __init__(self, num_classes):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 1)
            self.head = nn.Linear(4, num_classes)
            self.head_dist = nn.Linear(4, num_classes)

        def get_classifier(self):
            return self.head, self.head_dist

    weights = PretrainedWeights("weights", Distilled(7).state_dict())
    model = Distilled(2)
    assert weights.load_into(model, ("a", "b")) == "weights; head_dist is new"
    assert torch.equal(model.stem.weight, weights.weights["stem.weight"])


def test_images_of_other_channels_are_not_normalized_as_those_of_the_weights(tmp_path):
    name, about = ModelConfig(name="resnet9", width=8), {"classes": '["x"]'}
    about |= {"mean": "[0.1, 0.2, 0.3]", "std": "[0.4, 0.5, 0.6]"}
    path = tmp_path / "w.safetensors"
    save_file(build_model(name, 2, 32).state_dict(), path, about)
    config = Config(run=RunConfig(init_from=str(path)))
    found = [load_pretrained(changed(config, data__channels=n), CPU) for n in (3, 1)]
    assert [weights.mean_std for weights in found] == [((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), None]


def test_images_of_16_bits_are_not_normalized_as_a_library_normalizes_those_of_8(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(2)}, path)
    config = Config(run=RunConfig(init_from=str(path)), model=ModelConfig(name="resnet18"))
    found = [load_pretrained(changed(config, data__bits=bits), CPU) for bits in (8, 16)]
    assert [weights.mean_std and weights.mean_std[0][0] for weights in found] == [0.485, None]


def test_deep_images_are_normalized_by_their_range():
    source = Source(
        torch.zeros(1).long(), ("a",), torch.from_numpy(DEEP)[None], channels=5, bits=16
    )
    mean, std = DEEP.mean((0, 1)) / 65535, DEEP.std((0, 1)) / 65535
    source = changed(source, mean=mean, std=std)
    fp32 = type("Fp32", (), {"device": CPU.device, "memory_format": torch.contiguous_format})
    images = source.pixels.permute(0, 3, 1, 2)
    (view, _), *_ = Normalize(source, 16, fp32, "flip").views(images)
    torch.testing.assert_close(view.mean((0, 2, 3)), torch.zeros(5), atol=1e-4, rtol=0)
    torch.testing.assert_close(view.std((0, 2, 3), correction=0), torch.ones(5), atol=1e-3, rtol=0)


@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
@pytest.mark.parametrize("where", ["device", "stream"])
def test_training_and_evaluation_fit_images_alike(on_photos, where, fit):
    config = changed(on_photos, data__where=where, data__workers=0, data__fit=fit)
    config = changed(config, augment=AugmentConfig(crop="none", flip="none"))
    source = open_dataset(config.data, "train")
    expected = Samples(replace(source, mean=(0.485, 0.456, 0.406)), config.data)
    rows = source.empty(len(source), 32)
    expected.fill(rows, 0, torch.arange(len(source)).numpy())
    with contextlib.closing(TrainData(config, CPU)) as data:
        for batch in data.batches(0, 3):
            assert torch.equal(batch.images.permute(0, 2, 3, 1), rows[batch.indices])
    with contextlib.closing(EvalData(config.data, "train", CPU)) as data:
        images = torch.cat([batch.images.clone() for batch in data.batches()])
    assert torch.equal(images.permute(0, 2, 3, 1), rows)
