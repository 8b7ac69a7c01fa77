"""Near-duplicates: which changed copies `check` finds, and what it does not take for one."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from image_classifier.cli import main
from image_classifier.tools.near_duplicates import copies
from image_classifier.tools.near_duplicates.copies import (
    MAX_COPIES,
    group_copies,
)

checks = pytest.importorskip("image_classifier.tools.check.check")

PICTURE = "train/ant/0.jpg"


@pytest.fixture
def root(photos, tmp_path):
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def check(root, *words):
    """What `check` finds, in its report."""
    report = root.parent / "check.json"
    main(["check", "--data.root", str(root), "--json", str(report), *words])
    return json.loads(report.read_text("ascii"))


def names(finding):
    return [{image["path"] for image in item["images"]} for item in finding]


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
    report = check(root)
    pairs = {kind: names(items) for kind, items in report["findings"].items() if items}
    assert pairs == {kind: [{PICTURE, copy}] for kind in found}
    assert [*report["quarantine"]] == [PICTURE, copy][:num_left_out]
    check(root, "--quarantine")
    left = check(root)["findings"]
    assert not any(left[kind] for kind in found - {"duplicates"})


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
    findings = check(root)["findings"]
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
    report = check(root, "--quarantine")
    copied = {"train/none/a.jpg": "val/none/1.jpg", "train/glioma/b.jpg": "val/none/7.jpg"}
    leaks = {frozenset(paths) for paths in names(report["findings"]["leaks"])}
    assert leaks == {frozenset(pair) for pair in copied.items()}
    assert set(report["quarantine"]) == set(copied)
    assert any(len(alike) > 20 for alike in names(report["findings"]["alike"]))


def test_a_large_group_of_copies_is_told_of_and_only_equal_files_are_left_out(root):
    with Image.open(root / PICTURE) as image:
        for number in range(MAX_COPIES):
            image.save(root / f"val/bee/copy{number}.jpg", quality=60 + number)
    shutil.copy(root / PICTURE, root / "train/ant/same.jpg")
    report = check(root, "--quarantine")
    assert [*report["quarantine"]] == ["train/ant/same.jpg"]
    assert "the same bytes" in report["quarantine"]["train/ant/same.jpg"]
    (alike,) = report["findings"]["alike"]
    assert len(alike["images"]) == MAX_COPIES + 2
    (root / "val/bee/copy0.jpg").unlink()  # 10 different files
    report = check(root)
    assert not report["findings"]["alike"]
    assert [*report["quarantine"]] == [PICTURE]


def test_a_chain_of_frames_is_no_group_of_copies():
    def compare(pairs):  # frames that are not far from each other
        return (pairs[:, 0] - pairs[:, 1]).abs() <= 3

    frames = torch.arange(40)
    pairs = torch.stack((frames[:-1], frames[1:]), dim=1)
    group = group_copies(pairs, 40, compare)
    assert compare(torch.stack((frames, group), dim=1)).all()
    assert group[:9].tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert group[20:].tolist() == list(range(20, 40))  # after some groups it is no copying


def test_without_this_tool_check_finds_files_with_the_same_bytes(root, monkeypatch):
    monkeypatch.setattr(checks, "find_tool", lambda *_: None)
    shutil.copy(root / PICTURE, root / "val/ant/same.jpg")
    with Image.open(root / PICTURE) as image:
        image.save(root / "val/bee/9.jpg", quality=50)
    assert names(check(root)["findings"]["leaks"]) == [{PICTURE, "val/ant/same.jpg"}]


def test_comparing_many_pairs_says_how_far_it_is(monkeypatch):
    told = Mock()
    monkeypatch.setattr(copies, "Progress", told)
    images = torch.zeros(400, 64, 64).byte()
    pairs = torch.arange(400)[:, None].expand(400, 2)
    copies.are_copies(images, torch.tensor([64, 32]).repeat(200), pairs)
    assert told.call_args == call(400, what="pairs")
    assert [one.args[0] for one in told().show.call_args_list] == [200, 400]


def test_a_pair_is_compared_at_32_pixels_if_one_of_both_is_small(monkeypatch):
    seen = []

    def compare(first, _):
        seen.append((first.shape[1], len(first)))
        return torch.ones(2, len(first))

    monkeypatch.setattr(copies, "aligned_correlation", compare)
    sides = torch.tensor([64, copies.MIN_SIDE - 1, copies.MIN_SIDE])
    pairs = torch.tensor([[0, 1], [0, 2], [1, 2]])
    assert copies.are_copies(torch.zeros(3, 64, 64).byte(), sides, pairs).all()
    assert seen == [(32, 2), (64, 1)]


def test_the_size_of_an_image_is_its_shorter_side(root, monkeypatch):
    copied = Mock(wraps=copies.group_images)
    monkeypatch.setattr(checks, "find_tool", lambda *_: Mock(group_images=copied))
    check(root)
    train = [min(60 + 5 * n, 90 - 3 * n) for n in (*range(0, 12, 2), *range(1, 12, 2))]
    assert sorted(copied.call_args.args[1][:12].tolist()) == sorted(train)


def test_pairs_are_the_same_however_many_are_compared_at_once(monkeypatch):
    chance = torch.Generator().manual_seed(0)
    hashes = torch.randint(2, (60, 64), generator=chance) * 2.0 - 1
    copied = torch.randperm(60, generator=chance).view(30, 2)
    hashes[copied[:, 1]] = hashes[copied[:, 0]]
    expected = {tuple(sorted(pair)) for pair in copied.tolist()}
    for rows in (60, 7, 1):
        monkeypatch.setattr(copies, "BLOCK", rows * len(hashes))
        found = copies.nearest_pairs(hashes).tolist()
        assert sorted(map(tuple, found)) == sorted(expected)


def test_of_many_that_look_alike_the_nearest_ones_are_candidates():
    chance = torch.Generator().manual_seed(0)
    coarse, change = torch.rand((2, 1, 8, 8), generator=chance)
    levels = torch.arange(13)[:, None, None]  # the higher, the farther from the first
    images = copies.scaled(255 * (coarse + 0.01 * levels * change) / 1.2, 64).byte()
    pairs, _ = copies.find_candidates(images, torch.arange(13))
    others = [other for image, other in pairs.tolist() if image == 0]
    assert others == [*range(1, copies.NEAREST + 1)]
    faint = (128 + (images[:2] > 128).byte()).byte()  # the noise of a file is no picture
    assert not len(copies.find_candidates(faint, torch.arange(2))[0])
