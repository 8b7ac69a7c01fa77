"""Images of one group are on one side, and a test part is held out before all else."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import changed
from PIL import Image

from image_classifier.cli import main
from image_classifier.config import Config, DataConfig
from image_classifier.data import divide, open_files
from image_classifier.errors import UserError
from image_classifier.extensions import find_tool

PATTERN = r"([^/]+)_[0-9]+\."
SPLITS = "train", "val", "test"


def names_of(num_groups, per_group=5, num_classes=4):
    """Paths of images in groups of equal size, and their labels."""
    pairs = [(n % num_classes, n, m) for n in range(num_groups) for m in range(per_group)]
    paths = [b"%d/g%03d_%d.jpg" % pair for pair in pairs]
    return paths, torch.tensor([label for label, _, _ in pairs])


def parts(names, labels, **knobs):
    """The paths of each split."""
    data = DataConfig(groups=PATTERN, **knobs)
    splits = SPLITS if data.test_fraction else SPLITS[:2]
    return {split: {names[n] for n in divide(names, labels, data, split)} for split in splits}


def groups(paths):
    """The groups of paths."""
    return {path.partition(b"_")[0] for path in paths}


@pytest.mark.parametrize("test_fraction", [0.0, 0.25])
def test_a_group_is_on_one_side_alone_and_every_image_on_some(test_fraction):
    names, labels = names_of(40)
    validated = Counter()
    for fold in range(5):
        found = parts(names, labels, fold=fold, test_fraction=test_fraction)
        assert sum(map(len, found.values())) == len(names)
        assert sum(len(groups(paths)) for paths in found.values()) == 40
        validated.update(found["val"])
        num_test = len(found.get("test", ()))
        assert num_test == pytest.approx(test_fraction * len(names), abs=5)  # a group more
        counts = Counter(path[0] for path in found["val"])
        assert max(counts.values()) - min(counts.values()) <= 5  # a group more of a class
    assert {*validated.values()} == {1}  # in one fold each
    assert len(validated) == len(names) - num_test


def test_the_test_part_is_the_same_in_every_fold_and_share():
    names, labels = names_of(40)
    found = [parts(names, labels, test_fraction=0.2, fold=fold)["test"] for fold in (0, 3)]
    found.append(parts(names, labels, test_fraction=0.2, val_fraction=0.5)["test"])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("share", [0.15, 0.3, 0.35, 0.4, 0.6])
def test_a_share_of_groups_is_as_large_as_it_was_asked_for(share):
    names, labels = names_of(80)
    found = parts(names, labels, test_fraction=share)["test"]
    assert len(found) / len(names) == pytest.approx(share, abs=0.03)


def test_a_share_is_found_though_classes_have_few_images():
    names, labels = names_of(20, per_group=3)  # 15 of a class, fewer than the parts of 3/20
    found = parts(names, labels, test_fraction=0.15)["test"]
    assert len(found) / len(names) == pytest.approx(0.15, abs=0.06)  # a group more or less


def test_a_note_says_whether_names_or_groups_divided_the_images(tmp_path):
    for name in names_of(10)[0]:
        path = tmp_path / name.decode()
        path.parent.mkdir(exist_ok=True)
        path.touch()
    data = DataConfig(name="folder", root=str(tmp_path))
    found = [open_files(changed(data, groups=how), "train").notes[0] for how in ("", PATTERN)]
    assert [note.partition(":")[0] for note in found] == ["split by file name", "split by group"]


def test_without_groups_added_images_move_no_others():
    names, labels = names_of(400, per_group=1)
    data = DataConfig(test_fraction=0.25)
    for split in SPLITS:
        few, all_of_them = (
            {names[n] for n in divide(names[:count], labels[:count], data, split)}
            for count in (300, 400)
        )
        assert few == all_of_them & {*names[:300]}
        assert len(few) > 30


def test_a_class_of_one_group_stays_for_training():
    names, labels = names_of(20)
    names.append(b"9/alone_1.jpg")
    labels = torch.cat((labels, torch.tensor([9])))
    for fold in range(5):
        assert names[-1] in parts(names, labels, fold=fold)["train"]


def test_images_of_several_labels_are_balanced_by_the_rarest():
    names, labels = names_of(40)
    table = torch.ones(len(names), 5, dtype=torch.int8)
    table[:, 1:] = torch.nn.functional.one_hot(labels, 4)
    table[labels == 0, 1] = 0  # they have the first label alone
    for fold in range(5):
        counts = Counter(path[0] for path in parts(names, table, fold=fold)["val"])
        assert max(counts.values()) - min(counts.values()) <= 5


@pytest.mark.parametrize(
    ("knobs", "count", "message"),
    [
        ({"groups": "p([0-9]+)"}, 8, "finds no group in 40 of 40 paths, such as '0/g000_0.jpg'"),
        ({}, 3, r"3 groups, such as .*g000.* --data.val-fraction 0.2: from 0.33 to 0.5"),
        ({"test_fraction": 0.9}, 8, r"--data.test-fraction 0.9: from 0.12 to 0.5"),
        ({}, 1, "can't be divided by --data.val-fraction 0.2: more groups are needed"),
    ],
)
def test_groups_that_cannot_be_divided_are_named(knobs, count, message):
    names, labels = names_of(count)
    with pytest.raises(UserError, match=message):
        divide(names, labels, DataConfig(**{"groups": PATTERN} | knobs), "val")


@pytest.mark.parametrize("knob", ["test_fraction", "val_fraction"])
def test_the_share_that_chooses_no_image_is_named(knob):
    names, labels = names_of(12, per_group=1)
    data = DataConfig(**{"test_fraction": 0.2, knob: 0.001})
    with pytest.raises(UserError, match=f"--data.{knob.replace('_', '-')} 0.001 chooses none of "):
        divide(names, labels, data, "val")


@pytest.mark.parametrize(
    ("pattern", "message"), [("(", "--data.groups"), ("(a)(b)", "has 2 pairs of parentheses")]
)
def test_a_pattern_that_is_none_is_refused(pattern, message):
    with pytest.raises(UserError, match=message):
        changed(Config(), data__groups=pattern)


@pytest.mark.skipif(not find_tool("labels", "label-table"), reason="needs the tool label-table")
@pytest.mark.parametrize("test_fraction", [0.0, 0.25])
def test_a_table_has_a_column_of_groups(tmp_path, test_fraction):
    names, labels = names_of(40)
    rows = [f"{n.decode()},{x},P {n[2:6].decode()}" for n, x in zip(names, labels, strict=True)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,patient", *rows]))
    data = DataConfig("folder", str(tmp_path), labels="labels.csv", columns=("group=patient",))
    found = {}
    for split in SPLITS if test_fraction else SPLITS[:2]:
        data = changed(Config(data=data), data__test_fraction=test_fraction).data
        paths = open_files(data, split).paths  # which are not there
        found[split] = {paths.relative(n) for n in range(len(paths))}
    assert sum(map(len, found.values())) == len(names)
    assert sum(len(groups(paths)) for paths in found.values()) == 40


@pytest.mark.skipif(not find_tool("command", "check"), reason="needs the tool check")
@pytest.mark.parametrize("test_fraction", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["folder", "table"])
def test_check_divides_as_training_does(tmp_path, test_fraction, kind, capsys):
    if kind == "table" and not find_tool("labels", "label-table"):
        pytest.skip("needs the tool label-table")
    root = tmp_path / "photos"
    rows = ["path,label"]
    for number in range(80):
        path = root / "ab"[number // 4 % 2] / f"p{number // 4}_{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        of_group = torch.Generator().manual_seed(number // 4)
        pixels = torch.randint(256, (6, 6, 3), generator=of_group).byte()
        Image.fromarray(pixels.numpy()).resize((64, 64)).save(path)
        rows.append(f"{path.relative_to(root)},{path.parent.name}")
    words = ["check", "--data.root", str(root), "--data.test-fraction", str(test_fraction)]
    if kind == "table":
        (tmp_path / "labels.csv").write_text("\n".join(rows))
        words += ["--data.labels", str(tmp_path / "labels.csv")]
    assert main(words) == 1
    hint = "\n  images of a burst or a patient stay in one split by --data.groups\n"
    assert hint in capsys.readouterr().out
    assert main([*words, "--data.groups", PATTERN]) == 0
    said = capsys.readouterr().out
    data = DataConfig("folder", str(root), groups=PATTERN, test_fraction=test_fraction)
    if kind == "table":
        data = replace(data, labels=str(tmp_path / "labels.csv"))
    splits = SPLITS if test_fraction else SPLITS[:2]
    counts = ", ".join(f"{split} {len(open_files(data, split))}" for split in splits)
    assert f"images: {counts}; 2 classes\n" in said


def test_a_folder_with_a_test_of_its_own_gives_no_other_up(tmp_path):
    for number in range(40):
        part = "test" if number % 4 == 0 else "train"
        path = tmp_path / part / "ab"[number % 8 // 4] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    data = DataConfig("folder", str(tmp_path), test_fraction=0.25)
    with pytest.raises(UserError, match=r"has test images of its own, in 'test': --run.score-test"):
        open_files(data, "train")


OWN = {
    ("train", "val"): {
        "groups": r"--data.groups .* has validation images of its own, in 'val'",
        "test_fraction": "has images for validation, but no part 'test'",
    },
    ("train", "test"): {"test_fraction": "has test images of its own, in 'test': --run.score-test"},
    ("train", "val", "test"): {"test_fraction": "has test images of its own, in 'test'"},
}
DIVIDED = [(own, knob, OWN[own][knob]) for own in OWN for knob in OWN[own]]


@pytest.mark.parametrize(("own", "knob", "message"), DIVIDED)
@pytest.mark.parametrize("kind", ["folder", "table", "formats"])
def test_images_that_are_divided_already_are_not_divided_again(tmp_path, kind, own, knob, message):
    data = DataConfig("folder", str(tmp_path))
    data = replace(data, **{knob: PATTERN if knob == "groups" else 0.25})
    if kind == "formats":
        if (formats := find_tool("parts", "dataset-formats")) is None:
            pytest.skip("deleted")
        with pytest.raises(UserError, match=message):
            formats.choose_part(own, data, "train")
        return
    rows = ["path,label,split"]
    for number in range(12 * len(own)):
        path = tmp_path / own[number % len(own)] / "ab"[number % 4 // 2] / f"g_{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
        rows.append(f"{path},{path.parent.name},{own[number % len(own)]}")
    if kind == "table":
        if find_tool("labels", "label-table") is None:
            pytest.skip("deleted")
        (tmp_path / "labels.csv").write_text("\n".join(rows))
        data = replace(data, labels=str(tmp_path / "labels.csv"))
    with pytest.raises(UserError, match=message):
        open_files(data, "train")


def test_images_of_any_format_are_held_out_where_none_are_for_the_test():
    if (formats := find_tool("parts", "dataset-formats")) is None:
        pytest.skip("deleted")
    data = DataConfig("folder", "photos", test_fraction=0.25)
    assert [formats.choose_part(["train"], data, split) for split in SPLITS] == [
        ("train", True)
    ] * 3
