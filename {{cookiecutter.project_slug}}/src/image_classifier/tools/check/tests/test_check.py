"""The check of a dataset: what it finds, what it does not, and what training then leaves out."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from image_classifier.cli import main
from image_classifier.config import DataConfig
from image_classifier.data import DATASETS, Source, open_dataset
from image_classifier.errors import UserError
from image_classifier.tools.check import check as checking
from image_classifier.tools.check import survey

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
    assert "images: train 12, val 4; 2 classes\nwidth: " in said
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
    findings = check(root)[1]["findings"]
    bad = findings["unreadable"]
    assert names(bad) == [{"train/ant/4.jpg"}, {hostile}]
    assert findings["tiny"] == findings["uniform"] == []
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


def test_of_equal_files_in_training_one_is_kept_and_imbalance_is_found(root, capsys):
    for number in range(50):
        (root / f"train/ant/copy{number}.jpg").hardlink_to(root / PICTURE)
    shutil.rmtree(root / "val" / "bee")
    findings = check(root, quarantine=True)[1]["findings"]
    (copies,), (rare,) = findings["duplicates"], findings["imbalance"]
    assert (len(copies["images"]), copies["what"]) == (51, "the same bytes")
    assert " = 48 more = " in capsys.readouterr().out  # and three by their names
    assert rare["what"] == "val has 0 images of 'bee', and 2 of 'ant'"
    lines = (root.parent / "photos.cache/quarantine.txt").read_text().splitlines()
    assert lines[0] == "train/ant/copy0.jpg\tthe same bytes as train/ant/0.jpg"
    assert len(lines) == 50


def test_validation_and_test_images_are_left_out_only_if_asked(root, capsys):
    shutil.copy(root / "val/ant/12.jpg", root / "val/bee/wrong.jpg")
    (root / "test/ant").mkdir(parents=True)
    (root / "test/bee").mkdir()
    shutil.copy(root / "val/bee/13.jpg", root / "test/bee/13.jpg")
    shutil.copy(root / "train/ant/0.jpg", root / "test/ant/0.jpg")
    (root / "val/ant/broken.jpg").touch()  # no command could score it
    words = ["check", "--data.root", str(root)]
    assert {*check(root)[1]["quarantine"]} == {"train/ant/0.jpg", "val/ant/broken.jpg"}
    assert main([*words, "--quarantine"]) == 1  # what is left in validation and test is serious
    said = capsys.readouterr().out
    assert "\n2 images added to '" in said
    assert (
        "--quarantine-all leaves out 3 validation and test images, too; their findings remain\n"
        in said
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


def test_another_label_in_training_says_nothing_against_that_of_a_held_out_image(root):
    shutil.copy(root / PICTURE, root / "val/bee/0.jpg")
    assert main(["check", "--data.root", str(root), "--quarantine-all"]) == 0
    listed = (root.parent / "photos.cache/quarantine.txt").read_text()
    assert listed == f"{PICTURE}\ta duplicate is in val: val/bee/0.jpg\n"


def test_groups_are_advised_where_training_divides_the_images(root, capsys):
    pytest.importorskip("image_classifier.tools.holdout")
    for place in ("val/ant/0.jpg", *(f"train/ant/{number}.jpg" for number in range(100, 130))):
        shutil.copy(root / PICTURE, root / place)
    for folder, is_divided in ((root, True), (root / "train", False)):
        assert main(["check", "--data.root", str(folder)]) == 1
        assert ("stay in one split by --data.groups" in capsys.readouterr().out) != is_divided


def test_odd_images_and_sizes(tmp_path, capsys):
    train, other, val = (tmp_path / "photos" / x for x in ("train/ant", "train/bee", "val/ant"))
    for number, folder in enumerate((train, other, val)):
        folder.mkdir(parents=True)
        color = (102 * number, 51, 255)
        Image.new("RGB", (40, 20), color).save(folder / "1.png") if number < 2 else None
    Image.radial_gradient("L").crop((0, 0, 9, 50)).convert("CMYK").save(val / "tiny.jpg")
    report = check(tmp_path / "photos")[1]
    said = capsys.readouterr().out
    assert "width: 9 to 40 pixels, median 40\nheight: 20 to 50 pixels, median 20\n" in said
    assert "--data.bits 16" not in said  # colors are not dark
    assert names(report["findings"]["tiny"]) == [{"val/ant/tiny.jpg"}]
    assert [item["what"] for item in report["findings"]["uniform"]] == ["40 x 20"] * 2


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
    "white": lambda path, _: Image.new("RGB", (40, 40), "white").save(f"{path}.png"),
    "transparent": lambda path, _: Image.new("RGBA", (40, 40)).save(f"{path}.png"),
    "gray 16": lambda path, n: Image.fromarray(noise(n, 4095)[..., 0]).save(f"{path}.png"),
    "color 16": lambda path, n: np.save(path, noise(n, 4095)),
    "color 16 in TIFF": save_color_tiff,
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_split_of_one_color_or_nearly_black_is_serious(kind, photos, tmp_path, capsys):
    if kind.startswith("color"):
        pytest.importorskip("image_classifier.tools.tiff")
    root = tmp_path / "photos"
    write_split(root, SPOILT[kind])
    assert main(["check", "--data.root", str(root)]) == 1
    said = capsys.readouterr().out
    assert "\n! images of one color, all of train and val: 16\n" in said
    assert "\n  and 6 more: --json FILE has all\n" in said
    assert ("from files of 16 bits: scale them" in said) == (kind != "white")
    shutil.copytree(photos, root, dirs_exist_ok=True)  # some are no reason to stop
    assert len(check(root)[1]["findings"]["uniform"]) == 16
    assert ", all of train" not in capsys.readouterr().out


def test_photographs_at_night_and_numbers_of_16_bits_are_not_of_one_color(tmp_path):
    night, wide = tmp_path / "night" / "photos", tmp_path / "wide" / "photos"
    write_split(
        night, lambda path, n: Image.fromarray(noise(n, 40).astype("u1")).save(f"{path}.png")
    )
    assert not check(night)[1]["findings"]["uniform"]
    write_split(wide, lambda path, n: Image.fromarray(noise(n, 255)[..., 0]).save(f"{path}.png"))
    assert (
        main(["check", "--data.root", str(wide), "--data.channels", "1", "--data.bits", "16"]) == 0
    )


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


def test_a_wrapper_is_refused_and_classes_that_look_alike_are_told(root, refusal, capsys):
    cure = f"--data.root '{root.parent / 'outer/photos'}'"
    (root.parent / "outer").mkdir()
    root = root.rename(root.parent / "outer/photos")
    assert cure in refusal("check", "--data.root", root.parent)
    shutil.copytree(root / "train/ant", root / "train/Ant ")
    capsys.readouterr()
    check(root)
    assert "warning: 'Ant ' and 'ant' are two classes" in capsys.readouterr().out


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
    unreadable = check(root)[1]["findings"]["unreadable"]
    assert "it has 5 channels, not 3: --data.channels 5" in unreadable[0]["what"]


def in_memory(seed, count=6):
    """Noise in memory, of one class."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 8, 8, 3), generator=generator).byte()
    return Source(torch.zeros(count).long(), ("ant",), pixels)


