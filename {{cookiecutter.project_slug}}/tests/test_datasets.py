"""What a dataset may be: a `Source`, or anybody's folder."""

import errno
import os
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from image_classifier.config import Config, DataConfig
from image_classifier.data.cache_folder import cache_folder
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.paths import PathList
from image_classifier.data.datasets.source import (
    Source,
    are_replaced,
)
from image_classifier.data.loader import EvalData, TrainData
from image_classifier.data.splits import load_spread, mean_and_std
from image_classifier.errors import UserError
from image_classifier.runtime.distributed import World

CPU = World(torch.device("cpu"))

LABELS, CLASSES = torch.arange(6) % 2, ("ant", "bee")
PIXELS = torch.randint(256, (6, 9, 8, 3), generator=torch.Generator().manual_seed(0)).byte()
FILES = ["ant/1.jpg"] * 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pixels": None}, "pixels or in paths, not in neither"),
        ({"paths": PathList("photos", FILES)}, "pixels or in paths, not in both"),
        ({"pixels": PIXELS[:5]}, "6 labels, but 5 images"),
        ({"pixels": PIXELS / 255}, r"uint8, not a Tensor \(6, 9, 8, 3\) torch\.float32$"),
        ({"pixels": PIXELS.permute(0, 3, 1, 2)}, r"uint8, not a Tensor \(6, 3, 9, 8\)"),
        ({"pixels": PIXELS.numpy()}, r"not a ndarray \(6, 9, 8, 3\) uint8$"),
        ({"pixels": None, "paths": FILES}, r"should be PathList\(folder, paths\), not \["),
        ({"classes": ()}, "a tuple of str, the name of each class, not "),
        ({"classes": [*CLASSES]}, "a tuple of str, the name of each class, not "),
        ({"classes": ("ant", "ant")}, "classes of a Source should be of different names, not "),
        ({"labels": LABELS.tolist()}, r"labels of a Source should be .count,. int64 or "),
        ({"labels": LABELS.int()}, r"on the CPU, not a Tensor \(6,\) torch\.int32$"),
        (
            {"mean": (125.3, 123.0, 113.9)},
            "mean of a Source should be 3 numbers, .* from 0 to 1, not",
        ),
        ({"std": (0.2, 0.2)}, "std of a Source should be 3 numbers, one for each channel"),
        ({"std": (0.2, 0.0, 0.2)}, "std of a Source should be 3 numbers, one for each channel"),
        ({"weights": [1.0] * 6}, r"weights of a Source should be \(count,\) float32, finite, >= 0"),
        ({"weights": torch.ones(6).double()}, r"not a Tensor \(6,\) torch\.float64$"),
        ({"weights": torch.ones(5)}, r"not a Tensor \(5,\) torch\.float32$"),
        ({"weights": torch.tensor([1, 1, 1, 1, 1, -0.5])}, ">= 0, not all 0, not "),
        ({"weights": torch.tensor([1, 1, 1, 1, 1, torch.nan])}, "weights of a Source should be"),
        ({"weights": torch.tensor([1, 1, 1, 1, 1, torch.inf])}, "weights of a Source should be"),
        ({"weights": torch.zeros(6)}, ">= 0, not all 0, not "),
    ],
)
def test_what_no_source_can_hold_is_refused(fields, message):
    with pytest.raises(UserError, match=message) as caught:
        Source(**{"labels": LABELS, "classes": CLASSES, "pixels": PIXELS} | fields)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="a PathList of no paths below 'photos'"):
        PathList("photos", [])


PIXEL = PIXELS[0]


@pytest.mark.parametrize(
    "image",
    [PIXEL / 255, PIXEL.numpy(), PIXEL.permute(2, 0, 1), PIXEL[..., :1], PIXEL[None], None],
    ids=["float", "array", "channels first", "gray", "batch", "nothing"],
)
def test_images_of_a_reader_that_are_no_pixels_of_the_source_are_refused(image):
    source = Source(LABELS, CLASSES, reader=lambda _: image)
    wanted = r"reader of a Source should be a CPU tensor \(height, width, 3\) uint8, not "
    for place in ((), (0, 0, 0)):
        with pytest.raises(UserError, match=wanted):
            replace(source, is_random=bool(place)).read(0, *place)


