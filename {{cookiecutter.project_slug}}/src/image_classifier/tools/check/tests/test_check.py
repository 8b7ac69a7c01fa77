"""The check of a dataset: what it finds, what it does not, and what training then leaves out."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_classifier.cli import main
from image_classifier.config import DataConfig
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.source import Source
from image_classifier.errors import UserError
from image_classifier.tools.check import check as checking


@pytest.fixture
def root(photos, tmp_path):
    """Photographs, 12 and 4, that a test may change."""
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def check(root, quarantine=False, name="folder"):
    """The number of serious findings, and the report."""
    report = root.parent / "check.json"
    serious = checking.check(DataConfig(name=name, root=str(root)), (), str(report), quarantine)
    return serious, json.loads(report.read_text("ascii"))


def names(finding):
    """The images of each item of a finding."""
    return [{image["path"] for image in item["images"]} for item in finding]


def files(root, split="train"):
    """The files of a split as training opens it, below its folder."""
    source = open_dataset(DataConfig(name="folder", root=str(root)), split)
    return {os.fsdecode(source.paths.relative(index)) for index in range(len(source))}


CHANGES = {
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "cropped": lambda image: image.crop((1, 1, image.width - 1, image.height - 1)),
    "brighter": lambda image: image.point(lambda value: min(255, value * 1.2)),
    "gray": lambda image: image.convert("L"),
    "saved again": lambda image: image,
}


def changed_copy(source, copy, change):
    """The same picture in other bytes."""
    with Image.open(source) as image:
        CHANGES[change](image).save(copy, quality=50)


def test_a_clean_dataset_has_no_findings(root, capsys):
    assert main(["check", "--data.root", str(root)]) == 0
    said = capsys.readouterr().out
    serious, report = check(root)
    assert serious == 0
    assert not any(report["findings"].values())
    assert report["images"] == {"train": {"ant": 6, "bee": 6}, "val": {"ant": 2, "bee": 2}}
    assert "images: train 12, val 4; 2 classes\nfiles: 16 JPEG RGB\n" in said
    assert said.endswith("\nnothing serious\n")
    assert not (root.parent / "photos.cache").exists()


def test_unreadable_files_are_named_with_the_reason_and_can_be_left_out(root, capsys):
    whole = (root / "train/ant/4.jpg").read_bytes()
    (root / "train/ant/4.jpg").write_bytes(whole[: len(whole) // 2])
    hostile = b"val/bee/a\tb\n\xff.jpg"
    Path(os.fsdecode(os.fsencode(root) + b"/" + hostile)).write_bytes(b"")
    assert main(["check", "--data.root", str(root)]) == 1
    said = capsys.readouterr().out
    assert said.isascii()
    assert all(line.isprintable() for line in said.split("\n"))
    serious, report = check(root)
    assert serious == 2
    bad = report["findings"]["unreadable"]
    assert names(bad) == [{"train/ant/4.jpg"}, {os.fsdecode(hostile)}]
    assert "truncated" in bad[0]["what"]
    assert "photos" not in bad[0]["what"]  # the reason alone
    listed = root.parent / "photos.cache/quarantine.txt"
    listed.parent.mkdir()
    listed.write_text("train/ant/gone.jpg\tblurred\n")
    assert check(root, quarantine=True)[0] == 0
    assert "ant/4.jpg" not in files(root)
    assert len(files(root, "val")) == 4
    assert check(root)[0] == 0
    assert "train/ant/gone.jpg\tblurred\n" in listed.read_text()  # existing lines stay


def test_images_that_leak_between_splits_are_found_in_a_changed_form(root):
    expected = []
    for number, change in enumerate(CHANGES):
        original, copy = f"train/bee/{2 * number + 1}.jpg", f"val/bee/9{number}.jpg"
        changed_copy(root / original, root / copy, change)
        expected.append({original, copy})
    serious, report = check(root)
    assert serious == 5
    assert sorted(map(sorted, names(report["findings"]["leaks"]))) == [*map(sorted, expected)]
    assert report["findings"]["conflicts"] == []
    assert check(root, quarantine=True)[0] == 0
    assert files(root) == {f"ant/{n}.jpg" for n in range(0, 12, 2)} | {"bee/11.jpg"}
    assert len(files(root, "val")) == 4 + 5  # the test set stays as it is
    assert check(root)[0] == 0


def test_an_image_with_conflicting_labels_is_left_out_altogether(root):
    changed_copy(root / "train/ant/0.jpg", root / "train/bee/98.jpg", "saved again")
    shutil.copy(root / "train/ant/2.jpg", root / "val/bee/99.jpg")
    serious, report = check(root)
    assert serious == 3  # one leaks as well
    expected = [{"train/ant/0.jpg", "train/bee/98.jpg"}, {"train/ant/2.jpg", "val/bee/99.jpg"}]
    assert names(report["findings"]["conflicts"]) == expected
    assert set(report["quarantine"]) == {"train/ant/0.jpg", "train/bee/98.jpg", "train/ant/2.jpg"}


def test_of_equal_files_in_training_one_is_kept_and_imbalance_is_found(root):
    for number in range(60):
        (root / f"train/ant/copy{number}.jpg").hardlink_to(root / "train/ant/0.jpg")
    changed_copy(root / "train/bee/1.jpg", root / "train/bee/99.jpg", "half the size")
    shutil.rmtree(root / "val" / "bee")
    serious, report = check(root, quarantine=True)
    assert serious == 0
    copies, near = report["findings"]["duplicates"]
    assert (len(copies["images"]), copies["what"]) == (61, "the same bytes")
    assert names([near]) == [{"train/bee/1.jpg", "train/bee/99.jpg"}]
    (rare,) = report["findings"]["imbalance"]
    assert rare["what"] == "val has 0 images of 'bee', and 2 of 'ant'"
    lines = (root.parent / "photos.cache/quarantine.txt").read_text().splitlines()
    assert lines[0] == "train/ant/copy0.jpg\tthe same bytes as train/ant/0.jpg"
    assert len(lines) == 60


def test_images_that_only_look_alike_are_no_duplicates(root):
    place = np.linspace(0, 1, 64)
    sky = np.broadcast_to(255 * place[:, None, None], (64, 64, 3))
    noise = np.random.default_rng(0)
    for number in range(4):
        flat = np.full((64, 64, 3), 60 * number) + noise.integers(0, 4, (64, 64, 3))
        frame = np.full((64, 64, 3), 250.0)
        frame[8:56, 8:56] = noise.integers(0, 120, (6, 6, 3)).repeat(8, 0).repeat(8, 1)
        skies = sky * (0.9 + 0.02 * number) + noise.integers(0, 6, (64, 64, 3))
        for name, pixels in (("flat", flat), ("frame", frame), ("sky", skies)):
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(root / "train" / ("ant", "bee")[number % 2] / f"{name}{number}.png")
    serious, report = check(root)
    assert serious == 0
    assert not report["findings"]["duplicates"]


def test_odd_images_sizes_and_colors(tmp_path):
    folder = tmp_path / "photos" / "train" / "ant"
    folder.mkdir(parents=True)
    for number, red in enumerate((0, 102)):
        Image.new("RGB", (40, 20), (red, 51, 255)).save(folder / f"{number}.png")
    shutil.copytree(tmp_path / "photos" / "train", tmp_path / "photos" / "val")
    colors = check(tmp_path / "photos")[1]["colors"]
    assert colors == {"mean": [0.2, 0.2, 1.0], "std": [0.2, 0.0, 0.0]}
    Image.radial_gradient("L").crop((0, 0, 9, 50)).convert("CMYK").save(folder / "tiny.jpg")
    Image.fromarray(np.full((40, 40), 4095, np.uint16)).save(folder / "dark.png")
    (folder / "notes.txt").write_text("no image")
    _, report = check(tmp_path / "photos")
    assert report["kinds"] == {"PNG RGB": 4, "PNG I;16": 1, "JPEG CMYK": 1}
    assert report["skipped"] == {"of suffix '.txt'": 1}
    assert report["sizes"]["width"] == {"min": 9, "median": 40, "max": 40}
    assert names(report["findings"]["tiny"]) == [{"train/ant/tiny.jpg"}]
    assert len(report["findings"]["uniform"]) == 5
    (dark,) = report["findings"]["dark"]
    assert names([dark]) == [{"train/ant/dark.png"}]
    assert dark["what"] == "its highest value is 4,095 of 65,535"


def test_the_list_can_be_edited_by_hand(root):
    path = root.parent / "photos.cache" / "quarantine.txt"
    path.parent.mkdir()
    path.write_text("train/ant/0.jpg\r\n\ntrain/bee/1.jpg\tblurred\n")
    assert len(files(root)) == 10
    path.write_text("".join(f"train/ant/{number}.jpg\n" for number in range(0, 12, 2)))
    with pytest.raises(UserError, match="'ant' has no train images"):
        files(root)


def test_images_in_memory_are_checked_too(tmp_path, monkeypatch, refusal):
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 8, 8, 3), generator=noise).byte()
    pixels = pixels.repeat_interleave(4, 1).repeat_interleave(4, 2)
    pixels[3] = pixels[0]

    def mine(_, split):
        part = {"train": pixels[:3], "val": pixels[3:]}[split]
        return Source(torch.zeros(len(part)).long(), ("ant",), pixels=part)

    monkeypatch.setitem(DATASETS, "mine", mine)
    serious, report = check(tmp_path / "none", name="mine")
    assert serious == 1
    assert names(report["findings"]["leaks"]) == [{"train[0]", "val[0]"}]
    words = ("check", "--data.name", "mine")
    assert "mine has none: it is in memory" in refusal(*words, "--quarantine")
    wrong = Source(torch.arange(3), ("ant",), pixels=pixels[:3])
    monkeypatch.setitem(DATASETS, "mine", lambda *_: wrong)
    assert "2 of 3 labels of the train images are outside 0 .. 0" in refusal(*words)


def test_a_mistake_is_one_line(root, refusal):
    for words, expected in (
        ("--data.root nowhere", "--data.root 'nowhere': there is no such folder"),
        ("--json /proc/x/y", "cannot write '/proc/x/y': No such file"),
        ("--splits test", "has no folder 'test'"),
    ):
        assert expected in refusal("check", "--data.root", root, *words.split())
