"""Labels from a table: the same images as from folders, several labels, and clear refusals."""

import json
import os

import pytest
import torch
from conftest import changed, run_ranks

from image_classifier.config import Config, DataConfig
from image_classifier.data import (
    EvalData,
    TrainData,
    open_dataset,
)
from image_classifier.data.datasets import open_files
from image_classifier.errors import UserError
from image_classifier.runtime.command_line import take_preset
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tools.label_table.labels import find_table
from image_classifier.train import train

CPU = World(torch.device("cpu"))


def put(root, content, name="labels.csv"):
    """A table in a folder, and the knobs to open it; its images need not be there."""
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return DataConfig(name="folder", root=str(root), labels=name)


def rows_of(source):
    """What a source knows of each image."""
    labels, weights = source.labels.tolist(), source.weights
    weights = [1.0] * len(labels) if weights is None else weights.tolist()
    names = [source.paths.relative(index).decode() for index in range(len(labels))]
    return dict(zip(names, zip(labels, weights, strict=True), strict=True))


def splits_of(data, *splits):
    """The names of the images in each split."""
    return ["".join(rows_of(open_files(data, split))) for split in splits]


@pytest.fixture
def flat(photos):
    """The 12 photographs of `train`, as a folder and as rows of a table."""
    data = DataConfig(name="folder", root=str(photos / "train"))
    names = [f"{('ant', 'bee')[number % 2]}/{number}.jpg" for number in range(12)]
    return data, sorted(names)


def test_a_cell_of_a_class_that_is_no_yes_or_no_is_refused(tmp_path):
    data = put(tmp_path, "path,ant,bee\na,1,0\nb,2,0\n")
    data = changed(Config(data=data), data__columns=("label=ant", "label=bee")).data
    with pytest.raises(UserError, match="line 3: ant '2' should be 1, 0, or empty for unknown"):
        open_files(data, "train")


def as_parquet(rows):
    pytest.importorskip("image_classifier.tools.kaggle_tables")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