def test_fields_are_kept_as_batches_and_checkpoints_want_them():
    strided = PIXELS.permute(0, 2, 1, 3)
    weights = (LABELS == 1).float()  # an image may count for nothing
    source = Source(LABELS, CLASSES, strided, mean=np.zeros(3), std=torch.ones(3), weights=weights)
    assert torch.equal(source.weights, weights)
    assert source.pixels.is_contiguous()  # else each batch would copy all images
    assert (source.mean, source.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert {type(value) for value in source.mean + source.std} == {float}


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_of_no_images_is_refused(monkeypatch, split):
    empty = Source(LABELS[:0], CLASSES, PIXELS[:0], mean=())
    monkeypatch.setitem(DATASETS, "mine", lambda *_: empty)
    config, world = Config(data=DataConfig(name="mine")), World(torch.device("cpu"))
    with pytest.raises(UserError, match=f"^{split}: there are no images$"):
        TrainData(config, world) if split == "train" else EvalData(config.data, split, world)


def offer(monkeypatch, make):
    """Let the dataset `mine` be what `make` makes of a split, and open it."""
    monkeypatch.setitem(DATASETS, "mine", lambda _data, split: make(split))
    return open_dataset(DataConfig(name="mine", root="nowhere"), "train")


def test_a_channel_that_is_one_color_can_be_normalized():
    _, std = mean_and_std(torch.full((2, 4, 4, 3), 7, dtype=torch.uint8))
    assert std == pytest.approx([1 / 255] * 3, rel=1e-3)


def test_what_no_dataset_can_be_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"dataset 'mine' returned a tuple: .*`Source\(labels"):
        offer(monkeypatch, lambda _: (PIXELS, LABELS))
    with pytest.raises(UserError, match="did you mean folder"):
        open_dataset(DataConfig(name="foldr"), "train")


def test_a_dataset_draws_the_same_whoever_asks(monkeypatch):
    drawn = lambda _: Source(torch.randperm(6), CLASSES, PIXELS)  # noqa: E731
    one, other = (offer(monkeypatch, drawn).labels for _ in range(2))
    assert torch.equal(one, other)


