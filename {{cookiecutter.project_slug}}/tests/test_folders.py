"""How anybody's folders are understood: what is a part of a dataset, what a class, what neither."""

import hashlib
import random
import re
from itertools import product

import numpy as np
import pytest
import torch
from conftest import changed, paths_of, read_image, write_photo
from PIL import Image
from test_datasets import opened, put

from image_classifier.config import DataConfig
from image_classifier.data import DATASETS, Source, open_files
from image_classifier.data.datasets.listing import (
    class_folders,
    walk,
)
from image_classifier.data.datasets.parts import (
    divide,
    find_parts,
    look,
)
from image_classifier.errors import UserError
from image_classifier.train import train


def fill(root, folders, count=6):
    """Put empty images into folders: `a; b/{c,d}` are three."""
    for text in folders.split("; "):
        for pieces in product(*(piece.split(",") for piece in re.split("[{}]", text))):
            put(root, *(f"{''.join(pieces)}/{number}.jpg" for number in range(count)))


@pytest.mark.parametrize("folders", ["cat", "{train,val}/cat", "cat/day1"])
def test_a_single_class_is_refused(tmp_path, folders):
    fill(tmp_path, folders)
    cure = "only one class, 'cat': put the images of each class into a folder of its own"
    with pytest.raises(UserError, match=cure):
        opened(tmp_path, "train")


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        ("Training", "", "Testing"),
        ("TRAIN", "", "Test"),
        ("Train", "Valid", "Test"),
        ("train", "Validation", ""),
        ("train", "validation", ""),
        ("train_set", "val_set", "test-set"),
        ("TrainingData", "ValidationData", "TestData"),
        ("trainset", "valset", "testset"),
        ("seg_train/seg_train", "", "seg_test/seg_test"),
        ("training_set/training_set", "", "test_set/test_set"),
        ("train2017", "val2017", ""),
        ("asl_alphabet_train", "", "asl_alphabet_test/asl_alphabet_test"),
        ("images_train", "images_valid", ""),
    ],
)
def test_parts_are_known_by_the_names_that_people_give_them(tmp_path, train, val, test):
    counts = {train: 20, val: 3, test: 2}
    for place in filter(None, counts):
        fill(tmp_path, f"{place}/{{ant,bee}}", counts[place])
    put(tmp_path, "seg_pred/seg_pred/1.jpg", "papers/1.pdf", "__MACOSX/train/1.jpg")
    splits = ["train", "val", *["test"] * bool(test)]
    found = [opened(tmp_path, split) for split in splits]
    assert {source.classes for source in found} == {("ant", "bee")}
    sizes = [len(source) for source in found]
    assert sizes[0] == 40 if val else sum(sizes[:2]) == 40
    assert sizes[1:] == [6, 4][not val :][: len(splits) - 1] if val else sizes[2:] == [4]
    assert found[0].paths.root == tmp_path / train
    named = {"train": train, "val": val, "test": test}
    line = ", ".join(f"{part}: {name!r}" for part, name in named.items() if name)
    is_usual = (train, val, test) == ("train", "validation", "")
    told = "".join(note for note in found[0].notes if note.startswith("parts of the dataset: "))
    assert told == ("" if is_usual else f"parts of the dataset: {line}")


def test_a_name_is_a_part_only_where_that_is_certain():
    assert find_parts(["train_gray", "test_gray", "train_color", "test_color"]) == {}
    assert find_parts(["val", "Train", "train", "valid", "Val"]) == {"train": "train", "val": "val"}
    whole = find_parts(["seg_train", "seg_test", "train", "val"])
    assert whole == {"train": "train", "val": "val"}
    assert find_parts(["train_test", "ant"]) == {}


def test_a_flat_class_that_is_called_as_a_part_is_to_be_renamed(tmp_path):
    fill(tmp_path, "train; bus; car")
    with pytest.raises(UserError, match="if 'train' is a class, give it another name"):
        opened(tmp_path, "train")


def test_a_file_in_place_of_a_folder_is_called_a_file(tmp_path):
    put(tmp_path, "photos.zip")
    with pytest.raises(UserError, match=r"photos\.zip': it is a file, no folder"):
        opened(tmp_path / "photos.zip", "train")


def test_of_many_classes_without_images_a_few_are_named(tmp_path):
    fill(tmp_path, "{train,val}/{a,b}")
    fill(tmp_path, "train/{c,d,e,f,g,h}")
    assert opened(tmp_path, "val").notes == ("no val images of 6: c, d, e, f, g, ...",)


