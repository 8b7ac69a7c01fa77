"""Columns by their cells, files as the disk has them, and names that may be a mistake."""

import json
import os
import re
from unicodedata import normalize

import pytest
from conftest import ANT_BEE, beside, paths_of

from image_classifier.config import DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.errors import UserError
from image_classifier.tools.kaggle_tables import disk

pytest.importorskip("image_classifier.tools.label_table")


@pytest.mark.parametrize("name", ["is_valid", "is_val", "Is Validation", "val", "isvalid"])
@pytest.mark.parametrize(
    ("yes", "no"), [("True", "False"), ("1", "0"), ("yes", "no"), ("1.0", "0")]
)
def test_yes_and_no_for_validation_are_the_split_and_never_a_class(opened, name, yes, no):
    for table in (
        beside(name, [no, no, yes, no, no, yes]),
        [
            ["path", "label", name],
            *([n, "ab"[n % 2], yes if n in (2, 5) else no] for n in range(6)),
        ],
    ):
        train, val = opened(table), opened(table, "val")
        assert len(train.classes) == 2
        assert (paths_of(train), paths_of(val)) == ([*"0134"], [*"25"])
        assert f"split: column {name}" in train.notes[0]


def test_columns_of_parts_together_or_unclear_ones_are_no_classes(opened):
    table = [["path", "is_test", "is_train", "is_valid", "ant", "bee"]]
    table += [[n, n == 1, n > 1, n == 0, *own] for n, own in enumerate(ANT_BEE)]
    found = [paths_of(opened(table, split)) for split in ("train", "val", "test")]
    assert found == [[*"2345"], ["0"], ["1"]]
    with pytest.raises(UserError, match="line 4: is_valid '' should be True or False"):
        opened(beside("is_valid", ["1", "0", "", "1", "0", "1"]))
    assert opened(beside("gender", "FMFMFF")).classes == ("ant", "bee")
    with pytest.raises(UserError, match=r"'is_train' says .* write a column split with train, val"):
        opened(beside("is_train", "111000"))
    source = opened(beside("valid", "111111"))  # that the image is whole, or a split?
    assert source.classes == ("ant", "bee")
    assert source.notes[0].endswith("; labels: columns ant, bee; ignored columns: valid")
    table = [["path", "is_valid", "split", "ant"], [0, 1, "train", 1], [1, 0, "val", 0]]
    assert (paths_of(opened(table)), opened(table).classes) == (["0"], ("ant",))
    source = opened(beside("dataset", ["train", "coco", "voc", "voc", "coco", "val"]))
    assert source.notes[0].endswith("ignored columns: dataset")
    names = "set", "Partition", "data set", "phase", "subset", "Usage", "data_split", "splits"
    for name in names:
        table = beside(name, ["train", "train", "valid", "test", "train", "train"])
        assert paths_of(opened(table, "test")) == ["3"]


def test_what_was_taken_for_a_class_is_said_and_all_cells_decide(opened):
    ages = beside("age", ["1", "31", "44", "0", "17", "52"])
    source = opened(ages)
    assert source.classes == ("ant", "bee")
    assert source.notes[0].endswith("; labels: columns ant, bee; ignored columns: age")
    assert "columns sex, ant, bee" in opened(beside("sex", "011010")).notes[0]
    for cells in (
        ["1.00", "0.00", "1.00", "", "0", "1"],
        ["yes", "no", "Yes", "NO", "y", "n"],
        ["", "", "", "", "1", "0"],
        ["-1", "-1", "-1", "-1", "-1", "-1"],
        ["TRUE", "False", "true", "False", "NaN", "null"],
    ):
        assert opened(beside("cat", cells)).classes == ("ant", "bee", "cat")
    for cells in (["x", "", "", "", "", ""], [""] * 6, ["0.5", "0.25", "1", "0.1", "0.3", "0.2"]):
        source = opened(beside("cat", cells))
        assert source.classes == ("ant", "bee")
        assert source.notes[0].endswith("ignored columns: cat")
    for cells, line, text in ((["1", "1", "0", "2", "0", "1"], 5, "2"), ("01m011", 4, "m")):
        message = rf"line {line}: cat '{text}' should be 1, 0, .* label=ant label=bee"
        with pytest.raises(UserError, match=message):
            opened(beside("cat", cells))
    assert opened(beside("cat", "01m011"), columns=("label=ant", "label=bee")).classes[1:] == (
        "bee",
    )