def put(root, *names):
    """Put files into a folder; they stay empty, as nobody reads them here."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def opened(root, split, **knobs):
    """A split of the images in a folder."""
    return open_dataset(DataConfig(name="folder", root=str(root), **knobs), split)


def names(root, *splits, **knobs):
    """The files of splits, below the folder that holds their classes."""
    lists = [opened(root, split, **knobs).paths for split in splits]
    return {os.fsdecode(paths.relative(index)) for paths in lists for index in range(len(paths))}


@pytest.fixture
def flat(tmp_path):
    """`train/<class>/`: 2 classes of 40 images that are not divided into splits."""
    put(tmp_path / "train", *(f"{('ant', 'bee')[number % 2]}/{number}.jpg" for number in range(80)))
    return tmp_path / "train"


def test_labels_follow_the_folders_and_a_limit_takes_from_every_class(flat):
    source = opened(flat, "train", limit=10)
    assert (source.classes, source.labels.tolist()) == (("ant", "bee"), [0] * 5 + [1] * 5)
    assert [source.paths[i].parent.name for i in range(10)] == ["ant"] * 5 + ["bee"] * 5


def test_an_image_stays_in_its_split_and_splits_may_be_folders_of_their_own(flat):
    train, val, root = names(flat, "train"), names(flat, "val"), flat.parent
    assert len(train | val) == len(train) + len(val) == 80
    assert 4 < len(val) < 30
    put(root, "test/ant/1.jpg", *(f"train/ant/{number}.jpg" for number in range(80, 120)))
    assert train < names(root, "train")
    assert val < names(root, "val")
    put(root, "val/bee/2.jpg")
    assert (len(names(root, "train")), names(root, "val")) == (120, {"bee/2.jpg"})
    for folder in (flat, root / "val"):
        shutil.rmtree(folder)
    assert names(root, "test") == {"ant/1.jpg"}


def test_folds_take_each_image_for_validation_once(flat):
    every = names(flat, "train", "val")
    for count in (2, 5, 10):
        folds = [names(flat, "val", val_fraction=1 / count, fold=fold) for fold in range(count)]
        assert sorted(name for fold in folds for name in fold) == sorted(every)
    assert folds[0] == names(flat, "val", val_fraction=0.1) < names(flat, "val")
    assert not names(flat, "train", fold=3) & names(flat, "val", fold=3)
    with pytest.raises(UserError, match=r"fraction 0\.2 there are the folds 0 \.\. 4"):
        names(flat, "val", fold=5)
    with pytest.raises(UserError, match=r"fraction 0\.2 there are the folds 0 \.\. 4"):
        open_dataset(DataConfig(fold=5), "train")  # of shapes, which are not divided
    put(flat.parent, "val/bee/2.jpg")
    with pytest.raises(UserError, match="has validation images of its own, in 'val'"):
        opened(flat.parent, "train", fold=1)


def test_what_systems_leave_behind_is_no_image(flat):
    before = names(flat, "train", "val")
    put(flat, ".ipynb_checkpoints/1.jpg", "__MACOSX/1.jpg", "ant/._1.jpg", "ant/notes.txt")
    put(flat, "@eaDir/1.jpg", "ant/@eaDir/1.jpg/thumbnail.jpg")  # of a Synology
    (flat / "ant" / "loop").symlink_to(flat / "ant")
    (flat / "cat").symlink_to(flat / "cat")  # no class
    (flat / "ant" / "folder.jpg").mkdir()  # no image
    # But links that lead nowhere are images that are missing, and names need not be text.
    (flat / "ant" / "gone.jpg").symlink_to(flat / "nowhere.jpg")
    (flat / "ant" / "0loop.jpg").symlink_to("0loop.jpg")
    put(flat, os.fsdecode(b"ant/\xff.jpg"))
    assert names(flat, "train", "val") - before == {
        "ant/0loop.jpg",
        "ant/gone.jpg",
        "ant/\udcff.jpg",
    }


def test_a_folder_that_may_not_be_listed_is_named(flat, monkeypatch):
    error = PermissionError(errno.EACCES, "Permission denied", b"/photos/bee")
    monkeypatch.setattr(os, "scandir", Mock(side_effect=[os.scandir(bytes(flat)), error]))
    with pytest.raises(UserError, match="cannot list folder '/photos/bee': Permission denied"):
        names(flat.parent, "train")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("train/ant/1.jpg train/cat/1.txt val/ant/1.jpg", "class 'cat' has no images for train"),
        ("train/ant/1.jpg train/bee/1.jpg val/ant/1.jpg val/cat/1.jpg", "has not: 'cat'"),
        ("train/ant/1.jpg train/bee/1.jpg val/ant/1.txt", "'ant' has no images for val"),
        ("train/ant/1.jpg train/bee/1.jpg val/1.jpg", r"has 1 images but no .*/val/<class>/"),
        ("1.jpg", "' has 1 images but no folders: put"),
        ("", "there is no such folder"),
    ],
)
def test_an_unusable_folder_is_named(tmp_path, files, message):
    put(tmp_path / "own", *files.split())
    with pytest.raises(UserError, match=message):
        [opened(tmp_path / "own", split) for split in ("train", "val")]


def test_images_at_the_root_of_a_disk_need_a_folder_for_what_is_made_of_them():
    with pytest.raises(UserError, match=r"'/' has nothing beside it: set --data\.cache"):
        cache_folder(DataConfig("folder", "/"))


def test_a_few_of_images_whose_labels_alternate_are_of_all_classes():
    labels = torch.arange(20_000) % 10
    source = Source(labels, tuple("abcdefghij"), pixels=torch.zeros(20_000, 1, 1, 3).byte())
    counts = source.thinned(500).class_counts()
    assert counts.sum() == 500
    assert 40 < counts.min() <= counts.max() < 60
    assert source.thinned(20_000).labels.equal(labels)
    assert source.thinned(3).labels.tolist() == [0, 6, 3]  # too few for all: evenly spread
    rare = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 0, 2])
    few = Source(
        rare, tuple("abc"), pixels=torch.arange(10).byte().view(10, 1, 1, 1).repeat(1, 1, 1, 3)
    )
    assert len({*few.thinned(8).pixels[:, 0, 0, 0].tolist()}) == 8


def test_a_few_images_are_spread_over_all():
    pixels = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 8, 8, 3)
    source = Source(torch.arange(8) % 2, CLASSES, pixels.contiguous())
    few = load_spread(source, 4, DataConfig(image_size=8), Mock(), CPU)
    assert few[:, 0, 0, 0].tolist() == [0, 2, 4, 6]


def test_a_fingerprint_is_of_all_that_a_run_learns_from():
    source = Source(LABELS, CLASSES, PIXELS)
    others = {"labels": 1 - LABELS, "classes": ("ant", "cat"), "pixels": 255 - PIXELS}
    others |= {"weights": torch.arange(12.0)[::2], "recipe": "prepared at 64 pixels"}
    sources = [source, *(replace(source, **{name: value}) for name, value in others.items())]
    assert len({one.fingerprint() for one in sources}) == 6


def test_a_file_of_another_size_is_noticed_though_few_are_read(tmp_path):
    for number in range(200):
        (tmp_path / f"{number}.jpg").write_bytes(b"image")
    paths = PathList(tmp_path, [f"{number}.jpg" for number in range(200)])
    source = Source(torch.zeros(200).long(), ("ant",), paths=paths)
    before = source.file_digests
    assert not are_replaced(before, replace(source).file_digests)
    (tmp_path / "1.jpg").write_bytes(b"another")  # of which the content is not read
    assert are_replaced(before, replace(source).file_digests)
    assert source.file_digests == before  # those of a million files are looked at once


def test_two_splits_of_the_same_images_are_known_wherever_these_are(flat):
    files = open_dataset(DataConfig(name="folder", root=str(flat)), "train")
    twin = flat.rename(flat.with_name("twin"))
    shutil.copytree(twin, flat)
    names = [path.relative_to(flat) for path in files.paths]
    copies = replace(files, paths=PathList(twin, names))
    images = torch.stack([torch.full((8, 8, 3), number) for number in range(len(files))]).byte()
    in_memory = replace(files, paths=None, pixels=images)
    by_reader = replace(in_memory, pixels=None, reader=lambda index: images[index])
    for source, same in ((files, copies), (in_memory, in_memory), (by_reader, by_reader)):
        assert source.has_same_images(same)
        assert source.has_same_images(same.fitted("multi-label", "train"))
        assert not source.has_same_images(same.picked(torch.arange(len(same) - 1)))
    last = torch.tensor([*range(len(files) - 1), 0])
    for images_that_differ in (images.flip(0), images[last]):
        assert not in_memory.has_same_images(replace(in_memory, pixels=images_that_differ))
    assert not by_reader.has_same_images(
        replace(by_reader, reader=lambda index: 255 - images[index])
    )
    copies.paths[0].unlink()
    assert not files.has_same_images(replace(copies))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 2, -1]), "2 of 3 labels of the val images are outside 0 .. 1.* is 2,"),
        (torch.tensor([[1, 0], [2, 0]], dtype=torch.int8), r"val images are \(2, 2\), 0 .. 2"),
        (torch.tensor([[1, 0], [-2, 0]], dtype=torch.int8), r"\(2, 2\), -2 .. 1: 1, 0 or -1"),
        (torch.tensor([[1, 0, 1]], dtype=torch.int8), r"\(1, 3\), 0 .. 1: .* each of 2 classes"),
    ],
)
def test_a_label_that_no_class_has_is_named(labels, message):
    source = Source(labels, ("ant", "bee"), pixels=torch.zeros(len(labels), 8, 8, 3).byte())
    with pytest.raises(UserError, match=message):
        source.check_labels("val")


def test_a_few_of_images_keep_their_weights():
    source = Source(LABELS, CLASSES, PIXELS, weights=torch.arange(6.0))
    assert source.thinned(3).weights.tolist() == [0.0, 3.0, 4.0]
