"""A torch Dataset of (image, label) is a dataset, whatever it draws and however it has labels."""

import random
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import changed
from PIL import Image
from test_channels import COLOR, DEEP, GRAY
from test_datasets import CLASSES, PIXELS, offer
from test_fake_gpu import GPU, FakeGPU
from test_order import seen
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import DataConfig
from image_classifier.data import BadImageError
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.errors import FaultError, UserError
from image_classifier.runtime.distributed import World
from image_classifier.tools.torch_dataset.conversion import (
    to_pixels,
    to_source,
)
from image_classifier.train import train


class Noisy(Dataset):
    """Images that draw from every generator that people use, and a file that is damaged."""

    classes = CLASSES

    def __init__(self, targets=(0, 1) * 12, bad=-1):
        self.targets, self.bad = targets, bad

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("image file is truncated")
        seed = int(1e9 * (torch.rand(1).item() + random.random() + np.random.rand()))
        noise = np.random.default_rng(seed).integers(256, size=(40, 36, 3), dtype=np.uint8)
        return noise, self.targets[index]


ENDLESS = type("Endless", (IterableDataset,), {"__iter__": None})()
NUMBERS = "Noisy should be 24 numbers of classes, one for each"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (ENDLESS, "Endless should be map-style: with __len__ and"),
        (Noisy(["ant"] * 24), NUMBERS),
        (Noisy([0.5] * 24), NUMBERS),
        (Noisy([0, 1]), NUMBERS),
        (Noisy([[0, 2]] * 24), NUMBERS),
        (Noisy([[0, 1]] * 23), NUMBERS),
        (Noisy([[0], [0, 1]] * 12), r"or rows of 1, 0 and -1, not \(24,\) object"),
    ],
)
def test_what_is_no_map_style_dataset_of_labels_is_refused(monkeypatch, returned, message):
    with pytest.raises(UserError, match=message):
        offer(monkeypatch, lambda _: returned)


@pytest.fixture
def noisy(config, monkeypatch):
    """A run on noise, six to a batch."""
    offer(monkeypatch, lambda _: Noisy())
    Path(config.run.dir).mkdir()
    return changed(config, data__name="mine", data__limit=0, data__batch_size=6, data__workers=0)


def test_the_pixels_of_a_torch_dataset_depend_on_the_place_alone(noisy):
    alone = seen(noisy)
    assert seen(changed(noisy, data__workers=2)) == alone
    assert seen(noisy, start=5) == alone[5:]
    cpu = World(torch.device("cpu"))
    data = TrainData(noisy, cpu)
    assert data.where == "stream"
    places = (0, 0, 3), (1, 0, 3), (0, 1, 3), (0, 0, 27)
    assert len({data.source.read(3, *place).numpy().tobytes() for place in places}) == 4
    one, other = (
        torch.cat([batch.images.clone() for batch in EvalData(data, "val", cpu).batches()])
        for data in (changed(noisy.data, where=where) for where in ("stream", "auto"))
    )
    assert torch.equal(one, other)  # an evaluation draws the same each time


def test_a_torch_dataset_trains_and_a_bad_image_is_named(noisy, monkeypatch):
    offer(monkeypatch, lambda split: Noisy(bad=7 if split == "train" else -1))
    with pytest.raises(UserError, match=r"cannot read image 'image 7': image file is truncated"):
        seen(changed(noisy, data__workers=1))
    offer(monkeypatch, lambda _: Noisy())
    scores = train(changed(noisy, model__width=8, epochs=1))
    assert int(scores.predictions.class_counts().sum()) == 24


def test_labels_and_classes_are_found_where_a_dataset_does_not_name_them(monkeypatch):
    labels = torch.tensor([2, 0, 1, 0, 1, 0])
    source = offer(monkeypatch, lambda _: TensorDataset(PIXELS, labels))
    assert torch.equal(source.labels, labels)
    assert source.classes == ("0", "1", "2")
    assert "has no `targets`: labels were found by one pass over its images" in source.notes[0]


def test_a_part_without_images_is_told_as_any_other(config, monkeypatch):
    offer(monkeypatch, lambda split: Subset(Noisy(), [0, 1] if split == "val" else []))
    with pytest.raises(UserError, match="train: there are no images"):
        train(changed(config, data__name="mine", data__batch_size=6))


@pytest.mark.parametrize("label", [999_999_999, 2**40, 2**62])
def test_a_label_that_is_an_id_makes_no_billion_classes(label, monkeypatch):
    labels = torch.tensor([0, 1] * 11 + [0, label])
    with pytest.raises(UserError, match=f"the largest label is {label:,}, and would make as many"):
        offer(monkeypatch, lambda _: TensorDataset(torch.zeros(24, 3, 2, 2).byte(), labels))


def test_names_of_classes_can_be_written_anywhere(monkeypatch):
    monkeypatch.setattr(Noisy, "classes", ["\ud800", "a\nb"])
    source = offer(monkeypatch, lambda _: Noisy())
    assert source.classes == (r"\ud800", r"a\nb")
    assert source.fingerprint()
    monkeypatch.setattr(Noisy, "classes", np.array(["ant", "bee"]))
    assert offer(monkeypatch, lambda _: Noisy()).classes == ("ant", "bee")


