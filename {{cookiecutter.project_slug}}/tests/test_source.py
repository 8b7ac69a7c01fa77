"""What a dataset's function may return, and what is said of anything else."""

import numpy as np
import pytest
import torch

from image_classifier.config import DataConfig
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.paths import PathList
from image_classifier.data.datasets.source import Source
from image_classifier.errors import UserError

LABELS, CLASSES = torch.arange(6) % 2, ("ant", "bee")
PIXELS = torch.randint(256, (6, 4, 5, 3), generator=torch.Generator().manual_seed(0)).byte()
FILES = ("ant/1.jpg", "bee/2.jpg", "3.jpg", "4.jpg", "5.jpg", "6.jpg")


@pytest.fixture
def opened(monkeypatch):
    """A function that opens a dataset whose own function returns what the given one does."""

    def open_mine(make):
        monkeypatch.setitem(DATASETS, "mine", lambda _data, _split: make())
        return open_dataset(DataConfig(name="mine", root="nowhere"), "train")

    return open_mine


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pixels": None}, "pixels or in paths, not in neither"),
        ({"paths": PathList("photos", FILES)}, "pixels or in paths, not in both"),
        ({"pixels": PIXELS[:5]}, "6 labels, but 5 images"),
        ({"pixels": PIXELS / 255}, r"uint8, not a Tensor \(6, 4, 5, 3\) torch\.float32$"),
        ({"pixels": PIXELS.permute(0, 3, 1, 2)}, r"uint8, not a Tensor \(6, 3, 4, 5\)"),
        ({"pixels": PIXELS.numpy()}, r"not a ndarray \(6, 4, 5, 3\) uint8$"),
        ({"pixels": None, "paths": [*FILES]}, r"should be PathList\(folder, paths\), not \["),
        ({"classes": ()}, "a tuple of str, the name of each class, not "),
        ({"classes": [*CLASSES]}, "a tuple of str, the name of each class, not "),
        ({"labels": LABELS.tolist()}, r"labels of a Source should be a CPU tensor"),
        ({"labels": LABELS.int()}, r"int64, not a Tensor \(6,\) torch\.int32$"),
        ({"mean": (125.3, 123.0, 113.9)}, "mean of a Source should be three .* from 0 to 1, not"),
        ({"std": (0.2, 0.2)}, "std of a Source should be three numbers"),
        ({"std": (0.2, 0.0, 0.2)}, "std of a Source should be three numbers"),
    ],
)
def test_what_no_source_can_hold_is_refused(fields, message):
    right = {"labels": LABELS, "classes": CLASSES, "pixels": PIXELS}
    with pytest.raises(UserError, match=message) as caught:
        Source(**right | fields)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="a PathList of no paths below 'photos'"):
        PathList("photos", [])


def test_fields_are_kept_as_batches_and_checkpoints_want_them():
    strided = PIXELS.permute(0, 2, 1, 3)
    source = Source(LABELS, CLASSES, strided, mean=np.zeros(3), std=torch.ones(3))
    assert source.pixels.is_contiguous()  # else each batch would copy all images
    assert (source.mean, source.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert {type(value) for value in source.mean + source.std} == {float}


@pytest.mark.parametrize("returned", [None, (PIXELS, LABELS)])
def test_a_dataset_that_is_no_source_is_told_what_to_return(opened, returned):
    words = rf"dataset 'mine' returned a {type(returned).__name__}: .*`Source\(labels"
    with pytest.raises(UserError, match=words):
        opened(lambda: returned)


def test_a_dataset_draws_the_same_whoever_asks(opened):
    one, other = (
        opened(lambda: Source(torch.randperm(6), CLASSES, PIXELS)).labels for _ in range(2)
    )
    assert torch.equal(one, other)