def test_images_of_every_suffix_that_the_decoder_knows_are_found(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(9, 8, 3), dtype=np.uint8)
    for suffix in ("jfif", "JPE", "ppm", "pnm", "pgm"):
        image, kind = Image.fromarray(pixels), "JPEG" if suffix[0] in "jJ" else "PPM"
        image = image.convert("L") if suffix == "pgm" else image
        (tmp_path / suffix).mkdir()
        image.save(tmp_path / suffix / f"1.{suffix}", kind)
    source = opened(tmp_path, "train")
    assert len(source) == 5
    for index in range(5):
        path, found = source.paths[index], source.read(index).numpy()
        assert torch.equal(read_image(path), source.read(index))
        if path.suffix in (".ppm", ".pnm"):
            assert np.array_equal(found, pixels)


def test_of_16_bit_colors_none_is_lost_in_silence(tmp_path):
    (tmp_path / "1.ppm").write_bytes(b"P6 2 1 65535\n" + bytes(range(12)))
    assert read_image(tmp_path / "1.ppm").shape == (1, 2, 3)
    with pytest.raises(UserError, match="only 8 bits can be read: save it as TIFF"):
        read_image(tmp_path / "1.ppm", bits=16)
    (tmp_path / "1.pgm").write_bytes(b"P5 2 1 65535\n" + bytes([1, 2, 3, 4]))
    assert read_image(tmp_path / "1.pgm", 1, 16).flatten().tolist() == [258, 772]


def test_a_class_without_images_is_told_by_the_suffixes_of_its_files(tmp_path):
    fill(tmp_path, "ant; bee")
    put(tmp_path, "cat/1.avif", "cat/2", "cat/3.avif")
    wanted = r"class 'cat' .* its 3 files have no suffix, '\.avif'; images are \.jpg, "
    with pytest.raises(UserError, match=wanted):
        opened(tmp_path, "train")


RUN = "{0}/.lock {0}/status.json {0}/config.json {0}/checkpoints/best.pt {0}/wandb/run/1.png"


@pytest.mark.parametrize(
    "files",
    [
        "runs/folder/.lock",
        RUN.format("runs/folder"),
        RUN.format("beta/repeat/seed-0") + " beta/results.json",
        RUN.format("mine") + " mine/report/1.png",
        RUN.format(".") + " memory/1.json",
        "beta/status.json beta/config.json beta/checkpoints/last.pt",
        "own.cache/train/index.safetensors own.cache/train/.lock own.cache/quarantine.txt",
        "heat/.no_class heat/0001-1.png heat/0002-2.png",
    ],
)
@pytest.mark.parametrize("place", [".", "train"])
def test_a_run_a_cache_and_heat_maps_are_never_classes(tmp_path, files, place):
    fill(tmp_path, f"{place}/{{ant,zebra}}", 30)
    if place == "train":
        fill(tmp_path, "val/{ant,zebra}")
    before = [opened(tmp_path, split) for split in ("train", "val")]
    put(tmp_path / place, *files.split())
    for was, split in zip(before, ("train", "val"), strict=True):
        now = opened(tmp_path, split)
        assert (now.classes, now.fingerprint()) == (("ant", "zebra"), was.fingerprint())
    assert len([*walk(bytes(tmp_path / place))]) == 60


def test_a_class_with_images_stays_one_whatever_lies_in_it(tmp_path):
    fill(tmp_path, "runs; x.cache; wandb; memory/day1; mine/{day1,day2}")
    put(tmp_path, "runs/.lock", "wandb/status.json", "memory/day1/config.json", ".lock")
    put(tmp_path, "mine/status.json", "mine/day1/.lock", "mine/day1/config.json")
    assert class_folders(bytes(tmp_path)) == [b"memory", b"mine", b"runs", b"wandb", b"x.cache"]
    assert len([*walk(bytes(tmp_path))]) == 36


