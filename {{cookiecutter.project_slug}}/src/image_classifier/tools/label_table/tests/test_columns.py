"""Columns by other names, classes as people write them, and files as the disk has them."""

import csv
import io
import json
import re
from unicodedata import normalize

import pytest
from conftest import changed

from image_classifier.config import Config, DataConfig
from image_classifier.data.datasets import (
    open_dataset,
    open_files,
)
from image_classifier.errors import UserError
from image_classifier.runtime.config_dict import (
    flatten,
    unflatten,
)


@pytest.fixture
def opened(tmp_path):
    """Opens a table, made of rows or of its bytes, whose images are there or not."""

    def open_split(table, split="train", *, name="labels.csv", files=(), columns=(), **knobs):
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        text = io.StringIO()
        if isinstance(table, list):
            csv.writer(text).writerows(table)
        content = table if isinstance(table, bytes) else text.getvalue().encode()
        (tmp_path / name).write_bytes(content)
        data = DataConfig("folder", str(tmp_path), 0.001, labels=name, columns=columns)
        return open_files(changed(Config(data=data), **knobs).data, split)

    return open_split


def names_of(source):
    """The paths of a source, in the order of its rows."""
    return [source.paths.relative(n).decode() for n in range(len(source))]


ANT_BEE = [["1", "0"], ["0", "1"]] * 3


def beside(name, cells):
    """A table with a column of this name and two of classes."""
    rows = [[n, cell, *own] for n, (cell, own) in enumerate(zip(cells, ANT_BEE, strict=True))]
    return [["path", name, "ant", "bee"], *rows]


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
        assert (names_of(train), names_of(val)) == ([*"0134"], [*"25"])
        assert f"split: column {name}" in train.notes[0]


def test_columns_of_parts_together_or_unclear_ones_are_no_classes(opened):
    table = [["path", "is_test", "is_train", "is_valid", "ant", "bee"]]
    table += [[n, n == 1, n > 1, n == 0, *own] for n, own in enumerate(ANT_BEE)]
    found = [names_of(opened(table, split)) for split in ("train", "val", "test")]
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
    assert (names_of(opened(table)), opened(table).classes) == (["0"], ("ant",))
    for name in ("set", "Partition", "data set", "phase"):
        table = beside(name, ["train", "train", "valid", "test", "train", "train"])
        assert names_of(opened(table, "test")) == ["3"]


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


def test_a_table_with_one_label_in_each_row_is_for_either_task(opened):
    source = opened(beside("note", "abcdef"))
    single = source.fitted("single-label", "train")
    assert (single.labels.tolist(), single.classes) == ([0, 1] * 3, ("ant", "bee"))
    assert source.fitted("multi-label", "train") is source
    again = single.fitted("multi-label", "train")
    assert again.fingerprint() == source.fingerprint()
    assert (
        again.notes[-1]
        == "train: no image has several labels, which a table has as a|b: 2: ant, bee"
    )
    alone = opened([["path", "bad one"], [1, 1], [2, 0]])
    with pytest.raises(UserError, match=r"column bad one, .* --data.columns 'label=bad one'"):
        alone.fitted("single-label", "train")
    for cells, shown in (("010000", "'.*/1' .bee, cat."), (["", *"00000"], "'.*/0' .ant.")):
        with pytest.raises(
            UserError, match=f"1 of 6 images have not exactly one label, such as {shown}"
        ):
            opened(beside("cat", cells)).fitted("single-label", "train")


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


def test_a_table_without_a_header_is_told_so(opened):
    table = [[f"{n}.jpg", "ab"[n % 2]] for n in range(6)]
    with pytest.raises(UserError, match="its first line should name the columns, such as path,la"):
        opened(table, files=[f"{n}.jpg" for n in range(6)])


