"""Trackers have the confusion matrix of a run as a picture."""

import numpy as np
import torch
from conftest import HOSTILE

from image_classifier.data import LEFT_OUT, Source
from image_classifier.metrics import Predictions
from image_classifier.tools.pictures import pictures


def test_a_cell_of_a_confusion_matrix_is_the_darker_the_larger_its_share():
    found = pictures.confusion_image(torch.tensor([[9, 1, 0], [0, 0, 0], [0, 0, 5]]))
    assert (found.dtype, found.shape) == (np.uint8, (510, 510, 3))
    cells = found[::170, ::170, 0].tolist()
    assert cells == [[13, 174, 255], [255, 255, 255], [255, 255, 0]]
    plain = pictures.confusion_image(torch.eye(40))
    for names in (HOSTILE * 10, ("ant",) * 40):
        named = pictures.confusion_image(torch.eye(40), names)
        inner = named[pictures.NAME_SIDE :, pictures.NAME_WIDTH :]
        assert np.array_equal(inner, plain)
        assert (named[:, : pictures.NAME_WIDTH] < 128).any(2).any(1).sum() > 40  # letters
    assert pictures.confusion_image(torch.eye(50), ("ant",) * 50).shape == (500, 500, 3)


def test_each_of_many_classes_has_a_cell_and_of_very_many_several_share_one():
    turned = torch.arange(1000) ^ 1  # each class is taken for its neighbor
    source = Source(turned ^ 1, tuple(map(str, range(1000))), reader=int)
    found = pictures.pictures_of(Predictions(source, turned, torch.ones(1000), torch.ones(1000)))
    assert np.array_equal(found["confusion"][:, :, 0] < 255, np.eye(1000)[turned])
    classes = tuple(map(str, range(100_000)))
    labels = torch.tensor([0, 99_999, 99_999, 50_000])
    source = Source(labels, classes, pixels=torch.zeros(4, 8, 8, 3).byte())
    predicted = torch.tensor([1, 99_998, 0, LEFT_OUT])
    found = pictures.pictures_of(Predictions(source, predicted, torch.ones(4), torch.ones(4)))
    cells = found["confusion"][:, :, 0]
    assert cells.shape == (2041, 2041)
    assert np.argwhere(cells < 255).tolist() == [[0, 0], [2040, 0], [2040, 2040]]


def test_each_row_has_the_name_of_its_own_class():
    page = pictures.confusion_image(torch.eye(3), ("", "", "letters"))
    side = (len(page) - pictures.NAME_SIDE) // 3
    names = page[pictures.NAME_SIDE :, : pictures.NAME_WIDTH, 0] < 128
    ink = [int(names[n * side : (n + 1) * side].sum()) for n in range(3)]
    assert ink[2] > 2 * max(ink[:2])  # which have their numbers alone


def test_normalized_images_are_shown_as_they_were_before():
    pixels = torch.randint(256, (2, 4, 5, 3), generator=torch.Generator().manual_seed(0)).byte()
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
    source = Source(torch.zeros(2).long(), ("ant",), pixels, mean=mean, std=std)
    images = (pixels / 255 - torch.tensor(mean)) / torch.tensor(std)
    assert pictures.denormalize(images.permute(0, 3, 1, 2), source).equal(pixels)
