"""The command `preview`: a picture of what training sees, without training."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import changed, mixed, on_deep
from PIL import Image
from test_order import opened

from image_classifier.cli import main
from image_classifier.config import AugmentConfig
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tools.transforms import preview as previews
from image_classifier.tools.transforms.preview import (
    GAP,
    TITLE_WIDTH,
    preview,
    shown,
)

CPU = World(torch.device("cpu"))


def cells(path, rows, columns, side):
    """The images of a picture: (rows, columns, side, side, 3) uint8."""
    page = np.asarray(Image.open(path))
    assert page.shape == (rows * (side + GAP), TITLE_WIDTH + columns * (side + GAP), 3)
    found = page[:, TITLE_WIDTH:].reshape(rows, side + GAP, columns, side + GAP, 3)
    return torch.from_numpy(found[:, :side, :, :side].swapaxes(1, 2).copy())


def test_the_command_writes_a_picture_and_says_where(tmp_path, capsys):
    words = "preview smoke --augment.turns --columns 3 --rows 2 --run.dir"
    assert main([*words.split(), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {tmp_path}/a/preview.png"
    assert {path.name for path in (tmp_path / "a").iterdir()} <= {"preview.png", ".lock"}
    assert len(cells(tmp_path / "a/preview.png", 3, 3, 32)) == 3


@pytest.mark.parametrize("where", ["auto", "stream", "host", "device"])
@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_the_first_rows_are_the_images_and_what_step_0_sees(on_photos, crop, where):
    if crop == "resized" and where in ("host", "device"):
        pytest.importorskip("image_classifier.tools.device_crops")
    knobs = {"vertical_flip": True, "jitter": 0.5}
    config = changed(on_photos, data__where=where, data__workers=0, seed=3)
    config = changed(config, augment=AugmentConfig(crop=crop, **knobs), data__fit="pad")
    config = changed(config, **mixed(mixup=0.3, cutout=8))
    plain, first, second = cells(preview(config, 4, 2), 3, 4, 32)
    with join_world(config.compute) as world:
        data, normalize, augment = opened(config, world)
        batch = next(data.batches(0, 1))
        expected = augment(batch, 0).images
        assert torch.equal(first, shown(expected, data.source))
        rest = changed(config, augment=AugmentConfig(crop="none", flip="none"))
        rest = changed(rest, data__where="stream")
        data, normalize, augment = opened(rest, world)
        batch = next(data.batches(0, 1))
        assert torch.equal(plain, shown(normalize(batch.images), data.source))
    assert not torch.equal(first, second)


def test_the_last_of_an_odd_number_is_mixed_with_its_partner_as_in_training(config):
    pytest.importorskip("image_classifier.tools.mixup")
    config = changed(config, **mixed(mixup=1.0))
    odd = cells(preview(config, 3, 1), 2, 3, 32)
    assert torch.equal(odd, cells(preview(config, 4, 1), 2, 4, 32)[:, :3])


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_images_of_any_channels_and_bits_are_shown(config, satellite, channels):
    if channels == 5:
        config = on_deep(config, satellite, 5, data__workers=0)
        assert cells(preview(config, 2, 1), 2, 2, 32).float().std() > 5
        return
    images = torch.zeros((1, channels, 4, 4))
    source = type("Source", (), {"mean": (0.5, 0.1)[:channels], "std": (0.2, 0.2)[:channels]})
    assert shown(images, source).unique().tolist() == [128]
    assert shown(images, source).shape == (1, 4, 4, 3)


def test_small_images_of_progressive_resizing_have_a_place(config):
    tool = "progressive_resizing"
    pytest.importorskip(f"image_classifier.tools.{tool}")
    config = changed(config, augment__min_size=16)
    _, first = cells(preview(config, 2, 1), 2, 2, 32)
    assert (first[:, 16:] == 255).all()
    assert not (first[:, :16, :16] == 255).all()


def test_no_more_images_are_decoded_than_are_shown(on_photos, monkeypatch):
    read = previews.Samples.fill
    counts = []
    epochs = []

    def fill(samples, out, epoch, indices):
        counts.append(len(indices))
        epochs.append(epoch)
        return read(samples, out, epoch, indices)

    monkeypatch.setattr(previews.Samples, "fill", fill)
    config = changed(on_photos, augment__crop="resized", data__batch_size=12, data__limit=0)
    preview(config, 2, 3)
    assert counts == [2] * 4
    assert epochs == [0, 0, 1, 2]  # as they are, and as each epoch crops them


def test_a_row_has_the_draws_of_the_first_step_of_its_epoch(config, monkeypatch):
    steps = []
    build = previews.build_augment

    def build_noted(*words):
        augment = build(*words)
        return lambda batch, step: steps.append(step) or augment(batch, step)

    monkeypatch.setattr(previews, "build_augment", build_noted)
    monkeypatch.setattr(previews, "draw", drawn := Mock(wraps=previews.draw))
    preview(config, 2, 3)
    assert steps == [0, 4, 8]
    assert drawn.call_args.args[0] == ["as they are", "epoch 1", "epoch 2", "epoch 3"]


@pytest.mark.parametrize("words", ["--columns 0", "--rows 65", "--data.batch-size 100000"])
def test_a_mistake_is_answered_in_one_line(words, refusal, tmp_path):
    said = refusal("preview", "smoke", *words.split(), "--run.dir", tmp_path / "a")
    assert "is not in 1 .. 64" in said or "--data.batch-size 100000" in said
