"""Columns by name, classes as people write them, and text as Excel saves it."""

import json

import pytest
from conftest import beside, changed, paths_of

from image_classifier.config import Config
from image_classifier.errors import UserError
from image_classifier.runtime.config_dict import (
    flatten,
    unflatten,
)


def test_a_table_with_one_label_in_each_row_is_for_either_task(opened):
    source = opened(beside("note", "abcdef"), columns=("label=ant", "label=bee"))
    single = source.fitted("single-label", "train")
    assert (single.labels.tolist(), single.classes) == ([0, 1] * 3, ("ant", "bee"))
    assert source.fitted("multi-label", "train") is source
    again = single.fitted("multi-label", "train")
    assert again.fingerprint() == source.fingerprint()
    assert again.notes[-1] == "train: no image has several labels, as a|b in a table: 2: ant, bee"
    columns = ("label=cat", "label=ant", "label=bee")
    for cells, shown in (("010000", "'.*/1' .bee, cat."), (["", *"00000"], "'.*/0' .ant.")):
        with pytest.raises(
            UserError, match=f"1 of 6 images have not exactly one label, such as {shown}"
        ):
            opened(beside("cat", cells), columns=columns).fitted("single-label", "train")


def test_columns_are_taken_by_name(opened):
    head = ["No", "foto", "sort", "part", "how much"]
    table = [head, *([n, f"{n}.jpg", "ab"[n % 2], "train", 2] for n in range(6))]
    with pytest.raises(UserError, match=r"no column 'path', but No, foto, sort, .* path=COLUMN"):
        opened(table)
    files = [f"{n}.jpg" for n in range(6)]
    with pytest.raises(UserError, match=r"no column 'label', .*--data.columns .*label=COLUMN"):
        opened(table, columns=("path=foto",))
    columns = ("path=foto", "label=Sort", "split=part", "weight=how much")
    source = opened(table, columns=columns)
    assert (paths_of(source), source.labels.tolist()) == (files, [0, 1] * 3)
    assert source.weights.tolist() == [2] * 6
    assert source.notes[0].endswith("ignored columns: No")
    own = [["path", "label", "Id"], *([n, n, "xy"[n % 2]] for n in range(4))]
    assert opened(own, columns=("label=id",)).classes == ("x", "y")
    for word, message in (
        ("path", "'path' should be such as path=Image label=Id"),
        ("name=foto", "each of path, label, split, fold, weight"),
        ("path=fotos", "has No, foto, .*; did you mean foto"),
    ):
        with pytest.raises(UserError, match=message):
            opened(table, columns=(word,))


def test_yes_and_no_in_columns_by_name_are_the_split(opened):
    table = [
        ["path", "label", "is_valid", "Is Test"],
        *([n, "x", n == 1, n == 2] for n in range(4)),
    ]
    columns = ("split=is_valid",)
    assert paths_of(opened(table, columns=columns)) == [*"023"]
    assert paths_of(opened(table, "test", columns=("split=is test",))) == ["2"]
    table[2][2] = ""
    with pytest.raises(UserError, match="line 3: is_valid '' should be True or False"):
        opened(table, columns=columns)


def test_names_of_columns_are_kept_with_a_run_and_need_a_table():
    config = changed(Config(), data__name="folder", data__labels="a.csv")
    config = changed(config, data__columns=("path=Image", "label=Id"))
    assert unflatten(json.loads(json.dumps(flatten(config)))) == config
    with pytest.raises(
        UserError, match=r"--data.columns names the columns of a table: --data.labels"
    ):
        changed(Config(), data__columns=("path=Image",))


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
        ("csv", "['a', 'b]", "is neither a name nor a list of names"),
        ("csv", "{'b': 1}", "is neither a name nor a list of names"),
        ("jsonl", [["a"]], "is neither a name nor a list of names"),
        ("jsonl", [["a"], {"b": 1}], "is neither a name nor a list of names"),
        ("jsonl", {"b": 1}, "is neither a name nor a list of names"),
        ("jsonl", None, "label is empty"),
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


@pytest.mark.parametrize("rows", [("[1, 0]", "[0, 1]"), ("[0 1 0]", "[1 1 0]"), ("[0. 1.]",) * 2])
def test_rows_of_0_and_1_in_a_cell_are_no_lists_of_classes(opened, rows):
    with pytest.raises(UserError, match=r"line 2: label '\[.*\]' is a row of 0 and 1: give each"):
        opened([["path", "label"], *enumerate(rows)])


def test_a_wrong_cell_is_named_by_its_first_row_where_cells_repeat(opened):
    table = [["path", "label", "fold"], *([n, "x", 0] for n in range(600)), [600, "nan", "y"]]
    with pytest.raises(UserError, match="line 602: label 'nan' is unknown"):
        opened(table)
    table[-1][1] = "x"
    with pytest.raises(UserError, match="line 602: fold 'y' should be 0, 1, 2"):
        opened(table)


def test_numbers_in_lists_are_classes(opened):
    source = opened([["path", "label"], [1, "[1, 0]"], [2, "[0 7]"], [3, "0|1"]])
    assert source.classes == ("0", "1", "7")
    assert opened([["path", "label"], [1, "[1, 0]"], [2, "[1]"]]).classes == ("0", "1")


def test_names_in_brackets_among_others_are_classes(opened):
    cells = ["[unknown]", "(other)", "ant", "none", "C", "C++", "A+", "A-", "1.10", "1.1"]
    table = [["path", "label"], *([n, cell] for n, cell in enumerate(cells))]
    assert opened(table).classes == tuple(sorted(cells))


def test_equal_names_are_one_class(opened):
    cells = ["0", "0.0", "1", "1.", "2.00", "Caf\xe9", "Cafe\u0301", " b", "b ", "1.10", "1.1"]
    cells += ["Cafz"]
    table = [["path", "label"], *([n, cell] for n, cell in enumerate(cells))]
    classes = ("0", "1", "1.1", "1.10", "2.00", "Cafz", "Caf\xe9", "b")  # sorted
    assert opened(table).classes == classes


def test_folds_from_one_are_named(opened):
    table = [["path", "label", "fold"], *([n, "ab"[n % 2], n % 5 + 1] for n in range(20))]
    with pytest.raises(UserError, match=r"in fold 0 of 1 \.\. 5: --data.fold 1, or number them"):
        opened(table, "val")
    assert paths_of(opened(table, "val", data__fold=5)) == ["4", "9", "14", "19"]


def test_a_table_of_test_images_alone_has_no_folds_to_name(opened):
    table = [["path", "label", "split", "fold"], [1, "a", "test", ""]]
    with pytest.raises(UserError, match=r"has no images for val$"):
        opened(table, "val")


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
    assert (source.classes, paths_of(source)) == (("a,b", "c"), ["1", "2"])
    number = 4 if "sep" in text.lower() else 3
    with pytest.raises(UserError, match=f"line {number}: label 'nan' is unknown"):
        opened(text.replace("c", "nan").encode(encoding))