@pytest.mark.parametrize("fold", [0, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_image_of_each_class_stays_in_training_and_no_other_moves(count, fold):
    files = [[b"%d/%d.jpg" % (label, n) for n in range(count)] for label in range(300)]
    files[0] = [b"0/%d.jpg" % n for n in range(40)]
    expected = set()
    for own in files:
        hashes = {
            file: int.from_bytes(hashlib.blake2b(file, digest_size=8).digest(), "big")
            for file in own
        }
        start, stop = fold * 0.2 * 2**64, (fold + 1) * 0.2 * 2**64
        chosen = {file for file, value in hashes.items() if start <= value < stop}
        if len(chosen) == len(own):  # none would be left for training
            chosen.remove(min(own, key=hashes.__getitem__))
        expected |= chosen
    for seed in range(2):
        rows = [(file, label) for label, own in enumerate(files) for file in own]
        random.Random(seed).shuffle(rows)
        names, labels = zip(*rows, strict=True)
        data, labels = DataConfig(fold=fold), torch.tensor(labels)
        train, val = (divide(names, labels, data, split) for split in ("train", "val"))
        assert sorted([*train.tolist(), *val.tolist()]) == [*range(len(rows))]
        assert {names[index] for index in val} == expected
        assert len(labels[train].unique()) == 300


def test_of_several_labels_each_keeps_an_image_in_training():
    files = [b"%d.jpg" % n for n in range(200)]
    rows = torch.zeros(200, 50, dtype=torch.int8)
    rows[torch.arange(200), torch.arange(200) % 50] = 1
    rows[5] = -1
    train = divide(files, rows, DataConfig(val_fraction=0.7), "train")
    assert (rows[train] == 1).any(0).all()
    assert 50 < len(train) < 110


def test_too_few_images_are_refused_with_what_helps(tmp_path):
    fill(tmp_path, "{ant,bee,cat}", 1)
    assert len(opened(tmp_path, "train")) == 3
    with pytest.raises(UserError, match=r"of 3 images, none is for val: add images$"):
        opened(tmp_path, "val")
    fill(tmp_path, "{ant,bee,cat}", 3)
    with pytest.raises(UserError, match=r"none is for val: .* set --data\.val-fraction 0\.3$"):
        opened(tmp_path, "val", val_fraction=0.01)
    assert len(opened(tmp_path, "val", val_fraction=0.3))


CAFES = "Caf\xe9", "Cafe\u0301"


@pytest.mark.parametrize(
    ("ours", "theirs"), [CAFES, CAFES[::-1], ("Cat", "cat"), ("cat", "cat "), ("a  b", "A b")]
)
def test_names_that_look_alike_are_one_class_of_two_splits(tmp_path, ours, theirs):
    fill(tmp_path, f"train/{{{ours},zebra}}; val/{{{theirs},zebra}}")
    train, val = (opened(tmp_path, split) for split in ("train", "val"))
    assert val.classes == train.classes
    assert torch.equal(val.labels, train.labels)
    assert val.notes == (f"'{tmp_path}/val': {theirs!a} is taken for class {ours!a}",)
    fill(tmp_path, f"val/{ours}")
    with pytest.raises(UserError, match=re.escape(f"{theirs!a} looks like {ours!a}")):
        opened(tmp_path, "val")


def test_of_two_classes_whose_names_look_alike_a_third_folder_is_neither(tmp_path):
    fill(tmp_path, "train/{Cat,cat,dog}; val/{CAT,dog}")
    with pytest.raises(UserError, match="has not: 'CAT'; 'CAT' looks like 'Cat' and 'cat'"):
        opened(tmp_path, "val")


def test_a_name_that_is_nearly_right_is_suggested(tmp_path):
    fill(tmp_path, "train/{spider,zebra}; val/{spidre,zebra}")
    with pytest.raises(UserError, match="has not: 'spidre'; did you mean spider"):
        opened(tmp_path, "val")
    assert look("\uff23\u200dat ") == look("cat")


def test_a_link_back_brings_no_images_of_other_classes(tmp_path):
    for name in ("train/ant/1.jpg", "train/bee/2.jpg", "train/ant/__3__.jpg"):
        write_photo(tmp_path / name, 0)
    (tmp_path / "train/ant/up").symlink_to("..")
    (tmp_path / "train/bee/top").symlink_to(tmp_path)
    data = DataConfig("folder", str(tmp_path / "train"), val_fraction=0.001)
    source = open_files(data, "all")
    assert paths_of(source) == ["ant/1.jpg", "ant/__3__.jpg", "bee/2.jpg"]


def test_images_of_one_class_train_nothing(config, monkeypatch):
    source = Source(torch.zeros(8, dtype=torch.int64), ("ant",), torch.zeros(8, 4, 4, 3).byte())
    monkeypatch.setitem(DATASETS, "mine", lambda *_: source)
    with pytest.raises(UserError, match="all images are of one class, 'ant'"):
        train(changed(config, data__name="mine"))
