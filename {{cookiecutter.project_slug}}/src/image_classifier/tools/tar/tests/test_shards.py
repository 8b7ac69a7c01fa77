"""`prepare --format tar`: shards with the bytes of the files, which `--data.name tar` reads."""

import io
import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_classifier.cli import main
from image_classifier.config import DataConfig
from image_classifier.data import DATASETS, Source, open_dataset
from image_classifier.errors import UserError
from image_classifier.tools.tar import shards

pytest.importorskip("image_classifier.tools.prepare")


@pytest.fixture
def root(photos, tmp_path):
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def prepare(root, *words):
    return main(["prepare", "--data.root", str(root), "--format", "tar", *words])


def members(path):
    """What a tar file holds, by name."""
    with tarfile.open(path) as shard:
        return {entry.name: shard.extractfile(entry).read() for entry in shard}


def test_tar_shards_hold_the_bytes_of_the_files_and_their_labels(root, monkeypatch, capsys):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2**14)  # of 2 kB each
    files = open_dataset(DataConfig("folder", str(root)), "train")
    folder = root.parent / "photos.cache/tar"
    assert prepare(root) == 0
    names = [f"train-{number:06}.tar" for number in range(3)]
    assert sorted(os.listdir(folder)) == [".lock", "classes.txt", *names, "val-000000.tar"]
    assert (folder / "classes.txt").read_text() == "ant\nbee\n"
    found = [pair for name in names for pair in members(folder / name).items()]
    for number in range(12):
        (image, content), (label, text) = found[2 * number : 2 * number + 2]
        assert image == f"{number:08}-{files.paths[number].stem}.jpg"
        assert label == image.replace("jpg", "cls")
        assert content == files.paths[number].read_bytes()
        assert int(text) == files.labels[number]
    before = {path: path.read_bytes() for path in folder.glob("*.tar")}
    (folder / names[1]).write_bytes(before[folder / names[1]][:-100] + b"?" * 100)
    (folder / names[2]).unlink()
    (folder / "train-000099.tar").touch()
    capsys.readouterr()
    assert prepare(root) == 0
    assert "12 images for train: 2 of 3 shards written" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.glob("*.tar")} == before


def test_images_in_memory_become_png_and_several_labels_json(tmp_path, monkeypatch, refusal):
    pixels = torch.randint(256, (3, 9, 8, 3), dtype=torch.uint8)
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.int8)
    monkeypatch.setitem(DATASETS, "mine", lambda *_: Source(labels, ("ant", "bee"), pixels))
    words = [
        "prepare",
        "--data.name",
        "mine",
        "--format",
        "tar",
        "--splits",
        "train",
        "--data.cache",
    ]
    assert main([*words, str(tmp_path)]) == 0
    found = members(tmp_path / "tar/train-000000.tar")
    assert json.loads(found["00000001.json"]) == {"labels": [0, 1]}
    image = Image.open(io.BytesIO(found["00000002.png"]))
    assert np.array_equal(np.asarray(image), pixels[2].numpy())
    labels[0, 0] = -1
    assert "weights or unknown labels cannot be kept" in refusal(*words, tmp_path)


def test_classes_called_by_numbers_keep_their_order_in_shards(tmp_path):
    pixels = torch.zeros((12, 9, 8, 3), dtype=torch.uint8)
    source = Source(torch.arange(12), tuple(sorted(map(str, range(12)))), pixels)
    shards.write_shards(source, ("train",), tmp_path)
    found = open_dataset(DataConfig("tar", str(tmp_path), val_fraction=0.001), "train")
    assert (found.labels.tolist(), found.classes) == (source.labels.tolist(), source.classes)


@pytest.mark.parametrize("bits", [8, 16])
def test_gray_images_in_memory_become_gray_png(tmp_path, bits):
    pixels = torch.randint(2**bits, (3, 9, 8, 1)).to(torch.uint8 if bits == 8 else torch.uint16)
    kind = {"channels": 1, "bits": bits}
    source = Source(torch.tensor([0, 1, 1]), ("ant", "bee"), pixels, **kind)
    shards.write_shards(source, ("train",), tmp_path)
    tar = DataConfig("tar", str(tmp_path), val_fraction=0.001, **kind)
    assert torch.equal(open_dataset(tar, "train").read(2), pixels[2])


def test_images_in_memory_with_other_channels_are_refused(tmp_path):
    pixels = torch.zeros((3, 9, 8, 4), dtype=torch.uint8)
    source = Source(torch.tensor([0, 1, 1]), ("ant", "bee"), pixels, channels=4)
    with pytest.raises(UserError, match="has gray or 8-bit RGB, not 4 x 8 bits"):
        shards.write_shards(source, ("train",), tmp_path)


