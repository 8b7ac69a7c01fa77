"""The audit of a dataset: what it finds and what not, and what training then leaves out."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_photo
from PIL import Image

from image_classifier.cli import main
from image_classifier.config import DataConfig, UserError
from image_classifier.data.datasets import DATASETS, open_dataset
from image_classifier.data.datasets.quarantine import (
    path_of,
    printable_path,
)
from image_classifier.data.datasets.source import Source
from image_classifier.tools.check import check as auditing
from image_classifier.tools.check import survey


@pytest.fixture
def root(photos: Path, tmp_path: Path) -> Path:
    """Photographs, 12 and 4, that a test may change."""
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def check(root: Path, quarantine: bool = False, name: str = "folder") -> tuple[int, dict]:
    """How much is serious, and all that was found."""
    report = root.parent / "check.json"
    serious = auditing.check(DataConfig(name=name, root=str(root)), (), str(report), quarantine)
    return serious, json.loads(report.read_text("ascii"))


def names(finding: list[dict]) -> list[set[str]]:
    """The images of each item of a finding."""
    return [{image["path"] for image in item["images"]} for item in finding]


def opened(root: Path, split: str = "train") -> Source:
    """A split as training opens it."""
    return open_dataset(DataConfig(name="folder", root=str(root)), split)


def files(root: Path, split: str = "train") -> set[str]:
    """The files of a split, below its folder."""
    source = opened(root, split)
    return {os.fsdecode(source.paths.relative(index)) for index in range(len(source))}


def changed_copy(source: Path, copy: Path, change: str) -> None:
    """A picture that is not the same bytes, as a dataset may have it of another web site."""
    with Image.open(source) as image:
        width, height = image.size
        changed = {
            "smaller": lambda: image.resize((width // 2, height // 2)),
            "cropped": lambda: image.crop((2, 3, width - 3, height - 2)),
            "brighter": lambda: image.point(lambda value: min(255, value * 1.2)),
            "grey": lambda: image.convert("L"),
            "saved anew": lambda: image,
        }
        changed[change]().save(copy, quality=50)


def test_nothing_is_found_where_nothing_is_wrong(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--data.root", str(root)]) == 0
    said = capsys.readouterr().out
    serious, report = check(root)
    assert serious == 0
    assert not any(report["findings"].values())
    assert report["images"] == {"train": {"ant": 6, "bee": 6}, "val": {"ant": 2, "bee": 2}}
    assert "images: train 12, val 4; 2 classes\nfiles: 16 JPEG RGB\n" in said
    assert said.endswith("\nnothing serious\n")
    assert not (root.parent / "photos.cache").exists()


@pytest.mark.parametrize("many", [1, 1000])  # images, from which on processes read them
def test_what_cannot_be_read_is_named_with_the_reason_and_can_be_left_out(
    root: Path, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "MANY", many)
    whole = (root / "train/ant/4.jpg").read_bytes()
    (root / "train/ant/4.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "val/bee/13.jpg").write_bytes(b"")
    assert main(["check", "--data.root", str(root)]) == 1
    serious, report = check(root)
    assert serious == 2
    bad = report["findings"]["unreadable"]
    assert names(bad) == [{"train/ant/4.jpg"}, {"val/bee/13.jpg"}]
    assert "truncated" in bad[0]["what"]
    assert "photos" not in bad[0]["what"]  # the reason alone
    before = opened(root).fingerprint()
    assert check(root, quarantine=True)[0] == 0
    source = opened(root)
    assert source.fingerprint() != before
    assert source.notes == (f"1 train image is left out, as '{root}.cache/quarantine.txt' says",)
    assert "ant/4.jpg" not in files(root)
    assert files(root, "val") == {"ant/12.jpg", "ant/14.jpg", "bee/15.jpg"}
    assert check(root)[0] == 0


def test_deep_greys_that_become_black_are_found(root: Path) -> None:
    for number, top in enumerate((4095, 40, 65535)):
        grey = np.random.default_rng(number).integers(0, top + 1, (40, 40)).astype(np.uint16)
        grey[0, 0] = top
        Image.fromarray(grey).save(root / "train/ant" / f"deep{number}.png")
    serious, report = check(root)
    assert serious == 0
    found = report["findings"]["dark"]
    assert names(found) == [{"train/ant/deep0.png"}, {"train/ant/deep1.png"}]
    assert [item["what"] for item in found] == [
        "its highest value is 4,095 of 65,535",
        "its highest value is 40 of 65,535",
    ]


def test_a_picture_that_is_known_from_training_is_found_in_a_changed_form(root: Path) -> None:
    changes = ("smaller", "cropped", "brighter", "grey", "saved anew")
    expected = []
    for number, change in enumerate(changes):
        original, copy = f"train/bee/{2 * number + 1}.jpg", f"val/bee/9{number}.jpg"
        changed_copy(root / original, root / copy, change)
        expected.append({original, copy})
    serious, report = check(root)
    assert serious == 5
    assert sorted(map(sorted, names(report["findings"]["leaks"]))) == [*map(sorted, expected)]
    assert report["findings"]["conflicts"] == []
    assert check(root, quarantine=True)[0] == 0
    assert files(root) == {f"ant/{n}.jpg" for n in range(0, 12, 2)} | {"bee/11.jpg"}
    assert len(opened(root, "val")) == 4 + 5  # what is tested on stays as it is
    assert check(root)[0] == 0


def test_of_two_labels_of_a_picture_neither_is_learned(root: Path) -> None:
    changed_copy(root / "train/ant/0.jpg", root / "train/bee/98.jpg", "cropped")
    shutil.copy(root / "train/ant/2.jpg", root / "val/bee/99.jpg")
    serious, report = check(root)
    assert serious == 3  # one is in two splits as well
    expected = [{"train/ant/0.jpg", "train/bee/98.jpg"}, {"train/ant/2.jpg", "val/bee/99.jpg"}]
    assert names(report["findings"]["conflicts"]) == expected
    assert set(report["quarantine"]) == {"train/ant/0.jpg", "train/bee/98.jpg", "train/ant/2.jpg"}


def test_of_equal_files_in_training_one_is_kept(root: Path) -> None:
    for name in ("97", "98"):
        shutil.copy(root / "train/ant/0.jpg", root / f"train/ant/{name}.jpg")
    changed_copy(root / "train/bee/1.jpg", root / "train/bee/99.jpg", "smaller")
    serious, report = check(root, quarantine=True)
    assert serious == 0
    copies = report["findings"]["copies"]
    assert names(copies) == [
        {"train/ant/0.jpg", "train/ant/97.jpg", "train/ant/98.jpg"},
        {"train/bee/1.jpg", "train/bee/99.jpg"},
    ]
    assert [item["what"] for item in copies] == ["the same bytes", "the same picture"]
    list_ = (root.parent / "photos.cache/quarantine.txt").read_text()
    reason = "the same bytes as train/ant/0.jpg"
    assert list_ == f"train/ant/97.jpg\t{reason}\ntrain/ant/98.jpg\t{reason}\n"


def test_pictures_that_only_look_alike_are_no_twins(root: Path) -> None:
    place = np.linspace(0, 1, 64)
    sky = np.broadcast_to(255 * place[:, None, None], (64, 64, 3))
    noise = np.random.default_rng(0)
    for number in range(4):
        flat = np.full((64, 64, 3), 60 * number) + noise.integers(0, 4, (64, 64, 3))
        frame = np.full((64, 64, 3), 250.0)
        part = noise.integers(0, 120, (6, 6, 3)).repeat(8, 0).repeat(8, 1)
        frame[8:56, 8:56] = part
        skies = sky * (0.9 + 0.02 * number) + noise.integers(0, 6, (64, 64, 3))
        for name, pixels in (("flat", flat), ("frame", frame), ("sky", skies)):
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(root / "train" / ("ant", "bee")[number % 2] / f"{name}{number}.png")
    serious, report = check(root)
    assert serious == 0
    assert not report["findings"]["copies"]
    assert len(report["findings"]["plain"]) == 4


def test_what_files_are_is_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "train" / "ant"
    square = Image.radial_gradient("L").resize((50, 50))
    exif = Image.Exif()
    exif[0x0112] = 6
    square.convert("CMYK").save(folder / "cmyk.jpg", exif=exif)
    square.rotate(45).convert("P").save(folder / "a.gif", save_all=True, append_images=[square])
    square.crop((0, 0, 9, 50)).convert("I;16").save(folder / "deep.png")
    square.convert("LA").save(folder / "really_png.jpg", "PNG")
    (folder / "notes.txt").write_text("no image")
    (folder / ".DS_Store").write_text("")
    write_photo(root / "train" / "lost.jpg", 0)
    (folder / "gone.jpg").symlink_to("nowhere")
    _, report = check(root)
    expected = {"JPEG RGB": 16, "JPEG CMYK": 1, "GIF P": 1, "PNG I;16": 1, "PNG LA": 1}
    expected |= {"turned by EXIF": 1, "animated: only the first picture is read": 1}
    assert report["kinds"].items() >= expected.items()
    assert names(report["findings"]["misnamed"]) == [{"train/ant/really_png.jpg"}]
    assert names(report["findings"]["tiny"]) == [{"train/ant/deep.png"}]
    assert report["skipped"] == {
        "of suffix '.txt'": 1,
        "left behind by a system or tool": 1,
        "in no folder of a class": 1,
        "a link to nothing, or no plain file": 1,
    }
    assert "not taken for images: " in capsys.readouterr().out


def test_colours_are_those_of_the_training_images(tmp_path: Path) -> None:
    for number in range(4):
        name = f"photos/{('train', 'val')[number // 2]}/ant/{number}.png"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 20), ((0, 51, 255), (102, 51, 255))[number % 2]).save(tmp_path / name)
    _, report = check(tmp_path / "photos")
    assert report["colours"] == {"mean": [0.2, 0.2, 1.0], "std": [0.2, 0.0, 0.0]}
    assert report["sizes"]["width"] == {"min": 40, "median": 40, "max": 40}


def test_rare_and_missing_classes_are_told(root: Path) -> None:
    for number in range(60):
        path = root / "train" / "ant" / f"copy{number}.jpg"
        path.hardlink_to(root / "train" / "ant" / "0.jpg")
    shutil.rmtree(root / "val" / "bee")
    _, report = check(root)
    whats = [item["what"] for item in report["findings"]["lopsided"]]
    assert whats == [
        "train has 6 images of 'bee', and 66 of 'ant'",
        "val has 0 images of 'bee', and 2 of 'ant'",
    ]


NAMES = [b"ant/\xff.jpg", b"ant/a\tb\n.jpg", b"ant/\\x41.jpg", "ant/é名 \u202e.jpg".encode()]


def test_names_that_are_no_text_survive_the_list(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        shown = printable_path(name)
        assert shown.isprintable()
        assert path_of(shown) == name
        Path(os.fsdecode(os.fsencode(root) + b"/train/" + name)).write_bytes(b"<html>")
    capsys.readouterr()
    assert check(root)[0] == 4
    said = capsys.readouterr().out
    assert said.isascii()
    assert all(line.isprintable() for line in said.split("\n"))
    assert check(root, quarantine=True)[0] == 0
    assert len(opened(root)) == 12


def test_a_list_can_be_changed_by_hand(root: Path) -> None:
    path = root.parent / "photos.cache" / "quarantine.txt"
    path.parent.mkdir()
    path.write_text("train/ant/0.jpg\r\n\ntrain/ant/gone.jpg\tblurred\n")
    assert "ant/0.jpg" not in files(root)
    assert opened(root).notes[-1].endswith("1 of its lines name no file: 'train/ant/gone.jpg'")
    (root / "val/ant/12.jpg").write_bytes(b"")
    assert check(root, quarantine=True)[0] == 0
    assert "train/ant/gone.jpg\tblurred\n" in path.read_text()  # what was written stays
    path.write_text("".join(f"train/ant/{number}.jpg\n" for number in range(0, 12, 2)))
    with pytest.raises(UserError, match=r"'ant' has no train images: all 6 are left out, as '"):
        opened(root)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="cannot read the list"):
        opened(root)


def test_images_in_memory_are_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 8, 8, 3), generator=noise).byte()
    pixels = pixels.repeat_interleave(4, 1).repeat_interleave(4, 2)
    pixels[3] = pixels[0]
    sources = {"train": slice(0, 3), "val": slice(3, 4)}

    def mine(_: DataConfig, split: str) -> Source:
        part = pixels[sources[split]]
        return Source(torch.zeros(len(part)).long(), ("ant",), pixels=part)

    monkeypatch.setitem(DATASETS, "mine", mine)
    serious, report = check(tmp_path / "none", name="mine")
    assert serious == 1
    assert names(report["findings"]["leaks"]) == [{"train[0]", "val[0]"}]
    assert main(["check", "--data.name", "mine", "--quarantine"]) == 2
    assert "mine has none: it is in memory" in capsys.readouterr().err


def test_a_mistake_in_checking_is_answered_in_one_line(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, expected in (
        (["--data.root", "nowhere"], "--data.root 'nowhere': there is no such folder"),
        (["--data.root", str(root), "--json", "/proc/x/y"], "cannot write '/proc/x/y'"),
        (["--data.root", str(root), "--splits", "test"], "has no folder 'test'"),
    ):
        assert main(["check", *words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert expected in said