@pytest.mark.parametrize(
    ("head", "cell"),
    [
        (("id", "label"), "{}"),
        (("Image", "Id"), "train/{}.jpg"),
        (("filename", "class"), "train/{}.jpg"),
        (("image_path", "label"), "train/{}"),
        (("image_id", "target"), "train/{}"),
        (("File Name", "Category"), "train\\{}.jpg"),
        (("Image Index", "Finding Labels"), "train/{}.jpg"),
    ],
)
def test_usual_names_of_columns_are_understood_where_files_prove_them(opened, tmp_path, head, cell):
    files = [f"train/{n}.jpg" for n in range(6)]
    table = [head, *((cell.format(n), "ab"[n % 2]) for n in range(6))]
    knobs = {"data__root": str(tmp_path / "train")} if cell == "{}" else {}
    knobs["data__labels"] = str(tmp_path / "labels.csv")
    source = opened(table, files=files, **knobs)
    assert [str(source.paths[n]) for n in range(6)] == [str(tmp_path / file) for file in files]
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [0, 1] * 3)
    assert f"path: column {head[0]}" in source.notes[0]


NAMED = ("labels", "Classes", "class", "class_name", "category", "target", "tag", "tags", "breed")
NAMED += ("y", "Label Name")


@pytest.mark.parametrize("name", NAMED)
def test_a_usual_name_of_labels_is_understood(opened, name):
    source = opened([["path", name], *([n, "ab"[n % 2]] for n in range(6))])
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [0, 1] * 3)


def test_a_table_without_a_header_is_told_so(opened):
    table = [[f"{n}.jpg", "ab"[n % 2]] for n in range(6)]
    with pytest.raises(UserError, match="its first line should name the columns, such as path,la"):
        opened(table, files=[f"{n}.jpg" for n in range(6)])


def test_a_blank_first_line_is_told(opened):
    with pytest.raises(UserError, match="its first line is blank, and should name the columns"):
        opened([["", ""], ["0.jpg", "a"], ["1.jpg", "b"]], files=["0.jpg", "1.jpg"])


def test_an_id_is_the_file_with_the_suffix_that_there_is(opened, tmp_path):
    files = ["a/x.1.jpg", "a/2.PNG", "a/3.webp", "a/3.txt", "a/4", "a/5/6.jpg"]
    table = [["path", "label"], ["a/x.1", "b"], ["a/2", "c"], ["a/3", "b"], ["a/4", "c"]]
    assert paths_of(opened(table, files=files)) == ["a/x.1.jpg", "a/2.PNG", "a/3.webp", "a/4"]
    elsewhere = {"data__root": f"{tmp_path}/a/5", "data__labels": f"{tmp_path}/labels.csv"}
    absolute = [["path", "label"], *([f"{tmp_path}/{n}", c] for n, c in table[1:])]
    source = opened(absolute, **elsewhere)
    assert [str(source.paths[n]) for n in range(4)] == [
        f"{tmp_path}/{file}" for file in ("a/x.1.jpg", "a/2.PNG", "a/3.webp", "a/4")
    ]
    numbers = "".join(json.dumps({"id": n, "label": "ab"[n % 2]}) + "\n" for n in range(4)).encode()
    files = [f"{n}.jpg" for n in range(4)]
    assert paths_of(opened(numbers, name="labels.jsonl", files=files)) == files


