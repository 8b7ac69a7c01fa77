"""Datasets of Hugging Face on the disk: the pixels of the files, in any process."""

import json
import pickle
import re
import shutil
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import changed, read_image

from image_classifier.checkpoints.reading import read_checkpoint
from image_classifier.config import DataConfig
from image_classifier.data import BadImageError, open_dataset
from image_classifier.errors import UserError
from image_classifier.runtime.platform import install_command
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


def test_only_files_in_the_folder_of_the_dataset_are_read(photos, tmp_path):
    photo = next((photos / "train/ant").iterdir())
    inside, outside = tmp_path / "own/inside.jpg", tmp_path / "outside.jpg"
    paths = ["inside.jpg", "sub/../inside.jpg", "/etc/passwd", "../outside.jpg", str(outside)]
    paths += ["sub/../../outside.jpg", "link.jpg", "a\0b", "http://127.0.0.1/1.jpg", "", None]
    kind = {"bytes": library.Value("binary"), "path": library.Value("string")}
    rows = {"image": [{"bytes": None, "path": path} for path in paths], "label": [0] * len(paths)}
    save(tmp_path / "own", {"image": kind, "label": CLASSES}, train=rows, val=rows)
    for file in (inside, outside):
        file.write_bytes(photo.read_bytes())
    (tmp_path / "own/link.jpg").symlink_to(outside)
    (tmp_path / "own/sub").mkdir()
    source, expected = opened(tmp_path / "own"), read_image(photo)
    assert source.file_digests
    for number, path in enumerate(paths):
        if number < 2:
            assert torch.equal(source.read(number), expected)
            continue
        said = "has no image" if not path else "is not in the dataset's folder|No such file"
        with pytest.raises(BadImageError, match=said):
            source.read(number)


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
    assert same.file_digests == opened(saved).file_digests
    rows["image"][7] = rows["image"][6]
    other = opened(save(tmp_path / "other", kinds, train=rows, val=rows))
    assert other.file_digests != same.file_digests


def test_nothing_is_asked_of_a_network_and_a_missing_library_is_named(saved, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=AssertionError))
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=AssertionError))
    assert len(opened(saved)) == 12
    for root in ("hf://datasets/a/b", "http://127.0.0.1/a", "simplecache::http://127.0.0.1/a"):
        with pytest.raises(UserError, match="is no folder of this machine, and nothing is downl"):
            opened(root)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=re.escape(install_command("datasets"))):
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


def test_a_damaged_dataset_is_refused_in_a_line(saved, tmp_path, damaged):
    for name in ("train/state.json", "dataset_dict.json"):
        root = Path(shutil.copytree(saved, tmp_path / name))
        (root / name).write_bytes(damaged)
        with pytest.raises(UserError, match="is no dataset of `save_to_disk`: ") as caught:
            opened(root)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["../other", "/etc", "..", "zip://a::http://127.0.0.1:1/x"])
def test_a_part_has_no_path_or_url_for_a_name(saved, tmp_path, part):
    root = Path(shutil.copytree(saved, tmp_path / "own"))
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", part]}))
    with pytest.raises(UserError, match=r"has a part called '.*': rename it"):
        opened(root)