@pytest.mark.parametrize("is_reader", [False, True])
def test_a_test_part_of_any_dataset_is_checked_unless_it_is_that_for_validation(
    root, monkeypatch, is_reader, capsys
):
    parts = {"train": in_memory(0), "val": in_memory(1), "test": in_memory(2)}
    parts["test"].pixels[3] = parts["train"].pixels[1]
    if is_reader:
        parts = {name: replace(p, pixels=None, reader=p.read) for name, p in parts.items()}
    monkeypatch.setitem(DATASETS, "mine", lambda _, split: parts[split])
    serious, report = check(root, name="mine")
    assert (serious, [*report["images"]]) == (1, ["train", "val", "test"])
    assert names(report["findings"]["leaks"]) == [{"train[1]", "test[3]"}]
    parts["test"] = parts["val"]
    assert check(root, name="mine")[0] == 0
    assert "are not checked, as they are those for validation\n" in capsys.readouterr().out
    del parts["test"]
    assert check(root, name="mine")[0] == 0
    assert (
        "are not checked, as there are none that can be opened: 'test'\n" in capsys.readouterr().out
    )


def test_a_reader_that_draws_is_asked_for_one_image_at_a_time(root, monkeypatch):
    busy = []

    def read(index):
        busy.append(index)
        drawn = np.random.randint(256, size=(8, 8, 3), dtype=np.uint8)
        time.sleep(0.001)
        assert busy == [index]
        busy.clear()
        return torch.from_numpy(drawn)

    monkeypatch.setattr(survey, "num_cores", lambda: 4)
    monkeypatch.setattr(survey, "CHUNK", 1)
    noise = Source(torch.zeros(20).long(), ("ant",), reader=read, is_random=True)
    parts = {"train": noise, "val": in_memory(1)}
    monkeypatch.setitem(DATASETS, "mine", lambda _, split: parts[split])
    assert check(root, name="mine")[0] == 0


