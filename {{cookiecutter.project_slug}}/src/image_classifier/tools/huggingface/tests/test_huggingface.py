"""Datasets of Hugging Face on the disk: the pixels of the files, in any process."""

import pickle
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import changed

from image_classifier.config import DataConfig
from image_classifier.data import BadImageError, open_dataset
from image_classifier.errors import UserError
from image_classifier.models import read_checkpoint
from image_classifier.train import train

library = pytest.importorskip("datasets")
library.disable_progress_bars()
CLASSES = library.ClassLabel(names=["ant", "bee"])


def rows_of(photos, split, as_image):
    """The photographs of a split, as columns."""
    files = sorted((photos / split).glob("*/*.jpg"))
    images = [as_image(file) for file in files]
    return {"image": images, "label": [CLASSES.str2int(file.parent.name) for file in files]}


def in_bytes(file):
    return {"bytes": file.read_bytes(), "path": file.name}


def by_path(file):
    return {"bytes": None, "path": str(file)}


def save(root, features, **splits):
    """A folder as `save_to_disk` writes it."""
    kind = library.Features(features)
    made = {name: library.Dataset.from_dict(rows, kind) for name, rows in splits.items()}
    library.DatasetDict(made).save_to_disk(str(root))
    return root


@pytest.fixture(scope="module")
def saved(photos, tmp_path_factory):
    rows = {"train": rows_of(photos, "train", in_bytes)}
    rows["validation"] = rows_of(photos, "val", in_bytes)
    root = tmp_path_factory.mktemp("saved") / "photos"
    return save(root, {"image": library.Image(), "label": CLASSES}, **rows)


def opened(root, split="train", **knobs):
    return open_dataset(DataConfig(name="huggingface", root=str(root), **knobs), split)


def weights(config):
    """The weights at the end of a run."""
    return read_checkpoint(Path(config.run.dir, "checkpoints", "last.pt"))["state"]["model"]


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_a_run_ends_as_from_files_with_any_workers(on_photos, saved, tmp_path, crop):
    files = changed(on_photos, data__limit=0, data__workers=0, epochs=1, augment__crop=crop)
    rows = changed(files, data__name="huggingface", data__root=str(saved), data__workers=2)
    rows = changed(rows, run__dir=str(tmp_path / "rows"))
    train(files)
    train(rows)
    expected, found = weights(files), weights(rows)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("as_image", [in_bytes, by_path])
def test_images_are_bytes_or_files_and_found_by_their_type(photos, tmp_path, as_image):
    rows = rows_of(photos, "train", as_image)
    rows = {"photo": rows["image"], "class": rows["label"], "other": rows["label"]}
    kinds = {"photo": library.Image(), "class": CLASSES, "other": library.Value("int64")}
    source = opened(save(tmp_path / "own", kinds, train=rows, val=rows), "val")
    files = open_dataset(DataConfig(name="folder", root=str(photos)), "train")
    assert (source.classes, source.labels.tolist()) == (files.classes, files.labels.tolist())
    elsewhere = pickle.loads(pickle.dumps(source)).thinned(3)
    for number in range(12):
        assert torch.equal(source.read(number), files.read(number))
    assert torch.equal(elsewhere.read(2), files.read(8))
    assert elsewhere.name(2).endswith("own/val/8")


IMAGE = {"bytes": b"<html>", "path": None}


@pytest.mark.parametrize(
    ("kind", "values", "labels", "classes"),
    [
        (library.Value("string"), ["cat", "ant"], [1, 0], ("ant", "cat")),
        (library.Value("int32"), [2, 0], [2, 0], ("0", "1", "2")),
        (library.List(CLASSES), [[1, 0], []], [[1, 1], [0, 0]], ("ant", "bee")),
        (library.List(library.Value("string")), [["b"], ["a"]], [[0, 1], [1, 0]], ("a", "b")),
    ],
)
def test_labels_are_numbers_names_or_lists(tmp_path, kind, values, labels, classes):
    rows = {"image": [IMAGE] * 2, "labels": values}
    root = save(
        tmp_path / "own", {"image": library.Image(), "labels": kind}, train=rows, valid=rows
    )
    source = opened(root, "val")
    assert (source.labels.tolist(), source.classes) == (labels, classes)
    with pytest.raises(BadImageError, match="own/valid/1': not a JPEG"):
        source.read(1)


def test_an_image_stays_in_its_split_wherever_its_row_is(tmp_path):
    images = [{"bytes": b"%d" % number, "path": None} for number in range(60)]
    kinds = {"image": library.Image(), "label": library.Value("int64")}
    found = []
    for order in (images, images[::-1]):
        root = save(tmp_path / str(len(found)), kinds, train={"image": order, "label": [0] * 60})
        for split in ("train", "val"):
            paths = opened(root, split, fold=1).paths
            found.append({paths.read(number) for number in range(len(paths))})
    assert found[:2] == found[2:]
    assert len(found[0]) + len(found[1]) == 60
    assert 4 < len(found[1]) < 25


def test_other_images_in_as_many_rows_are_seen(photos, saved, tmp_path):
    kinds = {"image": library.Image(), "label": CLASSES}
    rows = rows_of(photos, "train", in_bytes)
    same = opened(save(tmp_path / "same", kinds, train=rows, val=rows))
    assert same.file_digests() == opened(saved).file_digests()
    rows["image"][7] = rows["image"][6]
    other = opened(save(tmp_path / "other", kinds, train=rows, val=rows))
    assert other.file_digests() != same.file_digests()


def test_nothing_is_asked_of_a_network_and_a_missing_library_is_named(saved, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=AssertionError))
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=AssertionError))
    assert len(opened(saved)) == 12
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="run `pip install datasets`"):
        opened(saved)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"image": library.Image()},
            "should have one column 'label', .* it has 'image': `dataset.rename",
        ),
        (
            {"a": CLASSES, "b": CLASSES, "image": library.Image()},
            "it has 'a', 'b': `dataset.rename",
        ),
        ({"image": library.Value("int64"), "label": CLASSES}, "'image' of .* has no images"),
    ],
)
def test_what_is_no_dataset_of_images_is_refused(tmp_path, columns, message):
    rows = {name: [None if "Image" in str(kind) else 0] for name, kind in columns.items()}
    with pytest.raises(UserError, match=message) as caught:
        opened(save(tmp_path / "own", columns, train=rows))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="is no dataset of `save_to_disk`"):
        opened(tmp_path)
    with pytest.raises(UserError, match="has no 'test', only 'train'"):
        opened(tmp_path / "own", "test")
