"""CIFAR: a local copy is enough, and without one and without a network the user is told."""

import hashlib
import pickle
from urllib.error import URLError

import numpy as np
import pytest
from torchvision import datasets

from image_classifier.config import DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.errors import UserError


@pytest.fixture
def miniature(tmp_path, monkeypatch):
    """A folder with a CIFAR-10 of six images, whose sums torchvision is made to expect."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    chance = np.random.default_rng(0)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return name, hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(name, labels):
        images = chance.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        return write(name, {"data": images, "labels": labels})

    meta, digest = write("batches.meta", {"label_names": ["plane", "car"]})
    cifar = datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [batch("one", [0, 1]), batch("two", [1, 0])])
    monkeypatch.setattr(cifar, "test_list", [batch("test", [1, 1])])
    monkeypatch.setattr(cifar, "meta", cifar.meta | {"filename": meta, "md5": digest})
    return tmp_path


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A download fails as it does without a network."""

    def fail(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(datasets.cifar, "download_and_extract_archive", fail)


def test_a_local_copy_is_taken(miniature):
    data = DataConfig(name="cifar10", root=str(miniature))
    train, val = open_dataset(data, "train"), open_dataset(data, "val")
    assert train.labels.tolist() == [0, 1, 1, 0]
    assert train.pixels.shape == (4, 32, 32, 3)
    assert train.classes == ("plane", "car")
    assert val.labels.tolist() == [1, 1]
    assert "test images" in val.notes[0]


def test_a_copy_that_was_tampered_with_is_not_opened(miniature):
    with (miniature / "cifar-10-batches-py" / "one").open("ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match="cannot download CIFAR10"):
        open_dataset(DataConfig(name="cifar10", root=str(miniature)), "train")


def test_without_a_network_the_user_is_told(tmp_path):
    for name in ("cifar10", "cifar100"):
        with pytest.raises(UserError, match=r"no network; put cifar-100?-python.tar.gz there"):
            open_dataset(DataConfig(name=name, root=str(tmp_path)), "train")