def test_what_the_list_leaves_out_is_told_and_a_split_without_images_is_refused(root):
    listed, data = root.parent / "photos.cache/quarantine.txt", DataConfig("folder", str(root))
    listed.parent.mkdir()
    listed.write_text("".join(f"val/bee/{number}.jpg\n" for number in (13, 15)) + PICTURE)
    val = open_dataset(data, "val")
    assert (len(val), val.notes[-1]) == (2, f"2 val images are left out, as '{listed}' says")
    listed.write_text("".join(f"{path.relative_to(root)}\n" for path in root.glob("val/*/*")))
    with pytest.raises(UserError, match="there are no val images: 4 val images are left out"):
        open_dataset(data, "val")


def test_a_class_is_rare_with_a_tenth_of_the_images_of_another():
    counts = {"train": {"ant": 40, "bee": 4, "cow": 5}, "val": {"ant": 2, "bee": 1, "cow": 2}}
    found = checking.rare_classes(SimpleNamespace(counts=lambda: counts))
    assert [one["what"] for one in found] == ["train has 4 images of 'bee', and 40 of 'ant'"]


def test_images_that_are_held_out_for_the_test_are_checked_too(root):
    pytest.importorskip("image_classifier.tools.holdout")
    data = DataConfig("folder", str(root / "train"), test_fraction=0.3)
    assert checking.find_splits(data) == (("train", "val", "test"), "")


def test_a_list_that_notepad_saved_is_read_whole(root):
    listed = root.parent / "photos.cache/quarantine.txt"
    listed.parent.mkdir()
    listed.write_text(f"{PICTURE}\tblurred\r\n", "utf-8-sig")
    assert len(open_dataset(DataConfig("folder", str(root)), "train")) == 11


def test_a_list_holds_with_another_cache_that_has_none(root, tmp_path, monkeypatch):
    listed = root.parent / "photos.cache/quarantine.txt"
    listed.parent.mkdir()
    listed.write_text(f"{PICTURE}\tblurred\n")
    data = DataConfig("folder", str(root), cache=str(tmp_path / "other"))
    assert len(open_dataset(data, "train")) == 11
    monkeypatch.chdir(root)
    assert len(open_dataset(replace(data, root="."), "train")) == 11
    (tmp_path / "other").mkdir()
    (tmp_path / "other/quarantine.txt").touch()
    assert len(open_dataset(data, "train")) == 12


def test_an_unknown_label_contradicts_no_other(root):
    pytest.importorskip("image_classifier.tools.label_table")
    for number in (0, 2):
        shutil.copy(root / f"train/ant/{number}.jpg", root / f"{number}.jpg")
    rows = ["train/ant/0.jpg,1,", "0.jpg,1,1", "train/ant/2.jpg,1,0", "2.jpg,1,1"]
    rows += ["val/bee/13.jpg,0,1"]
    splits = ",train\n".join([*rows[:4], ""]) + rows[4] + ",val\n"
    (root / "labels.csv").write_text("path,ant,bee,split\n" + splits)
    data = DataConfig("folder", str(root), labels="labels.csv", columns=("label=ant", "label=bee"))
    report = root.parent / "check.json"
    assert checking.check(data, (), str(report), False) == 1
    found = json.loads(report.read_text("ascii"))["findings"]
    assert names(found["conflicts"]) == [{"train/ant/2.jpg", "2.jpg"}]
    assert names(found["duplicates"]) == [{"train/ant/0.jpg", "0.jpg"}]


def test_a_split_of_one_color_stays_serious_as_no_list_mends_it(tmp_path):
    write_split(tmp_path / "photos", SPOILT["white"])
    assert main(["check", "--data.root", str(tmp_path / "photos"), "--quarantine"]) == 1


def test_a_name_with_a_backslash_is_left_out_by_the_list(root):
    (root / "train/ant/a\\b.jpg").touch()
    assert main(["check", "--data.root", str(root), "--quarantine"]) == 0
    assert "train/ant/a\\\\b.jpg\t" in (root.parent / "photos.cache/quarantine.txt").read_text()
    assert len(open_dataset(DataConfig("folder", str(root)), "train")) == 12


def test_an_image_in_all_splits_stays_in_the_test_alone(root):
    (root / "test/ant").mkdir(parents=True)
    (root / "test/bee").mkdir()
    for place in ("val/ant/0.jpg", "test/ant/0.jpg"):
        shutil.copy(root / PICTURE, root / place)
    shutil.copy(root / "train/bee/1.jpg", root / "test/bee/9.jpg")
    assert main(["check", "--data.root", str(root), "--quarantine-all"]) == 0
    listed = (root.parent / "photos.cache/quarantine.txt").read_text().splitlines()
    said = "a duplicate is in test: test/"
    assert [line.split("\t") for line in listed] == [
        [PICTURE, f"{said}ant/0.jpg"],
        ["train/bee/1.jpg", f"{said}bee/9.jpg"],
        ["val/ant/0.jpg", f"{said}ant/0.jpg"],
    ]
