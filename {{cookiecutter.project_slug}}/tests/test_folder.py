"""A folder of anybody's images: what is found in it, and what is said when it can't be used."""

import errno
import os
import shutil

import pytest

from image_classifier.config import DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.errors import UserError


def put(root, *names):
    """Put files into a folder; they stay empty, as nobody reads them here."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def opened(root, split, **knobs):
    """A split of the images in a folder."""
    return open_dataset(DataConfig(name="folder", root=str(root), **knobs), split)


def names(root, *splits):
    """The files of splits, below the folder that holds their classes."""
    lists = [opened(root, split).paths for split in splits]
    return {os.fsdecode(paths.relative(index)) for paths in lists for index in range(len(paths))}


@pytest.fixture
def flat(tmp_path):
    """`train/<class>/`: 2 classes of 40 images that are not divided into splits."""
    put(tmp_path / "train", *(f"{('ant', 'bee')[number % 2]}/{number}.jpg" for number in range(80)))
    return tmp_path / "train"


def test_labels_follow_the_folders_and_a_limit_takes_from_every_class(flat):
    source = opened(flat, "train", limit=10)
    assert source.classes == ("ant", "bee")
    assert source.labels.tolist() == [0] * 5 + [1] * 5
    assert [source.paths[i].parent.name for i in range(10)] == ["ant"] * 5 + ["bee"] * 5


def test_each_image_stays_for_training_or_for_validation(flat):
    train, val = names(flat, "train"), names(flat, "val")
    assert len(train | val) == len(train) + len(val) == 80
    assert 4 < len(val) < 30
    put(flat, *(f"ant/{number}.jpg" for number in range(80, 120)))
    assert val <= names(flat, "val")


def test_splits_may_be_apart_and_a_test_set_alone(flat):
    root = flat.parent
    put(root, "test/ant/1.jpg")
    assert names(root, "train", "val") == names(flat, "train", "val")
    put(root, "val/bee/2.jpg")
    assert (len(names(root, "train")), names(root, "val")) == (80, {"bee/2.jpg"})
    for folder in (flat, root / "val"):
        shutil.rmtree(folder)
    assert names(root, "test") == {"ant/1.jpg"}


def test_what_systems_leave_behind_is_no_image(flat):
    before = names(flat, "train", "val")
    put(flat, ".ipynb_checkpoints/1.jpg", "__MACOSX/1.jpg", "ant/._1.jpg", "ant/notes.txt")
    (flat / "ant" / "loop").symlink_to(flat / "ant")
    (flat / "cat").symlink_to(flat / "cat")  # no class
    (flat / "ant" / "folder.jpg").mkdir()  # no image
    # But links that lead nowhere are images that are missing, and names need not be text.
    (flat / "ant" / "gone.jpg").symlink_to(flat / "nowhere.jpg")
    put(flat, os.fsdecode(b"ant/\xff.jpg"))
    assert names(flat, "train", "val") - before == {"ant/gone.jpg", "ant/\udcff.jpg"}


def test_a_folder_that_may_not_be_listed_is_named(flat, monkeypatch):
    def scandir(path):
        if path.endswith(b"bee"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listed(path)

    listed = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"cannot list folder '.*/bee': Permission denied"):
        names(flat, "train")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("train/ant/1.jpg train/cat/1.txt val/ant/1.jpg", "class 'cat' has no images for train"),
        ("train/ant/1.jpg val/ant/1.jpg val/cat/1.jpg", "has not: 'cat'"),
        ("train/ant/1.jpg val/ant/1.txt", "'ant' has no images for val"),
        ("train/ant/1.jpg val/1.jpg", r"has 1 images but no folders: .*/val/<class>/"),
        ("1.jpg", "' has 1 images but no folders: put"),
        ("other/ant/1.jpg val/ant/1.jpg", "a folder 'val' but none called"),
        ("", "there is no such folder"),
    ],
)
def test_an_unusable_folder_is_named(tmp_path, files, message):
    put(tmp_path / "own", *files.split())
    with pytest.raises(UserError, match=message):
        [opened(tmp_path / "own", split) for split in ("train", "val")]


def test_an_unknown_dataset_is_corrected():
    with pytest.raises(UserError, match="did you mean cifar10"):
        open_dataset(DataConfig(name="cifr10"), "train")
