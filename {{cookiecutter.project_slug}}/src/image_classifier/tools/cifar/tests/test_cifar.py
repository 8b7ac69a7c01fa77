"""CIFAR: a local copy is enough, and without one and without a network the user is told."""

import hashlib
import pickle
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
from torchvision import datasets

from image_classifier.config import DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.errors import UserError


def test_without_a_network_a_whole_copy_is_enough_and_else_the_user_is_told(tmp_path, monkeypatch):
    fail = Mock(side_effect=URLError("no network"))
    monkeypatch.setattr(datasets.cifar, "download_and_extract_archive", fail)
    for name in ("cifar100", "cifar10"):
        data = DataConfig(name=name, root=str(tmp_path))
        with pytest.raises(UserError, match=r"no network; put cifar-100?-python.tar.gz there"):
            open_dataset(data, "train")
    folder, sums = tmp_path / "cifar-10-batches-py", []
    folder.mkdir()
    content = {"data": np.zeros((2, 3072), np.uint8), "label_names": ["plane", "car"]}
    for name, labels in {"one": [0, 1], "two": [1, 0], "test": [1, 1], "batches.meta": []}.items():
        (folder / name).write_bytes(pickle.dumps(content | {"labels": labels}))
        sums.append((name, hashlib.md5((folder / name).read_bytes()).hexdigest()))
    cifar = datasets.CIFAR10  # is made to expect these sums
    monkeypatch.setattr(cifar, "train_list", sums[:2])
    monkeypatch.setattr(cifar, "test_list", sums[2:3])
    monkeypatch.setattr(cifar, "meta", cifar.meta | {"md5": sums[3][1]})
    train, val = open_dataset(data, "train"), open_dataset(data, "val")
    assert (train.classes, train.pixels.shape) == (("plane", "car"), (4, 32, 32, 3))
    assert train.labels.tolist() == [0, 1, 1, 0]
    assert val.labels.tolist() == [1, 1]
    assert val.is_test
    assert not train.is_test
    (folder / "one").write_bytes(pickle.dumps(content | {"labels": [0, 0]}))  # tampered with
    with pytest.raises(UserError, match="cannot download CIFAR10"):
        open_dataset(data, "train")