def test_a_part_may_have_any_other_name(saved, tmp_path):
    root = Path(shutil.copytree(saved, tmp_path / "own"))
    shutil.copytree(root / "train", root / "train-old 2.0")
    names = ["train", "validation", "train-old 2.0"]
    (root / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    assert len(opened(root)) == 12


def test_classes_are_names_that_can_be_written_anywhere(tmp_path):
    rows = {"image": [IMAGE] * 2, "label": [0, 1]}
    root = save(tmp_path / "own", {"image": library.Image(), "label": CLASSES}, train=rows)
    info = root / "train/dataset_info.json"
    info.write_text(info.read_text().replace('"ant"', r'"\ud800"'))
    assert opened(root, val_fraction=0.001).classes == (r"\ud800", "bee")
    kinds = {"image": library.Image(), "label": library.Value("int64")}
    rows["label"] = [0, 999_999_999]
    with pytest.raises(UserError, match="the largest label is 999,999,999, and would make as many"):
        opened(save(tmp_path / "many", kinds, train=rows))


def test_a_dataset_has_a_part_for_each_split(tmp_path):
    rows = {"image": [IMAGE], "label": [0]}
    save(tmp_path / "own", {"image": library.Image(), "label": CLASSES}, train=rows)
    with pytest.raises(UserError, match="has no 'test', only 'train'"):
        opened(tmp_path / "own", "test")


def rows_with_paths(paths):
    """Images of random sizes, of which each has one of `paths`."""
    images = [{"bytes": b"%d" % 7**number, "path": path} for number, path in enumerate(paths)]
    return {"image": images, "label": [number % 2 for number in range(len(images))]}


def test_images_of_a_group_are_on_one_side_by_their_paths(tmp_path):
    pytest.importorskip("image_classifier.tools.holdout")
    paths = [f"p{number // 4}_{number % 4}.jpg" for number in range(40)]
    kinds = {"image": library.Image(), "label": CLASSES}
    root = save(tmp_path / "own", kinds, train=rows_with_paths(paths))
    sides = []
    for split in ("train", "val"):
        found = opened(root, split, groups=r"([^/]+)_[0-9]+\.", val_fraction=0.3).paths
        sides.append({paths[row].partition("_")[0] for row in found.rows.tolist()})
    assert sides[1]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 10
    root = save(tmp_path / "without", kinds, train=rows_with_paths([*paths, None]))
    assert len(opened(root)) + len(opened(root, "val")) == 41
    message = "image 40 of part 'train' in '.*without' has no path: save all with their paths, or"
    with pytest.raises(UserError, match=message):
        opened(root, groups="p[0-9]+")


@pytest.mark.parametrize("kind", ["pandas", "arrow", "numpy"])
def test_a_dataset_may_be_saved_in_the_format_of_another_library(photos, tmp_path, kind):
    features = library.Features({"image": library.Image(), "label": CLASSES})
    table = library.Dataset.from_dict(rows_of(photos, "train", in_bytes), features)
    table.with_format(kind).save_to_disk(str(tmp_path / "own"))
    source = opened(tmp_path / "own", val_fraction=0.001)
    assert torch.equal(source.read(3), read_image(sorted((photos / "train").glob("*/*.jpg"))[3]))


def test_a_part_without_rows_is_named(tmp_path):
    kinds = {"image": library.Image(), "label": CLASSES}
    rows = rows_with_paths(["a", "b"])
    root = save(tmp_path / "own", kinds, train=rows, validation=rows_with_paths([]))
    with pytest.raises(UserError, match="own/validation' has no rows: add some, or leave it out"):
        opened(root)


def test_a_dataset_has_no_rows_of_other_folders(saved, tmp_path):
    root = Path(shutil.copytree(saved, tmp_path / "own"))
    state = json.loads((root / "train/state.json").read_text())
    (file,) = state["_data_files"]
    (root / "train" / file["filename"]).rename(tmp_path / "outside.arrow")
    state["_data_files"] = [{"filename": "../../outside.arrow"}]
    (root / "train/state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"outside\.arrow' is not in its folder"):
        opened(root)


@pytest.mark.parametrize("name", ["train", "training"])
def test_names_without_a_type_are_the_classes_of_training_in_each_split(tmp_path, name):
    kinds = {"image": library.Image(), "label": library.Value("string")}
    rows = {"image": [IMAGE] * 2, "label": ["ant", "bee"]}
    few = {"image": [IMAGE], "label": ["bee"]}
    source = opened(save(tmp_path / "own", kinds, **{name: rows, "validation": few}), "val")
    assert (source.classes, source.labels.tolist()) == (("ant", "bee"), [1])
