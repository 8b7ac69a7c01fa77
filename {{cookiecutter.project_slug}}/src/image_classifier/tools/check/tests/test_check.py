"""The check of a dataset: what it finds, what it does not, and what training then leaves out."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from image_classifier.cli import main
from image_classifier.config import DataConfig
from image_classifier.data import DATASETS, Source, open_dataset
from image_classifier.errors import UserError
from image_classifier.tools.check import check as checking
from image_classifier.tools.check import near_duplicates, survey

PICTURE = "train/ant/0.jpg"


@pytest.fixture
def root(photos, tmp_path):
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def check(root, quarantine=False, name="folder"):
    """The number of serious findings, and the report."""
    report = root.parent / "check.json"
    serious = checking.check(DataConfig(name=name, root=str(root)), (), str(report), quarantine)
    return serious, json.loads(report.read_text("ascii"))


def names(finding):
    return [{image["path"] for image in item["images"]} for item in finding]


def test_a_clean_dataset_has_no_findings(root, capsys):
    assert main(["check", "--data.root", str(root)]) == 0
    said = capsys.readouterr().out
    assert "images: train 12, val 4; 2 classes\nfiles: 16 JPEG RGB\n" in said
    assert said.endswith("\nnothing serious\n")
    report = check(root)[1]
    assert not any(report["findings"].values())
    assert report["images"] == {"train": {"ant": 6, "bee": 6}, "val": {"ant": 2, "bee": 2}}
    assert not (root.parent / "photos.cache").exists()


def test_images_of_a_table_may_have_several_labels(root, capsys):
    pytest.importorskip("image_classifier.tools.label_table")
    shutil.copy(root / PICTURE, root / "copy.jpg")
    shutil.copy(root / "train/bee/1.jpg", root / "same.jpg")
    rows = [f"{PICTURE},ant|dark,train", "copy.jpg,ant,train", "train/bee/1.jpg,bee,train"]
    rows += ["same.jpg,bee,train", "train/bee/3.jpg,,train", "gone.jpg,ant|bee,train"]
    rows += ["val/ant/12.jpg,ant,val", "val/bee/13.jpg,bee|dark,test"]
    (root / "labels.csv").write_text("path,label,split\n" + "\n".join(rows))
    command = ["check", "--data.root", str(root), "--data.labels", "labels.csv", "--quarantine"]
    assert main([*command, "--json", str(root / "check.json")]) == 0
    assert "images: train 6, val 1, test 1; 3 classes\n" in capsys.readouterr().out
    report = json.loads((root / "check.json").read_text())
    assert report["images"]["train"] == {"ant": 3, "bee": 3, "dark": 1}
    (conflict,) = report["findings"]["conflicts"]
    assert {image["path"]: image["class"] for image in conflict["images"]} == {
        PICTURE: "ant|dark",
        "copy.jpg": "ant",
    }
    assert report["skipped"]["not in the table"] == 11
    assert set(report["quarantine"]) == {PICTURE, "copy.jpg", "same.jpg", "gone.jpg"}
    data = DataConfig("folder", str(root), labels="labels.csv")
    source = open_dataset(data, "val")
    assert (source.classes, source.labels.tolist()) == (("ant", "bee", "dark"), [[1, 0, 0]])
    with pytest.raises(UserError, match="'ant' has no train images"):
        open_dataset(data, "train")


def test_unreadable_files_are_named_with_the_reason_and_join_the_list_of_a_user(root, capsys):
    (root / "train/ant/4.jpg").write_bytes((root / "train/ant/4.jpg").read_bytes()[:900])
    hostile = os.fsdecode(b"val/bee/a\tb\n\xff.jpg")
    (root / hostile).touch()
    assert main(["check", "--data.root", str(root)]) == 1
    said = capsys.readouterr().out
    assert all(line.isprintable() and line.isascii() for line in said.split("\n"))
    bad = check(root)[1]["findings"]["unreadable"]
    assert names(bad) == [{"train/ant/4.jpg"}, {hostile}]
    assert "truncated" in bad[0]["what"]
    assert "photos" not in bad[0]["what"]  # the reason alone
    listed, data = root.parent / "photos.cache/quarantine.txt", DataConfig("folder", str(root))
    listed.parent.mkdir()
    listed.write_text("train/ant/0.jpg\r\n\ntrain/bee/1.jpg\tblurred\n")
    assert check(root, quarantine=True)[0] == check(root)[0] == 0
    assert "train/bee/1.jpg\tblurred\n" in listed.read_text()
    paths = open_dataset(data, "train").paths
    kept = {paths.relative(index).decode() for index in range(len(paths))}
    assert kept == {f"{('ant', 'bee')[n % 2]}/{n}.jpg" for n in (2, 3, 5, 6, 7, 8, 9, 10, 11)}
    assert len(open_dataset(data, "val")) == 4
    listed.write_text("".join(f"train/ant/{number}.jpg\n" for number in range(0, 12, 2)))
    with pytest.raises(UserError, match="'ant' has no train images"):
        open_dataset(data, "train")


@pytest.mark.parametrize(
    ("change", "copy", "found", "num_left_out"),
    [
        (lambda image: ImageOps.scale(image, 0.5), "val/ant/9.jpg", {"leaks"}, 1),
        (lambda image: ImageOps.crop(image, 1), "val/bee/9.jpg", {"leaks", "conflicts"}, 1),
        (lambda image: image.point(lambda value: 1.2 * value), "train/bee/9.jpg", {"conflicts"}, 2),
        (ImageOps.grayscale, "train/ant/9.jpg", {"duplicates"}, 0),
    ],
)
def test_a_changed_copy_is_found_and_may_be_left_out(root, change, copy, found, num_left_out):
    with Image.open(root / PICTURE) as image:
        change(image).save(root / copy, quality=50)
    serious, report = check(root)
    assert serious == len(found - {"duplicates"})
    pairs = {kind: names(items) for kind, items in report["findings"].items() if items}
    assert pairs == {kind: [{PICTURE, copy}] for kind in found}
    assert [*report["quarantine"]] == [PICTURE, copy][:num_left_out]
    assert check(root, quarantine=True)[0] == check(root)[0] == 0


def test_of_equal_files_in_training_one_is_kept_and_imbalance_is_found(root):
    for number in range(50):
        (root / f"train/ant/copy{number}.jpg").hardlink_to(root / PICTURE)
    shutil.rmtree(root / "val" / "bee")
    findings = check(root, quarantine=True)[1]["findings"]
    (copies,), (rare,) = findings["duplicates"], findings["imbalance"]
    assert (len(copies["images"]), copies["what"]) == (51, "the same bytes")
    assert rare["what"] == "val has 0 images of 'bee', and 2 of 'ant'"
    lines = (root.parent / "photos.cache/quarantine.txt").read_text().splitlines()
    assert lines[0] == "train/ant/copy0.jpg\tthe same bytes as train/ant/0.jpg"
    assert len(lines) == 50


def test_images_that_only_look_alike_are_no_duplicates(root):
    sky, noise = np.linspace(0, 255, 64)[:, None, None], np.random.default_rng(0)
    for number in range(4):
        blocks = noise.integers(0, 120, (6, 6, 3)).repeat(8, 0).repeat(8, 1)
        frame = np.pad(blocks, ((8, 8), (8, 8), (0, 0)), constant_values=250)
        grain = noise.integers(0, 6, (64, 64, 3))
        skies = sky * (0.9 + 0.02 * number) + grain
        for name, pixels in (("flat", 60 * number + grain), ("frame", frame), ("sky", skies)):
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(root / "train" / ("ant", "bee")[number % 2] / f"{name}{number}.png")
    findings = check(root)[1]["findings"]
    assert not any(findings[kind] for kind in ("leaks", "conflicts", "duplicates"))


def scan(number):
    """A gray, dark, centered picture, such as a slice of a head: all have one outline."""
    chance = np.random.default_rng(number)
    y, x = np.mgrid[-1:1:128j, -1:1:128j]
    radius = np.hypot(x / 0.62, y / 0.76)
    tissue = np.full((128, 128), 70.0)
    for cells, strength in ((6, 12), (14, 8), (30, 6)):
        noise = chance.normal(size=(cells, cells)).astype(np.float32)
        tissue += strength * np.asarray(Image.fromarray(noise).resize((128, 128)))
    pixels = np.select([radius < 0.88, radius < 0.93, radius < 1], [tissue, 12, 190], 0)
    return Image.fromarray(
        (pixels + chance.normal(size=pixels.shape) * 3).clip(0, 255).astype("u1")
    )


def test_scans_with_one_outline_are_told_of_but_only_copies_are_left_out(tmp_path):
    root, classes = tmp_path / "scans", ("glioma", "none", "pituitary")
    for number in range(48):
        folder = root / ("train", "val")[number % 2] / classes[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        scan(number).save(folder / f"{number}.jpg", quality=92)
    shutil.copy(root / "val/none/1.jpg", root / "train/none/a.jpg")
    with Image.open(root / "val/none/7.jpg") as image:
        ImageOps.scale(ImageOps.crop(image, 2), 0.7).save(root / "train/glioma/b.jpg", quality=60)
    report = check(root, quarantine=True)[1]
    copied = {"train/none/a.jpg": "val/none/1.jpg", "train/glioma/b.jpg": "val/none/7.jpg"}
    leaks = {frozenset(paths) for paths in names(report["findings"]["leaks"])}
    assert leaks == {frozenset(pair) for pair in copied.items()}
    assert set(report["quarantine"]) == set(copied)
    (chain,) = (item for item in report["findings"]["alike"] if len(item["images"]) > 20)
    assert "images of 3 classes, in train, val" in chain["what"]


def test_a_large_group_of_copies_is_told_of_and_only_equal_files_are_left_out(root):
    with Image.open(root / PICTURE) as image:
        for number in range(checking.MAX_COPIES):
            image.save(root / f"val/bee/copy{number}.jpg", quality=60 + number)
    shutil.copy(root / PICTURE, root / "train/ant/same.jpg")
    report = check(root, quarantine=True)[1]
    assert [*report["quarantine"]] == ["train/ant/same.jpg"]
    assert "the same bytes" in report["quarantine"]["train/ant/same.jpg"]
    (alike,) = report["findings"]["alike"]
    assert len(alike["images"]) == checking.MAX_COPIES + 2
    (root / "val/bee/copy0.jpg").unlink()  # 10 different files
    report = check(root)[1]
    assert not report["findings"]["alike"]
    assert [*report["quarantine"]] == [PICTURE]


def test_a_chain_of_frames_is_no_group_of_copies():
    def compare(pairs):  # frames that are not far from each other
        return (pairs[:, 0] - pairs[:, 1]).abs() <= 3

    frames = torch.arange(40)
    pairs = torch.stack((frames[:-1], frames[1:]), dim=1)
    group = near_duplicates.group_copies(pairs, 40, compare)
    assert compare(torch.stack((frames, group), dim=1)).all()
    assert group[:9].tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert group[20:].tolist() == list(range(20, 40))  # after some groups it is no copying


def test_a_file_that_vanishes_during_the_check_is_no_copy(root):
    images = survey.Images(DataConfig("folder", str(root)), ("train",))
    (root / PICTURE).unlink()
    gone, there = images.fine_grays(np.arange(2))
    assert gone.max() == 0
    assert there.max() > 0


def test_validation_and_test_images_are_left_out_only_if_asked(root, capsys):
    shutil.copy(root / "val/ant/12.jpg", root / "val/bee/wrong.jpg")
    (root / "test/ant").mkdir(parents=True)
    (root / "test/bee").mkdir()
    shutil.copy(root / "val/bee/13.jpg", root / "test/bee/13.jpg")
    shutil.copy(root / "train/ant/0.jpg", root / "test/ant/0.jpg")
    (root / "val/ant/broken.jpg").touch()  # no command could score it
    words = ["check", "--data.root", str(root)]
    assert main([*words, "--quarantine"]) == 0
    assert (
        "--quarantine-all leaves out 3 validation and test images, too" in capsys.readouterr().out
    )
    listed = (root.parent / "photos.cache/quarantine.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["train/ant/0.jpg", "val/ant/broken.jpg"]
    assert main(words) == 1
    assert "--quarantine makes" not in capsys.readouterr().out  # there is nothing left for it
    assert main([*words, "--quarantine-all"]) == 0
    listed = (root.parent / "photos.cache/quarantine.txt").read_text().splitlines()
    added = ["val/ant/12.jpg", "val/bee/13.jpg", "val/bee/wrong.jpg"]
    assert [line.split("\t")[0] for line in listed if "broken" not in line][1:] == added
    assert main(words) == 0


def test_odd_images_sizes_and_colors(tmp_path):
    train, other, val = (tmp_path / "photos" / x for x in ("train/ant", "train/bee", "val/ant"))
    for number, folder in enumerate((train, other, val)):
        folder.mkdir(parents=True)
        color = (102 * number, 51, 255)
        Image.new("RGB", (40, 20), color).save(folder / "1.png") if number < 2 else None
    Image.radial_gradient("L").crop((0, 0, 9, 50)).convert("CMYK").save(val / "tiny.jpg")
    Image.fromarray(np.full((40, 40), 4095, np.uint16)).save(val / "dark.png")
    (val / "notes.txt").touch()
    report = check(tmp_path / "photos")[1]
    assert report["colors"] == {"mean": [0.2, 0.2, 1.0], "std": [0.2, 0.0, 0.0]}
    assert report["kinds"] == {"PNG RGB": 2, "PNG I;16": 1, "JPEG CMYK": 1}
    assert report["skipped"] == {"of suffix '.txt'": 1}
    assert report["sizes"]["width"] == {"min": 9, "median": 40, "max": 40}
    assert names(report["findings"]["tiny"]) == [{"val/ant/tiny.jpg"}]
    assert len(report["findings"]["uniform"]) == 3
    assert names(report["findings"]["dark"]) == [{"val/ant/dark.png"}]
    assert report["findings"]["dark"][0]["what"] == "its highest value is 4,095 of 65,535"


def write_split(root, save, splits=("train", "val")):
    """Write eight images of each split by `save(path, number)`."""
    for number in range(8 * len(splits)):
        folder = root / splits[number // 8] / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / f"{number}", number)


def noise(number, most):
    """Colors from 0 to `most`, in 12 x 10 blocks, of which one is `most`."""
    pixels = np.random.default_rng(number).integers(most + 1, size=(12, 10, 3), dtype=np.uint16)
    pixels[3, 4] = most
    return pixels.repeat(4, 0).repeat(4, 1)


def save_color_tiff(path, number):
    library = pytest.importorskip("tifffile")
    library.imwrite(f"{path}.tif", noise(number, 4095), photometric="rgb")


SPOILT = {
    "white": (lambda path, _: Image.new("RGB", (40, 40), "white").save(f"{path}.png"), "uniform"),
    "transparent": (lambda path, _: Image.new("RGBA", (40, 40)).save(f"{path}.png"), "uniform"),
    "gray 16": (
        lambda path, number: Image.fromarray(noise(number, 4095)[..., 0]).save(f"{path}.png"),
        "dark",
    ),
    "color 16": (lambda path, number: np.save(path, noise(number, 4095)), "dark"),
    "color 16 in TIFF": (save_color_tiff, "dark"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_split_of_one_color_or_nearly_black_is_serious(kind, photos, tmp_path, capsys):
    save, name = SPOILT[kind]
    root = tmp_path / "photos"
    write_split(root, save)
    assert main(["check", "--data.root", str(root)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^! .*, all of train and val: (.*: )?16$", said, re.MULTILINE)
    items = check(root)[1]["findings"][name]
    assert len(items) == 16
    if name == "dark":
        # Without tools/tiff, all that is known is the upper byte.
        said = "its highest value is (4,095|less than 4,096) of 65,535"
        assert any(re.fullmatch(said, item["what"]) for item in items)
    shutil.copytree(photos, root, dirs_exist_ok=True)  # some are no reason to stop
    capsys.readouterr()
    assert len(check(root)[1]["findings"][name]) == 16
    assert ", all of train" not in capsys.readouterr().out


def test_photographs_at_night_are_not_nearly_black_for_their_bits(tmp_path):
    write_split(
        tmp_path / "photos",
        lambda path, number: Image.fromarray(noise(number, 40).astype(np.uint8)).save(
            f"{path}.png"
        ),
    )
    assert not check(tmp_path / "photos")[1]["findings"]["dark"]


@pytest.mark.parametrize("folder", [".", "unknown", "1/2"])
def test_test_images_without_labels_do_not_stop_the_check(root, folder, capsys):
    (root / "test" / folder).mkdir(parents=True)
    shutil.copy(root / "train/bee/1.jpg", root / "test" / folder / "9.jpg")
    assert main(["check", "--data.root", str(root)]) == 0
    said = capsys.readouterr().out
    assert "images: train 12, val 4; 2 classes\n" in said
    assert "the test images are not checked, as they have no labels: '" in said
    (root / "Test").mkdir()
    (root / "test/ant").mkdir()
    shutil.copy(root / "train/ant/2.jpg", root / "test/ant/9.jpg")
    if folder == ".":  # it has labels now
        assert main(["check", "--data.root", str(root)]) == 1
        assert "images that leak between splits: 1\n" in capsys.readouterr().out


def test_a_wrapper_is_refused_and_classes_that_look_alike_are_told(root, refusal):
    cure = f"--data.root '{root.parent / 'outer/photos'}'"
    (root.parent / "outer").mkdir()
    root = root.rename(root.parent / "outer/photos")
    assert cure in refusal("check", "--data.root", root.parent)
    shutil.copytree(root / "train/ant", root / "train/Ant ")
    report = check(root)[1]
    assert [item["what"] for item in report["findings"]["names"]] == ["'Ant ' and 'ant'"]


def test_images_in_memory_are_checked_too_and_a_mistake_is_one_line(root, monkeypatch, refusal):
    pixels = torch.randint(256, (4, 8, 8, 3), generator=torch.Generator().manual_seed(0)).byte()
    pixels[3], labels = pixels[0], torch.zeros(4).long()
    train, val = (Source(labels[n], ("ant",), pixels[n]) for n in (slice(3), slice(3, 4)))
    monkeypatch.setitem(DATASETS, "mine", lambda _, split: train if split == "train" else val)
    assert names(check(root, name="mine")[1]["findings"]["leaks"]) == [{"train[0]", "val[0]"}]
    words = ("check", "--data.name", "mine")
    assert "mine has none: it is in memory" in refusal(*words, "--quarantine")
    labels += 1
    assert "3 of 3 labels of the train images are outside 0 .. 0" in refusal(*words)
    words = ("check", "--data.root")
    assert "cannot write '/proc/x': No such file" in refusal(*words, root, "--json", "/proc/x")
    assert "has no folder 'test'" in refusal(*words, root, "--splits", "test")
    assert "--data.root 'nowhere': there is no such folder" in refusal(*words, "nowhere")


def test_images_of_any_channels_are_surveyed(satellite, tmp_path, capsys):
    root = Path(shutil.copytree(satellite, tmp_path / "arrays"))
    shutil.copy(root / "train/ant/0.npy", root / "val/ant/99.npy")
    words = ("--data.root", str(root), "--data.channels", "5", "--data.bits", "16")
    assert main(["check", *words]) == 1
    said = capsys.readouterr().out
    assert "'train/ant/0.npy' = 'val/ant/99.npy'" in said
    assert "files: 33 NPY" in said
    (mean,) = (line for line in said.splitlines() if line.startswith("mean of"))
    found = [float(share) for share in mean.partition(": ")[2].split(", ")]
    assert found == pytest.approx([0.061, 0.061, 0.19, 0.061, 0.061], abs=0.005)
    unreadable = check(root)[1]["findings"]["unreadable"]
    assert "it has 5 channels, not 3: --data.channels 5" in unreadable[0]["what"]