def test_columns_are_taken_by_name(opened):
    head = ["No", "foto", "sort", "part", "how much"]
    table = [head, *([n, f"{n}.jpg", "ab"[n % 2], "train", 2] for n in range(6))]
    with pytest.raises(UserError, match=r"no column 'path', but 5: No, foto, sort, .* path=COLUMN"):
        opened(table)
    files = [f"{n}.jpg" for n in range(6)]
    with pytest.raises(
        UserError, match=r"has no column 'path', .*: --data.columns path=No, or path=foto"
    ):
        opened(table, files=files)
    with pytest.raises(UserError, match=r"no column 'label', .*--data.columns label=COLUMN"):
        opened(table, columns=("path=foto",))
    columns = ("path=foto", "label=Sort", "split=part", "weight=how much")
    source = opened(table, columns=columns)
    assert (names_of(source), source.labels.tolist()) == (files, [0, 1] * 3)
    assert source.weights.tolist() == [2] * 6
    assert source.notes[0].endswith("ignored columns: No")
    with pytest.raises(UserError, match=r"no column 'label', .*: --data.columns label=Id"):
        opened([["path", "Id"], ["1", "a"], ["2", "b"]])
    few = [["Image", "Id"], *([f"{n}.jpg", "ab"[n % 2]] for n in range(20))]
    with pytest.raises(UserError, match=r"'Image' in line 8, '6.jpg', is no file: paths are"):
        opened(few, files=files)
    own = [["path", "label", "Id"], *([n, n, "xy"[n % 2]] for n in range(4))]
    assert opened(own, columns=("label=id",)).classes == ("x", "y")
    for word, message in (
        ("path", "'path' should be such as path=Image label=Id"),
        ("name=foto", "each of path, label, split, fold, weight"),
        ("path=fotos", "has 5: No, foto, .*; did you mean foto"),
    ):
        with pytest.raises(UserError, match=message):
            opened(table, columns=(word,))
    with pytest.raises(
        UserError, match=r"which column has the labels\? --data.columns label=class, or"
    ):
        opened([["path", "class", "species"], [1, "a", "b"], [2, "c", "d"]])
    with pytest.raises(UserError, match=r"label=class, or label=ant label=bee"):
        opened(beside("class", "aabbcc"))


def test_names_of_columns_are_kept_with_a_run_and_need_a_table():
    config = changed(Config(), data__name="folder", data__labels="a.csv")
    config = changed(config, data__columns=("path=Image", "label=Id"))
    assert unflatten(json.loads(json.dumps(flatten(config)))) == config
    with pytest.raises(
        UserError, match=r"--data.columns names the columns of a table: --data.labels"
    ):
        changed(Config(), data__columns=("path=Image",))


def test_an_id_is_the_file_with_the_suffix_that_there_is(opened):
    files = ["a/x.1.jpg", "a/2.PNG", "a/3.webp", "a/3.txt", "a/4", "a/5/6.jpg"]
    table = [["path", "label"], ["a/x.1", "b"], ["a/2", "c"], ["a/3", "b"], ["a/4", "c"]]
    assert names_of(opened(table, files=files)) == ["a/x.1.jpg", "a/2.PNG", "a/3.webp", "a/4"]
    numbers = "".join(json.dumps({"id": n, "label": "ab"[n % 2]}) + "\n" for n in range(4)).encode()
    files = [f"{n}.jpg" for n in range(4)]
    assert names_of(opened(numbers, name="labels.jsonl", files=files)) == files


def test_a_path_in_another_unicode_form_is_the_file_on_the_disk(opened):
    name = "caf\xe9/\xfc{}.jpg"
    files = [normalize("NFD", name.format(n)) for n in range(2)]
    files.append(normalize("NFD", "caf\xe9") + "/\xfc2.jpg")
    table = [["path", "label"], *([name.format(n), "ab"[n % 2]] for n in range(3))]
    assert names_of(opened(table, files=files)) == files
    table.append([files[0], "a"])
    assert any("1 rows repeat another" in note for note in opened(table).notes)


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


LISTS = [
    ("['ant', 'bee']", "['bee']", "[]"),
    ('["ant", "bee"]', '["bee"]', ""),
    ("['ant' 'bee']", "['bee']", "[]"),
    ("{'ant', 'bee'}", "{'bee'}", ""),
    ("('ant', 'bee')", "('bee',)", "[]"),
    ("[ant, bee]", "[bee]", "[]"),
    ("{ant,bee}", "{bee}", ""),
    ("(ant, bee)", "(bee)", ""),
    ("ant|bee", "bee", ""),
]


@pytest.mark.parametrize("cells", LISTS)
def test_a_list_in_a_cell_is_several_labels(opened, cells):
    source = opened([["path", "label"], *([n, cell] for n, cell in enumerate(cells))])
    assert (source.classes, source.labels.tolist()) == (("ant", "bee"), [[1, 1], [0, 1], [0, 0]])