def test_a_path_in_another_unicode_form_is_the_file_on_the_disk(opened):
    name = "caf\xe9/\xfc{}.jpg"
    files = [normalize("NFD", name.format(n)) for n in range(2)]
    files.append(normalize("NFD", "caf\xe9") + "/\xfc2.jpg")
    table = [["path", "label"], *([name.format(n), "ab"[n % 2]] for n in range(3))]
    assert paths_of(opened(table, files=files)) == files
    table.append([files[0], "a"])
    assert any("1 rows repeat another" in note for note in opened(table).notes)


def test_a_file_that_comes_later_is_found(tmp_path):
    os.utime(tmp_path, (1, 1))
    root = os.path.join(bytes(tmp_path), b"")
    assert disk.on_disk(b"a", root) == b"a"
    (tmp_path / "a.jpg").touch()
    assert disk.on_disk(b"a", root) == b"a.jpg"


@pytest.mark.parametrize(
    ("files", "cell", "hint"),
    [
        (["a/1.png"], "a/1.jpg", r"is it 'a/1\.png'\?"),
        (["A/1.jpg"], "a/1.JPG", r"is it 'A/1\.jpg'\?"),
        (["a/IMG 1.JPG"], "a/img 1.jpg", r"is it 'a/IMG 1\.JPG'\?"),
        (["a/1.png", "a/1.jpg"], "a/1", r"is it 'a/1\.jpg' or 'a/1\.png'\?"),
        (["train/a/1.jpg"], "a/1", r"it is below '.*/train': --data\.root '.*/train'"),
        ([], "a/1.jpg", r"paths are absolute or from --data\.root"),
    ],
)
def test_a_missing_file_is_looked_for(opened, tmp_path, files, cell, hint):
    opened([["path", "label"], [cell, "a"]], files=files)
    data = DataConfig("folder", str(tmp_path), 0.001, labels="labels.csv")
    with pytest.raises(
        UserError, match=f"line 2: there is no file '.*'; {hint}; 1 of 1 are missing"
    ):
        open_dataset(data, "train")
    with pytest.raises(UserError, match=f"'Image' in line 2, '{cell}', is no file: {hint}"):
        opened([["Image", "Id"], [cell, "a"], [cell, "a"]])


def test_a_missing_file_is_looked_for_beside_the_table_here_and_above_the_root(
    tmp_path, monkeypatch
):
    places = {"table": tmp_path / "tables", "here": tmp_path / "here", "above": tmp_path / "all"}
    for name, place in places.items():
        (place / name).mkdir(parents=True)
        (place / name / "1.jpg").touch()
    monkeypatch.chdir(places["here"])
    data = DataConfig("folder", str(tmp_path / "all" / "photos"))
    for name, place in (places | {"here": "."}).items():
        hint = disk.hint_at(os.fsencode(f"{name}/1.jpg"), data, tmp_path / "tables" / "labels.csv")
        assert hint == f"it is below '{place}': --data.root '{place}'"


