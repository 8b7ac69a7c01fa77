"""A folder of anybody's images: what is found in it, and what is said when it can't be used."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from conftest import write_photo

from image_classifier.config import DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.errors import UserError

SPLITS = ("train", "val")


def names(root, split, **knobs):
    """The files of a split, below the folder that holds its classes."""
    source = open_dataset(DataConfig(name="folder", root=str(root), **knobs), split)
    return {os.fsdecode(source.paths.relative(index)) for index in range(len(source))}


@pytest.fixture
def flat(tmp_path):
    """`root/<class>/`: 2 classes of 40 images that are not divided into splits."""
    for number in range(80):
        write_photo(tmp_path / ("ant", "bee")[number % 2] / f"{number}.jpg", 0, size=(8, 8))
    return tmp_path


def test_labels_follow_the_folders(photos):
    for split, count in (("train", 12), ("val", 4)):
        source = open_dataset(DataConfig(name="folder", root=str(photos)), split)
        assert source.classes == ("ant", "bee")
        assert len(source) == count
        for index, label in enumerate(source.labels.tolist()):
            assert source.paths[index].parent.name == source.classes[label]


def test_each_image_stays_for_training_or_for_validation(flat):
    train, val = names(flat, "train"), names(flat, "val")
    assert len(train | val) == 80
    assert not train & val
    assert 4 < len(val) < 30
    for number in range(80, 120):
        write_photo(flat / "ant" / f"{number}.jpg", 0, size=(8, 8))
    assert val <= names(flat, "val")


def test_a_test_set_may_be_apart_or_alone(flat):
    (flat / "train").mkdir()
    for name in ("ant", "bee"):
        (flat / name).rename(flat / "train" / name)
        write_photo(flat / "test" / name / "1.jpg", 0)
    assert len(names(flat, "train") | names(flat, "val")) == 80
    assert names(flat, "test") == {"ant/1.jpg", "bee/1.jpg"}
    shutil.rmtree(flat / "train")
    assert names(flat, "test") == {"ant/1.jpg", "bee/1.jpg"}


def test_what_systems_leave_behind_is_no_image(flat):
    before = names(flat, "train") | names(flat, "val")
    write_photo(flat / ".ipynb_checkpoints" / "1.jpg", 0)
    write_photo(flat / "__MACOSX" / "1.jpg", 0)
    write_photo(flat / "ant" / "._1.jpg", 0)
    (flat / "ant" / "notes.txt").write_text("no image")
    (flat / "ant" / "loop").symlink_to(flat / "ant")
    (flat / "cat").symlink_to(flat / "cat")  # no class
    (flat / "ant" / "folder.jpg").mkdir()  # no image
    # But links that lead nowhere are images that are missing, and names need not be text.
    (flat / "ant" / "gone.jpg").symlink_to(flat / "nowhere.jpg")
    Path(os.fsdecode(os.fsencode(flat) + b"/ant/\xff.jpg")).touch()
    after = names(flat, "train") | names(flat, "val")
    assert after - before == {"ant/gone.jpg", "ant/\udcff.jpg"}


def test_a_folder_that_may_not_be_listed_is_named(flat, monkeypatch):
    def scandir(path):
        if path.endswith(b"bee"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listed(path)

    listed = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"cannot list folder '.*/bee': Permission denied"):
        names(flat, "train")


def test_a_limit_takes_from_every_class(flat):
    source = open_dataset(DataConfig(name="folder", root=str(flat), limit=10), "train")
    assert source.labels.bincount().tolist() == [5, 5]


def flat_photo(place):
    """Let a photograph lie in no folder, and all alone."""
    shutil.rmtree(place)
    write_photo(place / "1.jpg", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "train" / "cat").mkdir(), r"class 'cat' has no images for train"),
        (lambda root: write_photo(root / "val" / "cat" / "1.jpg", 0), r"has not: 'cat'"),
        (lambda root: [p.unlink() for p in root.glob("val/*/*")], r"'ant' has no images for val"),
        (lambda root: flat_photo(root / "val"), r"has 1 images but no folders: .*/val/<class>/"),
        (flat_photo, r"' has 1 images but no folders: put"),
        (lambda root: (root / "train").rename(root / "other"), r"a folder 'val' but none called"),
        (lambda root: root.rename(root.with_name("other")), "there is no such folder"),
    ],
    ids=("empty", "unknown", "no val", "flat val", "flat", "no train", "missing"),
)
def test_an_unusable_folder_is_named(tmp_path, change, message):
    root = tmp_path / "own"
    for split in SPLITS:
        for name in ("ant", "bee"):
            write_photo(root / split / name / "1.jpg", 0)
    change(root)
    with pytest.raises(UserError, match=message):
        list(map(partial(open_dataset, DataConfig(name="folder", root=str(root))), SPLITS))


def test_an_unknown_dataset_is_corrected():
    with pytest.raises(UserError, match="did you mean cifar10"):
        open_dataset(DataConfig(name="cifr10"), "train")
