"""A plain torch Dataset of (image, label) is a dataset: same order, pixels and resume as ours."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import changed
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.map_style import (
    source_of,
    to_pixels,
)
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.errors import UserError
from image_classifier.runtime.distributed import World
from image_classifier.train import train

CPU = World(torch.device("cpu"))
COUNT = 24
PIXELS = torch.randint(256, (9, 8, 3), generator=torch.Generator().manual_seed(0)).byte()


class Noisy(Dataset):
    """Images that draw from every generator that people use, and a file that is damaged."""

    classes = ("ant", "bee")

    def __init__(self, bad=-1):
        self.targets = [index % 2 for index in range(COUNT)]
        self.bad = bad

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("image file is truncated")
        draws = torch.rand(1).item(), random.random(), np.random.rand()
        noise = np.random.default_rng(int(1e9 * sum(draws))).integers(256, size=(40, 36, 3))
        noise[0, 0] = index
        return Image.fromarray(noise.astype(np.uint8)), self.targets[index]


@pytest.fixture
def noisy(config, monkeypatch):
    """A run on them, six to a batch."""
    monkeypatch.setitem(DATASETS, "mine", lambda _data, _split: Noisy())
    Path(config.run.dir).mkdir()
    return changed(config, data__name="mine", data__limit=0, data__batch_size=6, data__workers=0)


def seen(config, start=0):
    """Images, labels and indices of each batch up to step 8, two epochs."""
    data = TrainData(config, CPU)
    assert data.where == "stream"
    batches = [
        torch.cat([part.flatten().long() for part in (batch.images, batch.labels, batch.indices)])
        for batch in data.batches(start, 8)
    ]
    data.close()
    return batches


@pytest.mark.parametrize("crop", ["none", "resized"])
def test_pixels_depend_on_the_place_alone(noisy, crop):
    noisy = changed(noisy, augment__crop=crop)
    alone = torch.stack(seen(noisy))
    assert torch.equal(torch.stack(seen(changed(noisy, data__workers=2))), alone)
    assert torch.equal(torch.stack(seen(noisy, start=5)), alone[5:])
    assert not torch.equal(torch.stack(seen(changed(noisy, seed=1))), alone)
    source = open_dataset(noisy.data, "train")
    assert not torch.equal(source.read(3, 0, 0, 3), source.read(3, 0, 1, 3))  # epochs draw anew


def test_an_evaluation_draws_the_same_each_time(noisy):
    one, other = (
        torch.cat([batch.images.clone() for batch in EvalData(data, "val", CPU).batches()])
        for data in (changed(noisy, data__where=where).data for where in ("stream", "auto"))
    )
    assert torch.equal(one, other)


def test_it_trains_and_a_bad_image_is_named_or_skipped(noisy, monkeypatch):
    monkeypatch.setitem(DATASETS, "mine", lambda _data, split: Noisy(7 if split == "train" else -1))
    words = r"cannot read image 'image 7': image file is truncated"
    with pytest.raises(UserError, match=words):
        seen(changed(noisy, data__workers=1))
    scores = train(changed(noisy, data__on_bad_image="skip", model__width=8, epochs=1))
    assert int(scores.confusion.sum()) == COUNT
    listed = Path(noisy.run.dir, "bad_images.txt").read_text()
    assert listed == "image 7\timage file is truncated\n"


def test_labels_and_classes_are_found_where_it_does_not_name_them():
    labels = torch.tensor([2, 0, 1, 0])
    source = source_of(TensorDataset(PIXELS.expand(4, -1, -1, -1), labels))
    assert torch.equal(source.labels, labels)
    assert source.classes == ("0", "1", "2")
    assert "has no `targets`: labels were found by one pass over its images" in source.notes[0]
    assert torch.equal(source.read(1), PIXELS)


def test_what_is_not_map_style_is_refused():
    endless = type("Endless", (IterableDataset,), {"__iter__": None})
    with pytest.raises(UserError, match=r"Endless should be map-style: with __len__ and"):
        source_of(endless())
    wrong = Noisy()
    for wrong.targets in (["ant"] * COUNT, [[0, 1]] * COUNT, [0.5] * COUNT, [0, 1]):
        with pytest.raises(UserError, match=r"Noisy should be 24 numbers of classes, one for each"):
            source_of(wrong)


def test_images_are_pil_or_bytes_in_either_layout():
    array, chw = PIXELS.numpy(), PIXELS.permute(2, 0, 1)
    for image in (Image.fromarray(array), PIXELS, chw, array, chw.numpy()):
        assert torch.equal(to_pixels(image), PIXELS)
    for gray in (PIXELS[..., 0], PIXELS[None, ..., 0]):
        assert torch.equal(to_pixels(gray), PIXELS[..., :1].expand(-1, -1, 3))
    for other in (chw / 255, PIXELS.flatten(), "a.jpg"):
        with pytest.raises(UserError, match=r"should be PIL or uint8 .*: leave out ToTensor"):
            to_pixels(other)