def test_a_photograph_with_others_behind_it_is_a_jpeg(root):
    path = root / "train/bee/5.jpg"
    with Image.open(path) as image:
        image.save(path, "MPO", save_all=True, append_images=[image.copy()])
    assert prepare(root) == 0
    tar = DataConfig("tar", str(root.parent / "photos.cache/tar"))
    assert len(open_dataset(tar, "train")) == 12


@pytest.mark.parametrize("content", [b"<html>", b"P5 40000 40000 255\n"])
def test_a_file_that_is_no_image_gets_into_no_shard(root, refusal, content):
    (root / "train/bee/5.jpg").write_bytes(content)
    said = refusal("prepare", "--data.root", root, "--format", "tar")
    assert re.search(r"cannot read image '.*bee/5.jpg': .*`check --quarantine`", said)
    folder = root.parent / "photos.cache/tar"
    names = sorted(path.name for path in folder.glob("*.tar"))
    assert names == ["train-unfinished.tar", "val-unfinished.tar"]


def test_a_npy_file_is_said_to_be_none_for_shards(root, refusal):
    np.save(root / "train/bee/5.npy", np.zeros((9, 8, 3), np.uint8))
    said = refusal("prepare", "--data.root", root, "--format", "tar")
    assert re.search(r"bee/5.npy': --format tar takes no .npy files, --format raw does", said)
    assert "quarantine" not in said


def test_shards_that_are_not_all_written_are_refused_until_they_are(root, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2**14)
    tar = DataConfig("tar", str(root.parent / "photos.cache/tar"))
    tar_of = shards.tar_of

    def only_first(source, part):
        if part[0]:
            raise KeyboardInterrupt
        return tar_of(source, part)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "tar_of", only_first)
        assert prepare(root) != 0
    assert Path(tar.root, "train-000000.tar").exists()
    with pytest.raises(UserError, match="`prepare --format tar` did not finish: run it again"):
        open_dataset(tar, "train")
    assert prepare(root) == 0
    assert len(open_dataset(tar, "train")) == 12


def test_a_kill_between_two_splits_leaves_no_dataset_of_one(root, monkeypatch):
    tar = DataConfig("tar", str(root.parent / "photos.cache/tar"))
    write = shards.write_shards

    def killed(source, splits, folder):
        if splits == ("val",):
            raise KeyboardInterrupt
        write(source, splits, folder)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shards", killed)
        assert prepare(root) != 0
    assert len(open_dataset(tar, "train")) == 12
    with pytest.raises(UserError, match="`prepare --format tar` did not finish: run it again"):
        open_dataset(tar, "val")
    assert prepare(root) == 0
    assert len(open_dataset(tar, "val")) == 4


def test_shards_of_other_splits_are_refused_once_the_classes_have_changed(root):
    tar = DataConfig("tar", str(root.parent / "photos.cache/tar"))
    assert prepare(root) == 0
    assert prepare(root, "--splits", "train") == 0
    assert open_dataset(tar, "val").classes == ("ant", "bee")
    for split in ("train", "val"):
        shutil.copytree(root / split / "ant", root / split / "aaa")
    assert prepare(root, "--splits", "train") == 0
    assert open_dataset(tar, "train").classes == ("aaa", "ant", "bee")
    with pytest.raises(UserError, match=r"val-unfinished\.tar' .* did not finish: run it again"):
        open_dataset(tar, "val")
    assert prepare(root, "--splits", "val") == 0
    val = open_dataset(tar, "val")
    assert [val.classes[n] for n in val.labels.tolist()] == ["aaa"] * 2 + ["ant"] * 2 + ["bee"] * 2


def test_images_with_weights_are_kept_in_no_shard(tmp_path):
    pixels = torch.zeros((2, 9, 8, 3), dtype=torch.uint8)
    source = Source(torch.tensor([0, 1]), ("ant", "bee"), pixels, weights=torch.tensor([1.0, 2.0]))
    with pytest.raises(UserError, match="images with weights or unknown labels"):
        shards.write_shards(source, ("train",), tmp_path)


def test_shards_follow_labels_and_names_that_change_in_a_table(root):
    pytest.importorskip("image_classifier.tools.label_table")
    names = [f"train/{('ant', 'bee')[n % 2]}/{n}.jpg" for n in range(4)]
    tar = DataConfig("tar", str(root.parent / "photos.cache/tar"))
    for labels in ("abab", "abba", "acca"):
        rows = [f"{name},{label},train" for name, label in zip(names, labels, strict=True)]
        rows += [f"val/ant/12.jpg,{label},val" for label in "a"]
        (root / "labels.csv").write_text("\n".join(["path,label,split", *rows, ""]))
        assert prepare(root, "--data.labels", str(root / "labels.csv")) == 0
        source = open_dataset(tar, "train")
        assert "".join(source.classes[n] for n in source.labels.tolist()) == labels