FORMS = {
    "comma.csv": lambda rows: "path,label\n" + "".join(f"{p},{n}\n" for p, n in rows),
    "bom.csv": lambda rows: "\ufeffLabel;note;PATH\r\n" + "".join(f"{n};;{p}\r\n" for p, n in rows),
    "quoted.csv": lambda rows: '"path","label"\n\n' + "".join(f'"{p}", "{n}"\n' for p, n in rows),
    "spaced.csv": lambda rows: '"path", "label"\n' + "".join(f'"{p}", "{n}"\n' for p, n in rows),
    "tab.tsv": lambda rows: "path\tlabel\n" + "".join(f"{p}\t{n}\n" for p, n in rows),
    "lines.jsonl": lambda rows: "".join(
        json.dumps({"label": n, "note": [1], "path": p}) + "\n" for p, n in rows
    ),
    "table.parquet": lambda rows: as_parquet([{"path": p, "label": n} for p, n in rows]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_table_in_any_form_is_the_folder_that_it_names(flat, tmp_path, form, is_absolute):
    data, names = flat
    prefix = f"{data.root}/" if is_absolute else ""
    content = FORMS[form]([(prefix + name, name[:3]) for name in names])
    own = put(tmp_path, content, form)
    own = changed(Config(data=data), data__labels=os.path.join(own.root, own.labels)).data
    for split in ("train", "val"):
        source, folder = (open_dataset(knobs, split) for knobs in (own, data))
        assert source.fingerprint() == folder.fingerprint()
        assert source.name(0) == folder.name(0)
        assert torch.equal(source.read(0), folder.read(0))
    assert ("ignored columns: note" in " ".join(source.notes)) == (form[0] in "bl")


SEVERAL = [[1, 0, 1], [0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "content", "labels"),
    [
        ("a.csv", "path,label\n1,cat | ant\n2,bee\n3,\n", SEVERAL),
        ("a.csv", "path,cat,ant,bee\n1,1,1,0\n2,0,0.0,TRUE\n3,0,0,0\n", SEVERAL),
        ("a.csv", "path,cat,id,ant,bee\n1,1,n7,,0\n2,,n8,-1,1\n", [[-1, 0, 1], [-1, 1, -1]]),
        (
            "a.jsonl",
            '{"path": "1", "label": ["cat", "ant"]}\n{"label": ["bee"], "path": "2"}\n'
            '{"path": "3", "label": []}',
            SEVERAL,
        ),
        (
            "a.jsonl",
            '{"path": "1", "cat": 1, "ant": true, "bee": null}\n{"path": "2", "bee": false}',
            [[1, -1, 1], [-1, 0, -1]],
        ),
    ],
)
def test_an_image_may_have_several_labels(tmp_path, name, content, labels):
    config = changed(Config(data=put(tmp_path, content, name)), data__val_fraction=0.001)
    if "label" not in content:
        config = changed(config, data__columns=("label=cat", "label=ant", "label=bee"))
    data = config.data
    source = open_files(data, "train")
    assert source.classes == ("ant", "bee", "cat")
    assert (source.labels.dtype, source.labels.tolist()) == (torch.int8, labels)


def test_lists_in_parquet_are_several_labels(tmp_path):
    rows = [{"label": ["cat", "ant"], "path": "1"}, {"label": ["bee"], "path": "2"}]
    content = as_parquet([*rows, {"label": None, "path": "3"}])
    config = changed(Config(data=put(tmp_path, content, "a.parquet")), data__val_fraction=0.001)
    assert open_files(config.data, "train").labels.tolist() == SEVERAL


def test_a_column_divides_and_classes_are_those_of_all_splits(tmp_path):
    rows = "path,label,split,weight\na,10,training,0\nb,9,valid,2.5\nc,x,test,1\nd,x,TRAIN,4\n"
    data = put(tmp_path, rows + "e,9,train,1\n")
    sources = [open_files(data, split) for split in ("train", "val", "test")]
    assert {source.classes for source in sources} == {("10", "9", "x")}
    assert rows_of(sources[1]) == {"b": (1, 2.5)}
    assert sources[1].notes[-1] == "no val images of 2: 10, x"
    rows = "path,label,split\n" + "".join(f"{n},{n % 2},train\n" for n in range(99)) + "t,1,test"
    train, val, test = (
        rows_of(open_files(put(tmp_path, rows), s)) for s in ("train", "val", "test")
    )
    assert (len(train) + len(val), [*test]) == (99, ["t"])
    assert 5 < len(val) < 40


def test_a_fold_is_a_column(tmp_path):
    rows = "path,label,fold,split\n" + "".join(f"{n},x,{n % 3},train\n" for n in range(6))
    config = Config(data=put(tmp_path, rows + "t,x,,test\n"))
    for fold in range(3):
        data = changed(config, data__fold=fold, data__val_fraction=0.9).data
        val = f"{fold}{fold + 3}"
        train = "".join(str(n) for n in range(6) if str(n) not in val)
        assert splits_of(data, "train", "val", "test") == [train, val, "t"]


def test_each_class_keeps_an_image_for_training_but_test_images_and_repeats_do_not_count(tmp_path):
    rows = [f"{n}.jpg,{n // 2},Train" for n in range(80)]
    rows += [f"t{n}.jpg,{n},testing" for n in range(40)]
    data = put(tmp_path, "\n".join(["path,label,split", *rows, *rows]))
    train, val, test = (open_files(data, split) for split in ("train", "val", "test"))
    assert len(train.labels.unique()) == len(train.classes) == 40
    assert len(train) + len(val) == 80
    assert len(test) == 40


def test_repeated_rows_count_once(tmp_path):
    data = put(tmp_path, "path,label\na,x\nb,x|y\n./a,x\nb,y|x\na,x\n")
    source = open_files(data, "train")
    assert "".join(rows_of(source)) == "ab"
    assert "3 rows repeat another" in " ".join(source.notes)


BASE = "path,label,split,fold,weight\na,x,train,0,1\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name,label\na,x\n", r"no column 'path', but name, label: .*path=COLUMN label=COLUMN"),
        ("path,name\na,x\n", "no column 'label', .*but path, name: .*label=COLUMN"),
        ("path\na\n", "no column 'label'"),
        ("path,label,Label\na,x,y\n", "two columns 'label'"),
        ("path,label\n", "has no rows"),
        ("", "no column 'path'|its first line is blank"),
        (BASE + "b,x,dev,0,1\n", "line 3: split 'dev' should be train, val or test"),
        (BASE + "b,x,train,-1,1\n", r"line 3: fold '-1' should be 0, 1, 2, \.\.\."),
        (BASE + "b,x,train,1.5,1\n", "line 3: fold '1.5' should be 0, 1"),
        (BASE + "b,x,train,,1\n", "line 3: fold is empty"),
        (BASE + "b,x,train,0,-2\n", "line 3: weight '-2' should be 0 or more"),
        (BASE + "b,x,train,0,nan\n", "line 3: weight 'nan' should be 0"),
        (BASE + "b,x,train,0,\n", "line 3: weight '' should be 0"),
        (BASE + "b,,train,0,1\n", "line 3: label is empty"),
        (BASE + "\n,x,train,0,1\n", "line 4: '' is no path"),
        (BASE + "b\0,x,train,0,1\n", r"line 3: 'b\\x00' is no path"),
        (BASE + "b,x,train,0\n", "line 3: 4 cells, and the header has 5"),
        (BASE + "a,y,train,0,1\n", "line 3: 'a' has another label than in line 2"),
        (BASE + "a,x,test,0,1\n", "line 3: 'a' has another split than in line 2"),
        (BASE + "a,x,train,1,1\n", "line 3: 'a' has another fold than in line 2"),
        (BASE + "b,x,val,0,1\n", "a split 'val', so there are no folds: leave out the column fold"),
        ("path,label,split\na,x,val\n", "--data.fold 9: .*csv' has validation images of its own"),
        (BASE.encode() + b"\xff,x,train,0,1\n", "line 3: it is not UTF-8"),
        ('path,label\n"a\nb",x\n"c,y\n', "line 4: no CSV: unexpected end of data"),
        (BASE.replace("train", "test"), "has no images for train"),
        (BASE + "b,y,test,0,1\n", "no images of class 'y' for train"),
        ("path,label\na,x\n", r"--data.fold 9: with --data.val-fraction 0.2 .* folds 0 \.\. 4"),
        ("path,label,group\na,x,p\nb,x,\n", "line 3: group '' should be a name"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_row(tmp_path, content, message):
    data = changed(Config(data=put(tmp_path, content)), data__fold=9).data
    with pytest.raises(UserError, match=message) as caught:
        open_files(data, "train")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(("encoding", "name"), [("utf-8", "UTF-8"), ("utf-16", "UTF-16")])
def test_a_line_in_another_encoding_is_named_however_long_the_table_is(
    tmp_path, end, encoding, name
):
    wrong = b"\xff" if name == "UTF-8" else "\ud800".encode("utf-16-le", "surrogatepass")
    whole = end.join(["path,label", *["a,\ufffd"] * 20_000, "b,"]).encode(encoding)
    data = put(tmp_path, whole + wrong + end.encode(encoding.replace("16", "16-le")))
    with pytest.raises(UserError, match=f"line 20002: it is not {name}; save the table as UTF-8"):
        open_files(data, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"path": "a", "label": "x"}\n{"path": "b"', "line 2: no JSON: Expecting"),
        ('{"path": "a", "label": "x"}\n\n["b", "x"]', "line 3: it should be an object"),
        ('{"path": "a", "label": "x"}\n{"path": null, "label": "x"}', "line 2: '' is no path"),
        ('{"path": "a", "label": "x"}\n{"path": "\\ud800", "label": "x"}', "ud800' is no path"),
        ('{"path": "a", "label": "x"}\n{"path": "b"}', "line 2: label is empty"),
        ('{"path": "a", "label": "x"}\n{"path": "b", "split": 1}', "2: 'split' is not in the fir"),
    ],
)
def test_json_lines_that_cannot_be_used_are_refused_with_the_line(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        open_files(put(tmp_path, content, "labels.jsonl"), "train")


def test_a_table_is_found_or_refused(tmp_path, refusal):
    own = ["train", "folder", "--data.root", tmp_path, "--data.labels"]
    assert "'nope.csv': there is no such file here or in --data.root" in refusal(*own, "nope.csv")
    put(tmp_path, b"PAR1", "labels.xls")
    assert "should end in .csv, .tsv, .jsonl" in refusal(*own, "labels.xls")
    assert "--data.labels is for --data.name folder, not for shapes" in refusal(
        "train", "shapes", "--data.labels", "labels.csv"
    )
    pytest.importorskip("image_classifier.tools.kaggle_tables")
    pytest.importorskip("pyarrow")
    put(tmp_path, b"PAR1", "labels.parquet")
    assert "cannot read " in refusal(*own, "labels.parquet")


def test_a_table_here_is_not_taken_in_silence_for_that_of_the_images(tmp_path, monkeypatch):
    (photos := tmp_path / "photos").mkdir()
    put(photos, b"path,label\na.jpg,ant\nb.jpg,bee\n", "labels.csv")
    put(tmp_path, b"path,label\na.jpg,x\nb.jpg,y\n", "labels.csv")  # as `predict` writes them
    monkeypatch.chdir(tmp_path)

    def classes(labels, root="photos"):
        return find_table(DataConfig("folder", root, labels=labels)).file.read_bytes()[-4:-1]

    with pytest.raises(UserError, match=r"say 'photos/labels\.csv' or '\./labels\.csv'$"):
        classes("labels.csv")
    assert [classes("photos/labels.csv"), classes("./labels.csv")] == [b"bee", b"g,y"]
    assert classes("labels.csv", ".") == b"g,y"  # one file
    (tmp_path / "labels.csv").unlink()
    assert classes("labels.csv") == b"bee"


def test_a_missing_file_is_named_with_its_row_unless_it_may_be_skipped(flat, tmp_path):
    data, names = flat
    rows = "".join(f"{name},{name[:3]}\n" for name in [*names, "bee/99.jpg", "bee/98.jpg"])
    config = Config(data=data)
    put(tmp_path, "path,label\n" + rows)
    config = changed(config, data__labels=str(tmp_path / "labels.csv"), data__val_fraction=0.001)
    with pytest.raises(
        UserError, match=r"line 14: there is no file '.*/train/bee/99\.jpg'; .* 2 of"
    ):
        open_dataset(config.data, "train")
    pytest.importorskip("image_classifier.tools.skip_bad_images")
    skipping = changed(config, data__on_bad_image="skip").data
    assert len(open_dataset(skipping, "train")) == 14


@pytest.fixture
def labelled(on_photos, tmp_path):
    """A run on photographs of which some have several labels, and weights."""
    labels, rows = ("ant", "bee|cat", "", "ant|cat"), "path,label,split,weight\n"
    for n in range(16):
        split = "train" if n < 12 else "val"
        rows += f"{split}/{('ant', 'bee')[n % 2]}/{n}.jpg,{labels[n % 4]},{split},{n}\n"
    put(tmp_path, rows)
    config = changed(on_photos, data__labels=str(tmp_path / "labels.csv"), data__limit=0)
    os.makedirs(config.run.dir)
    return changed(config, augment__crop="resized", model__task="multi-label")


def number_of(source, index):
    """The number in the name of a photograph."""
    return int(source.paths[int(index)].stem)


EXPECTED = [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 0, 1]]  # ant, bee, cat


@pytest.mark.parametrize(
    ("where", "workers"), [("stream", 0), ("stream", 2), ("host", 0), ("device", 0)]
)
def test_several_labels_and_weights_arrive_with_their_images(labelled, where, workers):
    crop = "resized" if where == "stream" else "pad"
    config = changed(labelled, data__where=where, data__workers=workers, augment__crop=crop)
    data = TrainData(config, CPU)
    seen_numbers = []
    for batch in data.batches(0, 3):
        numbers = [number_of(data.source, index) for index in batch.indices]
        assert batch.labels.tolist() == [EXPECTED[number % 4] for number in numbers]
        weights = data.weights[batch.indices] * data.source.weights.mean()
        assert weights.tolist() == pytest.approx(numbers)
        seen_numbers += numbers
    data.close()
    assert sorted(seen_numbers) == list(range(12))


def evaluated(config):
    """The names and labels of this rank's part of the validation images, streamed and resident."""
    with join_world(config.compute) as world:
        found = []
        for where in ("stream", "auto"):
            own = changed(config, data__where=where)
            data = EvalData(own.data, "val", world, task=own.model.task)
            labels = torch.cat([batch.labels.clone() for batch in data.batches()])
            names = [data.source.name(int(index)) for index in data.indices]
            found.append(dict(zip(names, labels.tolist(), strict=True)))
            data.close()
        return found


def test_evaluation_has_each_image_with_its_labels_once_on_any_number_of_ranks(labelled):
    (alone, resident), two = evaluated(labelled), run_ranks(2, evaluated, labelled)
    assert alone == resident == two[0][0] | two[1][0] == two[0][1] | two[1][1]
    assert [*alone.values()] == EXPECTED
    assert not two[0][0].keys() & two[1][0].keys()


def test_labels_are_the_same_wherever_a_run_resumes(labelled):
    config = changed(labelled, data__workers=2)
    data = TrainData(changed(config, data__where="stream"), CPU)
    whole = [batch.labels.tolist() for batch in data.batches(0, 7)]
    assert [batch.labels.tolist() for batch in data.batches(4, 7)] == whole[4:]
    data.close()


def test_a_table_trains_as_its_folder_and_resumes_from_the_same_labels_only(on_photos, tmp_path):
    config = changed(on_photos, model__width=8, epochs=1)
    loss, rows = train(config).value("loss"), []
    for split in ("train", "val"):
        source = open_files(config.data, split)
        names = [source.paths.from_folder(config.data.root, n).decode() for n in range(len(source))]
        labels = [source.classes[label] for label in source.labels]
        rows += [(name, label, split) for name, label in zip(names, labels, strict=True)]
    put(tmp_path, "path,label,split\n" + "".join(f"{','.join(row)}\n" for row in rows))
    lines = (json.dumps({"split": s, "label": n, "path": p}) + "\n" for p, n, s in rows)
    put(tmp_path, "".join(lines), "labels.jsonl")
    weighted = (f"{','.join(row)},{number}\n" for number, row in enumerate(rows))
    put(tmp_path, "path,label,split,weight\n" + "".join(weighted), "other.csv")
    config = changed(config, run__dir=str(tmp_path / "own"))
    for name in ("labels.csv", "labels.jsonl"):
        assert train(changed(config, data__labels=str(tmp_path / name))).value("loss") == loss
    with pytest.raises(UserError, match="the training images have changed"):
        train(changed(config, data__labels=str(tmp_path / "other.csv")))


def test_a_table_alone_says_that_the_images_are_ones_own():
    assert take_preset(["--data.labels", "labels.csv"], "shapes")[0] == "finetune"


def test_groups_are_those_of_their_rows_where_others_are_for_the_test(tmp_path):
    pytest.importorskip("image_classifier.tools.holdout")
    rows = [(f"t{n}.jpg", f"t{n}", "test") for n in range(6)]
    rows += [(f"{n}.jpg", f"p{n // 4}", "train") for n in range(40)]
    lines = [f"{name},{'ab'[n % 2]},{split},{group}" for n, (name, group, split) in enumerate(rows)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,split,group", *lines, ""]))
    for name, _, _ in rows:
        (tmp_path / name).touch()
    group_of = {name: group for name, group, _ in rows}
    sides = []
    for split in ("train", "val"):
        data = DataConfig("folder", str(tmp_path), labels="labels.csv", val_fraction=0.3)
        paths = open_dataset(data, split).paths
        sides.append({group_of[paths.relative(n).decode()] for n in range(len(paths))})
    assert sides[1]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 10
