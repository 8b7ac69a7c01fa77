"""A folder of anybody's images: what is found in it, and what is said when it can't be used."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import write_photo
from PIL import Image

from image_classifier.config import DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.data.decode import read_image
from image_classifier.errors import UserError

SPLITS = ("train", "val")


def names(root: Path, split: str, **knobs: object) -> set[str]:
    """The files of a split, below the folder that holds its classes."""
    source = open_dataset(DataConfig(name="folder", root=str(root), **knobs), split)
    return {os.fsdecode(source.paths.relative(index)) for index in range(len(source))}


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """`root/<class>/`: 2 classes of 40 images that are not divided into splits."""
    for number in range(80):
        write_photo(tmp_path / ("ant", "bee")[number % 2] / f"{number}.jpg", 0, size=(8, 8))
    return tmp_path


def test_labels_follow_the_folders(photos: Path) -> None:
    for split, count in (("train", 12), ("val", 4)):
        source = open_dataset(DataConfig(name="folder", root=str(photos)), split)
        assert source.classes == ("ant", "bee")
        assert len(source) == count
        for index, label in enumerate(source.labels.tolist()):
            assert source.paths[index].parent.name == source.classes[label]


def test_each_image_is_for_training_or_for_validation(flat: Path) -> None:
    train, val = names(flat, "train"), names(flat, "val")
    assert len(train | val) == 80
    assert not train & val
    assert 4 < len(val) < 30


def test_images_that_are_added_never_move_the_others(flat: Path) -> None:
    before = names(flat, "val")
    for number in range(80, 120):
        write_photo(flat / "ant" / f"{number}.jpg", 0, size=(8, 8))
    assert before <= names(flat, "val")


def test_validation_comes_from_training_images_where_only_a_test_set_is_apart(flat: Path) -> None:
    for name in ("ant", "bee"):
        (flat / "train").mkdir(exist_ok=True)
        (flat / name).rename(flat / "train" / name)
        write_photo(flat / "test" / name / "1.jpg", 0)
    assert names(flat, "test") == {"ant/1.jpg", "bee/1.jpg"}
    assert len(names(flat, "train") | names(flat, "val")) == 80


@pytest.mark.parametrize("part", ["val", "Test", "training"])
def test_a_part_of_a_dataset_is_no_class(flat: Path, part: str) -> None:
    write_photo(flat / part / "ant" / "1.jpg", 0)
    with pytest.raises(UserError, match=f"has a folder '{part}' but none called 'train'"):
        names(flat, "train")


def test_a_test_set_can_stand_alone(tmp_path: Path) -> None:
    write_photo(tmp_path / "test" / "ant" / "1.jpg", 0)
    assert names(tmp_path, "test") == {"ant/1.jpg"}


def test_what_systems_leave_behind_is_no_image(flat: Path) -> None:
    before = names(flat, "train")
    write_photo(flat / ".ipynb_checkpoints" / "1.jpg", 0)
    write_photo(flat / "__MACOSX" / "1.jpg", 0)
    write_photo(flat / "ant" / "._1.jpg", 0)
    (flat / "ant" / "notes.txt").write_text("no image")
    os.mkfifo(flat / "ant" / "pipe.jpg")
    (flat / "ant" / "loop").symlink_to(flat / "ant")
    assert names(flat, "train") == before


def test_links_that_lead_nowhere_are_images_that_are_missing(flat: Path) -> None:
    before = names(flat, "train") | names(flat, "val")
    (flat / "ant" / "loop.jpg").symlink_to(flat / "ant" / "loop.jpg")
    (flat / "ant" / "gone.jpg").symlink_to(flat / "nowhere.jpg")
    (flat / "cat").symlink_to(flat / "cat")  # no class
    (flat / "ant" / "folder.jpg").mkdir()  # no image
    added = (names(flat, "train") | names(flat, "val")) - before
    assert added == {"ant/loop.jpg", "ant/gone.jpg"}


def test_a_folder_that_may_not_be_listed_is_named(
    flat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scandir(path: bytes) -> object:
        if path.endswith(b"bee"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listed(path)

    listed = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"cannot list folder '.*/bee': Permission denied"):
        names(flat, "train")


def test_names_need_not_be_text(flat: Path) -> None:
    with Path(os.fsdecode(os.fsencode(flat) + b"/ant/\xff.jpg")).open("wb") as file:
        Image.new("RGB", (4, 4)).save(file, "JPEG")
    assert any("\udcff" in name for name in names(flat, "train") | names(flat, "val"))


def test_a_limit_takes_from_every_class(flat: Path) -> None:
    source = open_dataset(DataConfig(name="folder", root=str(flat), limit=10), "train")
    assert source.labels.bincount().tolist() == [5, 5]


def flatten(root: Path, *splits: str) -> None:
    """Let the images of splits lie side by side, in no folders."""
    for place in (root / split for split in splits):
        for path in sorted(place.glob("*/*.jpg")):
            path.rename(place / f"{path.parent.name}-{path.name}")
        for folder in filter(Path.is_dir, list(place.iterdir())):
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "train" / "cat").mkdir(), r"class 'cat' has no images"),
        (lambda root: write_photo(root / "val" / "cat" / "1.jpg", 0), r"has not: 'cat'"),
        (lambda root: [p.unlink() for p in root.glob("val/*/*")], r"val' has no images"),
        (lambda root: flatten(root, "val"), r"val' has 2 images but no folders: .*/val/<class>/"),
        (lambda root: flatten(root, "train"), r"train' has 2 images but no folders: put .* into"),
        (lambda root: flatten(root, "train", "val", "."), r"' has 4 images but no folders: put"),
        (lambda root: [shutil.rmtree(root / split) for split in SPLITS], r"' has no folders: put"),
        (
            lambda root: (root / "train").rename(root / "other"),
            r"has a folder 'val' but none called 'train'",
        ),
    ],
)
def test_an_unusable_folder_is_named(tmp_path: Path, change: object, message: str) -> None:
    for split in SPLITS:
        for name in ("ant", "bee"):
            write_photo(tmp_path / split / name / "1.jpg", 0)
    change(tmp_path)
    with pytest.raises(UserError, match=message):
        list(map(partial(open_dataset, DataConfig(name="folder", root=str(tmp_path))), SPLITS))


def test_a_missing_folder_and_an_unknown_dataset_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        open_dataset(DataConfig(name="folder", root=str(tmp_path / "nowhere")), "train")
    with pytest.raises(UserError, match="did you mean cifar10"):
        open_dataset(DataConfig(name="cifr10"), "train")


def test_images_of_every_mode_have_the_right_pixels(tmp_path: Path) -> None:
    red = (255, 0, 0)
    cases = {
        "rgb.png": (Image.new("RGB", (4, 4), red), red),
        "grey.png": (Image.new("L", (4, 4), 100), (100, 100, 100)),
        "bit.png": (Image.new("1", (4, 4), 1), (255, 255, 255)),
        "deep.png": (Image.new("I;16", (4, 4), 100 * 256), (100, 100, 100)),
        "palette.gif": (Image.new("RGB", (4, 4), red).convert("P"), red),
        "clear.png": (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), (255, 255, 255)),
        "half.webp": (Image.new("RGBA", (4, 4), (255, 0, 0, 255)), red),
        "print.tif": (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), red),
        "plain.bmp": (Image.new("RGB", (4, 4), red), red),
    }
    for name, (image, colour) in cases.items():
        image.save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
        pixels = read_image(tmp_path / name)
        assert pixels.shape == (4, 4, 3)
        assert pixels.dtype == torch.uint8
        torch.testing.assert_close(pixels[0, 0].tolist(), list(colour), atol=2, rtol=0, msg=name)


def test_a_turned_photograph_is_set_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (20, 10)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").shape == (20, 10, 3)


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", None])
def test_an_unreadable_image_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.jpg"
    write_photo(path, 0)
    path.write_bytes(path.read_bytes()[:400] if content is None else content)
    with pytest.raises(UserError, match=r"cannot read image '.*bad.jpg': "):
        read_image(path)


def test_a_bomb_is_refused_unopened(tmp_path: Path) -> None:
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    with pytest.raises(UserError, match="9000 x 9000 pixels, more than"):
        read_image(tmp_path / "bomb.png")


def test_folders_whose_names_show_alike_are_not_one_class(flat: Path) -> None:
    for name in (b"a\xff", b"a\\xff"):  # a byte that is no text, and what it is shown as
        write_photo(flat / os.fsdecode(name) / "1.jpg", 0, size=(8, 8))
    with pytest.raises(UserError) as refusal:
        names(flat, "train")
    assert "two folders in" in str(refusal.value)
    assert r"the bytes b'a\\xff' and b'a\xff'; rename" in str(refusal.value)
