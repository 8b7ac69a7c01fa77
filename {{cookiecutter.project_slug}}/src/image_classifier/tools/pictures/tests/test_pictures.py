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
