"""Trackers have the confusion matrix of a run as a picture."""

import numpy as np
import torch
from conftest import HOSTILE

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