@pytest.mark.parametrize(
    ("name", "cell", "message"),
    [
        ("csv", "NaN", "label 'NaN' is unknown: name the class, or leave out the row"),
        ("csv", "nan", "label 'nan' is unknown"),
        ("csv", "NULL", "label 'NULL' is unknown"),
        ("csv", "None", "label 'None' is unknown"),
        ("csv", " N/A ", "label 'N/A' is unknown"),
        ("csv", "<NA>", "label '<NA>' is unknown"),
        ("csv", "a|nan", "label 'nan' is unknown"),
        ("csv", "['a', 'NaN']", "label 'NaN' is unknown"),
        ("csv", "  ", "label is empty"),
        ("csv", "[['a']]", r"label \"\[\['a'\]\]\" is neither a name nor a list of names"),
        ("csv", "['a', x]", "is neither a name nor a list of names"),
        ("csv", "{'b': 1}", "is neither a name nor a list of names"),
        ("csv", "[0 1 0]", r"label \[0, 1, 0\] is a row of 0 and 1: give each class a column"),
        ("jsonl", [["a"]], r"label \[\"\['a'\]\"\] is no list of names"),
        ("jsonl", [["a"], {"b": 1}], "is no list of names"),
        ("jsonl", {"b": 1}, "is neither a name nor a list of names"),
        ("jsonl", None, "label is empty"),
        ("jsonl", [0, 1, 0, 0], "is a row of 0 and 1"),
    ],
)
def test_a_cell_that_is_no_label_is_refused_with_its_line(opened, name, cell, message):
    if name == "csv":
        table = [["path", "label"], ["0", "a"], ["1", cell]]
    else:
        rows = ({"path": "0", "label": "a"}, {"path": "1", "label": cell})
        table = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with pytest.raises(UserError, match=f"line {3 if name == 'csv' else 2}: .*{message}"):
        opened(table, name=f"labels.{name}")


def test_rows_of_0_and_1_in_a_cell_are_no_lists_of_classes(opened):
    with pytest.raises(UserError, match=r"line 2: label \[1, 0\] is a row of 0 and 1"):
        opened([["path", "label"], [1, "[1, 0]"], [2, "[0, 1]"]])
    source = opened([["path", "label"], [1, "[1, 0]"], [2, "[0, 7]"]])
    assert source.classes == ("0", "1", "7")


def test_names_in_brackets_among_others_are_classes(opened):
    cells = ["[unknown]", "(other)", "ant", "none", "C", "C++", "A+", "A-", "1.10", "1.1"]
    table = [["path", "label"], *([n, cell] for n, cell in enumerate(cells))]
    source = opened(table)
    assert source.classes == tuple(sorted(cells))
    assert any("'none' is a class; if it" in note for note in source.notes)


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
        (["clear sky", "sky water", "clear water"], None, "'clear sky' looks like several labels"),
        (["a b", "b c", "a c", "a b c"], None, "class 'a b' looks like several labels"),
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


def test_folds_from_one_are_named(opened):
    table = [["path", "label", "fold"], *([n, "ab"[n % 2], n % 5 + 1] for n in range(20))]
    with pytest.raises(UserError, match=r"in fold 0 of 1 .. 5: --data.fold 1, or number them"):
        opened(table, "val")
    assert names_of(opened(table, "val", data__fold=5)) == ["4", "9", "14", "19"]


def test_weights_of_float32_are_finite_and_not_all_zero(opened):
    def rows(*weights):
        own = [[n, "ab"[n % 2], "train", weight] for n, weight in enumerate(weights)]
        return [["path", "label", "split", "weight"], *own, [9, "a", "val", 0]]

    for weight in ("1e39", "1e31", "inf", "1e-40", "x"):
        with pytest.raises(
            UserError, match=f"line 3: weight '{weight}' should be 0 or more, from 1e"
        ):
            opened(rows(1, weight))
    with pytest.raises(UserError, match=r"line 2: weight is 0, and so are those of all 2 images"):
        opened(rows(0, "0.0"))
    assert opened(rows(0, 1)).weights.tolist() == [0, 1]
    assert opened(rows(0, 1), "val").weights is None


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("sep=|\npath|label\n1|a,b\n2|c\n", "utf-8"),
        ("sep=;\r\npath;label\r\n1;a,b\r\n2;c\r\n", "utf-8"),
        ('"SEP=;"\npath;label\n1;a,b\n2;c\n', "utf-8-sig"),
        ('path,label\r1,"a,b"\r2,c\r', "utf-8"),
        ('sep=,\rpath,label\r1,"a,b"\r2,c', "utf-8-sig"),
        ("path;label\r\n1;a,b\r\n2;c\r\n", "utf-16"),
        ("\ufeffpath\tlabel\n1\ta,b\n2\tc\n", "utf-16-be"),
        ("path;label\r1;a,b\r2;c", "utf-16-le"),
    ],
)
def test_tables_as_excel_saves_them_are_read(opened, text, encoding):
    source = opened(text.encode(encoding))
    assert (source.classes, names_of(source)) == (("a,b", "c"), ["1", "2"])
    number = 4 if "sep" in text.lower() else 3
    with pytest.raises(UserError, match=f"line {number}: label 'nan' is unknown"):
        opened(text.replace("c", "nan").encode(encoding))