@pytest.mark.parametrize(
    ("cells", "classes", "note"),
    [
        (
            ["0", "0.0", "1", "1.", "2.00"],
            ("0", "1", "2.00"),
            "equal names are one class: '0' and '0.0', '1' and",
        ),
        (["Caf\xe9", "Cafe\u0301", "b"], ("Caf\xe9", "b"), "are one class: 'Cafe.* and 'Caf"),
        (["b ", " b", "b", "c"], ("b", "c"), None),
        (["Ant", "ant", "bee"], ("Ant", "ant", "bee"), "look alike: 'Ant' and 'ant'; if"),
        (["polar bear", "polar_bear", "b"], None, "look alike: 'polar bear' and 'polar_bear'"),
        (["01", "1", "+1", "1e0"], None, "look alike: .*'01' and '1' and '1e0'"),
        (["1.5", "1.50"], None, "look alike: '1.5' and '1.50'"),
        (["\uff21nt", "Ant"], None, "look alike"),
        (["a\u200bnt", "ant"], ("ant", r"a\u200bnt"), "look alike"),
        (["ant", "bee", "ant,bee"], None, "'ant,bee' looks like .* write 'ant.bee'"),
        (["sea|sky", "sea", "sunset", "sea sunset"], None, "' ' does not .*: write 'sea.sunset'"),
        (["ant", "bee", "bee; ant"], None, "class 'bee; ant' looks like several labels"),
        (["ant", "bee", "ant\nbee"], ("ant", r"ant\nbee", "bee"), "looks like several labels"),
        (["a b", "b c", "c d", "a c", "b d"], None, "'a b' looks like several labels"),
        (["a b", "b c", "a c", "a b c"], None, "class 'a b' looks like several labels"),
        (["bear", "polar bear", "black bear"], None, None),
        (["none", "a"], None, "'none' is a class; if it"),
        (["red fox", "arctic fox", "red panda", "arctic hare"], None, None),
        (["tench, Tinca tinca", "goldfish, Carassius"], None, None),
    ],
)
def test_names_of_classes_that_may_be_a_mistake_are_told(opened, cells, classes, note):
    source = opened([["path", "label"], *([n, cell] for n, cell in enumerate(cells))])
    names = {name for cell in cells for name in cell.split("|")}
    assert source.classes == (classes or tuple(sorted(names)))
    note = note and f"^warning: '.*': .*{note}"
    assert len(source.notes) == 1 if note is None else re.search(note, source.notes[1])


def test_columns_that_may_be_the_paths_or_the_labels_are_asked_for(opened):
    files = [f"{n}.jpg" for n in range(6)]
    masks = [f"{n}.png" for n in range(6)]
    table = [["image", "mask", "label"], *zip(files, masks, "ababab", strict=True)]
    with pytest.raises(UserError, match=r"'path', .*: --data.columns path=image, or .* path=mask"):
        opened(table, files=files + masks)
    numbered = [["No", "foto", "label"], *([n, f"{n}.jpg", "ab"[n % 2]] for n in range(6))]
    assert paths_of(opened(numbered, files=files)) == files  # both are the same files
    with pytest.raises(UserError, match=r"no column 'label', .*: --data.columns label=COLUMN"):
        opened([["path", "Id"], ["1", "a"], ["2", "b"]])
    few = [["Image", "Id"], *([f"{n}.jpg", "ab"[n % 2]] for n in range(15))]
    with pytest.raises(UserError, match=r"'Image' in line 8, '6.jpg', is no file: paths are"):
        opened(few, files=files)
    with pytest.raises(
        UserError, match=r"which column has the labels\? --data.columns label=class, or"
    ):
        opened([["path", "class", "species"], [1, "a", "b"], [2, "c", "d"]])
    with pytest.raises(UserError, match=r"label=class, or .* label=ant label=bee"):
        opened(beside("class", "aabbcc"))


def test_one_column_of_yes_and_no_may_be_two_classes(opened):
    alone = opened([["path", "bad one"], [1, 1], [2, 0]])
    with pytest.raises(UserError, match=r"column bad one, .* --data.columns 'label=bad one'"):
        alone.fitted("single-label", "train")


def test_a_wrong_cell_of_a_large_parquet_table_is_named_by_its_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    count = 2**16 + 9  # of which a batch has 2**16
    folds = ["0"] * (count - 2) + ["x", "0"]
    columns = {"path": ["1.jpg"] * count, "label": ["a"] * count, "fold": folds}
    parquet.write_table(arrow.table(columns), tmp_path / "labels.parquet")
    data = DataConfig("folder", str(tmp_path), labels="labels.parquet")
    with pytest.raises(UserError, match=f"row {count - 1}: fold 'x' should be 0, 1, 2"):
        open_dataset(data, "train")