def test_an_image_may_have_several_labels_and_a_subset_those_of_the_whole(monkeypatch):
    rows = [[1, 0], [1, 1], [0, -1]] * 8
    source = offer(monkeypatch, lambda _: Subset(Noisy(rows), [2, 1]))
    assert source.is_multi_label
    assert source.labels.tolist() == [rows[2], rows[1]]
    assert source.classes == CLASSES
    unnamed = TensorDataset(PIXELS, torch.tensor(rows[:6]), torch.arange(6))
    assert offer(monkeypatch, lambda _: unnamed).labels.tolist() == rows[:6]
    assert torch.equal(offer(monkeypatch, lambda _: unnamed).read(3), PIXELS[3])


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_a_torch_dataset_of_files_ends_as_their_folder(on_photos, tmp_path, monkeypatch, crop):
    def opened(split):
        return ImageFolder(Path(on_photos.data.root, split))

    offer(monkeypatch, opened)
    ended = []
    for number, name in enumerate(("folder", "mine")):
        config = changed(on_photos, data__name=name, data__limit=0, data__workers=number)
        config = changed(config, augment__crop=crop, run__dir=str(tmp_path / name), epochs=1)
        train(config)
        saved = read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))
        ended.append(saved["state"]["model"])
    assert all(torch.equal(tensor, ended[1][name]) for name, tensor in ended[0].items())


def test_images_are_pil_or_bytes_in_either_layout():
    pixels = PIXELS[0]
    array, chw = pixels.numpy(), pixels.permute(2, 0, 1)
    for image in (Image.fromarray(array), pixels, chw, array, chw.numpy()):
        assert torch.equal(to_pixels(image), pixels)
    for gray in (pixels[..., 0], pixels[None, ..., 0]):
        assert torch.equal(to_pixels(gray), pixels[..., :1].expand(-1, -1, 3))
    either = torch.arange(45).byte().view(3, 5, 3)  # a tensor's channels come first
    assert torch.equal(to_pixels(either), either.permute(1, 2, 0))
    assert torch.equal(to_pixels(either.numpy()), either)
    for other in (chw / 255, pixels.flatten(), "a.jpg"):
        with pytest.raises(UserError, match=r"should be PIL or uint8 .*: leave out ToTensor"):
            to_pixels(other)


def test_an_image_may_be_on_a_gpu():
    with FakeGPU():
        image = torch.zeros((3, 9, 8), dtype=torch.uint8, device=GPU)
        assert to_pixels(image).shape == (9, 8, 3)


@pytest.mark.parametrize("has_targets", [False, True])
def test_labels_may_be_on_a_gpu(has_targets, monkeypatch):
    with FakeGPU():
        labels = torch.zeros(6, dtype=torch.int64, device=GPU)
        dataset = TensorDataset(PIXELS, labels)
        if has_targets:
            dataset.targets = labels
        assert offer(monkeypatch, lambda _: dataset).labels.tolist() == [0] * 6
        part = offer(monkeypatch, lambda _: Subset(dataset, [2, 1]))
        assert part.labels.tolist() == [0, 0]


def test_images_have_the_channels_and_bits_that_are_asked_for():
    dataset = TensorDataset(torch.from_numpy(DEEP[None]), torch.zeros(1).long())
    source = to_source(dataset, DataConfig("mine", channels=5, bits=16))
    assert (source.channels, source.bits) == (5, 16)
    assert np.array_equal(source.read(0).numpy(), DEEP)


def test_a_torch_dataset_may_give_arrays_of_any_channels():
    for image in (DEEP, torch.from_numpy(DEEP), torch.from_numpy(DEEP).permute(2, 0, 1)):
        assert np.array_equal(to_pixels(image, 5, 16).numpy(), DEEP)
    assert np.array_equal(to_pixels(DEEP, 5, 8).numpy(), DEEP >> 8)
    assert np.array_equal(to_pixels(COLOR, 1, 8).numpy(), GRAY)
    for wrong in (DEEP[:, :, :2], DEEP / 2, COLOR):
        with pytest.raises(UserError, match=r"should be PIL or uint16 \(height, width, 5\), but"):
            to_pixels(wrong, 5, 16)


def test_labels_are_what_a_target_transform_makes_of_them(photos, monkeypatch):
    ants_last = ImageFolder(photos / "train", target_transform=lambda label: int(label < 1))
    source = offer(monkeypatch, lambda _: ants_last)
    assert source.labels.tolist() == [1] * 6 + [0] * 6
    assert source.classes == ("0", "1")
    assert not source.notes
    part = offer(monkeypatch, lambda _: Subset(ants_last, [11, 2]))
    assert (part.labels.tolist(), part.classes) == ([0, 1], ("0", "1"))


def test_what_torchvision_cannot_decode_is_an_unreadable_image(photos, monkeypatch):
    loader = Mock(side_effect=RuntimeError("decode_jpeg: Unsupported marker type 0x78"))
    source = offer(monkeypatch, lambda _: ImageFolder(photos / "train", loader=loader))
    with pytest.raises(BadImageError, match="cannot read image 'image 0': decode_jpeg: Unsupp"):
        source.read(0)
    for error in (FaultError, torch.OutOfMemoryError):
        loader.side_effect = error("no memory is left")
        with pytest.raises(error, match="no memory is left"):
            source.read(0)


def test_a_damaged_image_that_is_decoded_when_it_is_used_is_unreadable(photos, monkeypatch):
    content = (photos / "train/ant/0.jpg").read_bytes()[:900]
    dataset = ImageFolder(photos / "train", loader=lambda _: Image.open(BytesIO(content)))
    source = offer(monkeypatch, lambda _: dataset)
    with pytest.raises(BadImageError, match="cannot read image 'image 0': image file is truncat"):
        source.read(0)
