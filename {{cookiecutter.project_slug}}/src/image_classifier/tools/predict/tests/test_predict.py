"""`predict` gives the predictions of an evaluation, in a file that resumes after a kill."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import HOSTILE, changed, on_deep, tiny, untrained_run, write_photo
from safetensors.torch import load_file

from image_classifier.checkpoints import load_best, load_model
from image_classifier.cli import main
from image_classifier.config import ComputeConfig, DataConfig
from image_classifier.data import EvalData, open_dataset
from image_classifier.data.arrays import wrong_channels
from image_classifier.errors import UserError
from image_classifier.evaluate import evaluate
from image_classifier.models.resnet9 import LOGIT_SCALE
from image_classifier.runtime import platform
from image_classifier.runtime.distributed import World
from image_classifier.tools.predict import images, output
from image_classifier.tools.predict import predict as predicting
from image_classifier.tools.predict.rows import unread
from image_classifier.train import train

QUICK = ("--device", "cpu", "--workers", "0", "--batch-size", "4")


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("predict") / "run")
    return untrained_run(changed(config, augment__tta="flip"), photos)


def predict(run, *words):
    return main(["predict", run, *QUICK, *map(str, words)])


def rows_of(path):
    return list(csv.DictReader(path.read_text("utf-8").splitlines(), strict=True))


def test_images_with_several_labels_have_a_column_of_them(config, photos, tmp_path, capsys):
    pytest.importorskip("image_classifier.tools.calibration")
    config, out = changed(config, model__task="multi-label"), tmp_path / "o.csv"
    plain = untrained_run(changed(config, run__dir=str(tmp_path / "plain")), photos)
    assert predict(plain, photos / "val", "--out", out) == 0
    highest = max(float(row["probability_1"]) for row in rows_of(out))
    run = untrained_run(config, photos, 1.0, (highest - 1e-6, highest - 1e-6))
    assert predict(run, photos / "val", "--out", out, "--fresh") == 0
    assert predict(run, photos / "val", "--out", tmp_path / "out.jsonl") == 0
    rows = rows_of(out)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, line in zip(rows, lines, strict=True):
        shares = {row[f"class_{n}"]: float(row[f"probability_{n}"]) for n in (1, 2)}
        assert line["labels"] == [n for n in ("ant", "bee") if shares[n] >= highest - 1e-6]
        assert row["labels"] == "|".join(line["labels"])
    assert len({row["labels"] for row in rows}) > 1
    capsys.readouterr()
    assert predict(run, photos / "val") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == [
        row["labels"] for row in rows if row["labels"]
    ]


def test_it_abstains_below_the_threshold_that_validation_chose(config, photos, tmp_path, capsys):
    pytest.importorskip("image_classifier.tools.calibration")
    out = tmp_path / "out.csv"
    plain = untrained_run(changed(config, run__dir=str(tmp_path / "plain")), photos)
    assert predict(plain, photos / "val", "--out", out) == 0
    sure = rows_of(out)
    assert "decision" not in sure[0]
    middle = sorted(float(row["probability"]) for row in sure)[len(sure) // 2]
    odds = (middle / (1 - middle)) ** (1 / 2)  # two classes, at a temperature of 2
    run = untrained_run(config, photos, 2.0, (odds / (1 + odds) - 1e-6,))
    assert predict(run, photos / "val", "--out", out, "--fresh") == 0
    rows = rows_of(out)
    assert [row["label"] for row in rows] == [row["label"] for row in sure]
    is_sure = [float(row["probability"]) >= middle for row in sure]
    assert 0 < sum(is_sure) < len(rows)
    assert [row["decision"] for row in rows] == [
        row["label"] if known else "abstain" for row, known in zip(rows, is_sure, strict=True)
    ]
    capsys.readouterr()
    for top_k in (1, 2):
        assert predict(run, photos / "val", "--top-k", top_k) == 0
        said = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert said == [row["decision"] for row in rows]


def test_predictions_are_those_of_an_evaluation(run, photos, tmp_path):
    out, world = tmp_path / "out.csv", World(torch.device("cpu"))
    assert predict(run, photos / "val", "--out", out, "--workers", 2) == 0
    trained = load_model(run, ComputeConfig(device="cpu"), world)
    data = EvalData(trained.config.data, "val", world)
    scores = evaluate(trained.model, data, trained.normalize, trained.precision)
    rows, found = rows_of(out), scores.predictions
    assert [row["path"] for row in rows] == [str(data.source.paths[n]) for n in range(4)]
    assert [row["label"] for row in rows] == [data.source.classes[n] for n in found.predicted]
    share = found.probability
    for name, expected in (("probability", share), ("probability_2", 1 - share)):
        assert [float(row[name]) for row in rows] == pytest.approx(expected.tolist(), abs=1e-6)
    assert predict(run, photos / "val", "--out", out, "--tta", "none", "--fresh") == 0
    assert rows_of(out) != rows


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_killed_command_resumes_to_the_same_bytes_and_no_other_command_does(
    kind, *, run, photos, tmp_path, monkeypatch, capsys, refusal
):
    photos = Path(shutil.copytree(photos, f"{tmp_path}-photos"))
    out, partial = tmp_path / f"x.{kind}", tmp_path / f"x.{kind}.partial"
    words = (photos / "train", photos / "val/ant", "--out", out, "--tta", "none")  # 14 images
    assert predict(run, *words) == 0
    whole = out.read_bytes()
    (tmp_path / f".x.{kind}.0123abcd.tmp").touch()  # of a command that was killed at its end
    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "finish", Mock(side_effect=KeyboardInterrupt))
        assert predict(run, *words, "--fresh") == 130
    assert out.read_bytes() == whole  # until the new one is complete
    head, *rows = partial.read_bytes().splitlines(keepends=True)
    cause = f"cannot resume '{partial}': it was begun with other"
    for option, value in (("--top-k", 1), ("--tta", "flip"), ("--batch-size", 5)):
        assert f"{cause} {option};" in refusal("predict", run, *QUICK, *words, option, value)
    assert f"{cause} images;" in refusal("predict", run, *QUICK, photos / "val", *words)
    photo = photos / "val/ant/12.jpg"
    time = photo.stat().st_mtime_ns
    os.utime(photo, ns=(time, time + 10**9))
    assert f"{cause} files;" in refusal("predict", run, *QUICK, *words)
    os.utime(photo, ns=(time, time))
    for name in ("weights", "precision"):
        partial.write_bytes(head.replace(b'"%b": "' % name.encode(), b'"%b": "0' % name.encode()))
        assert f"{cause} {name};" in refusal("predict", run, *QUICK, *words)
    partial.write_bytes(b"no rows\n")
    assert f"{cause} weights;" in refusal("predict", run, *QUICK, *words)
    assert partial.read_bytes() == b"no rows\n"
    assert predict(run, *words, "--fresh") == 0
    for damage, num_kept in ((b"", 12), (rows[10][:-9], 8), (b"{}\n", 8), (b"\0\0\0", 8)):
        partial.write_bytes(b"".join([head, *rows[: 10 if damage else 14], damage]))
        assert predict(run, *words) == 0
        assert f"{num_kept} of 14 rows are there" in capsys.readouterr().out
        assert out.read_bytes() == whole
        assert sorted(tmp_path.iterdir()) == [out]


def test_a_command_with_out_needs_no_reader_and_one_without_fails(run, photos, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    for out, code in ((["--out", folder / "x.csv"], 0), ([], 1)):
        receive, send = os.pipe()
        os.close(receive)
        with os.fdopen(send, "w") as pipe, redirect_stdout(pipe):
            assert predict(run, photos / "val", *out) == code
    assert len(rows_of(folder / "x.csv")) == 4
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_ends_no_embeddings(run, photos, tmp_path):
    receive, send = os.pipe()
    os.close(receive)
    with os.fdopen(send, "w") as pipe, redirect_stdout(pipe):
        predict(run, photos / "train", "--embeddings", tmp_path / "x.npy")
    assert np.isfinite(np.load(tmp_path / "x.npy")).all(1).tolist() == [True] * 12


def test_a_reader_that_leaves_ends_no_heat_maps(run, photos, tmp_path):
    pytest.importorskip("image_classifier.tools.explain")
    receive, send = os.pipe()
    os.close(receive)
    with os.fdopen(send, "w") as pipe, redirect_stdout(pipe):
        predict(run, photos / "train", "--explain", tmp_path / "heat")
    assert len(list(tmp_path.glob("heat/*.png"))) == 12


def test_two_commands_do_not_write_the_same_file(run, photos, tmp_path, refusal):
    words = (run, photos / "val", "--out", tmp_path / "x.csv", "--fresh")
    hold = f"import sys; from {platform.__name__} import lock; "
    hold += "file = open(sys.argv[1], 'ab'); lock(file); print(flush=True); input()"
    partial = tmp_path / "x.csv.partial"
    partial.write_bytes(b"{}\n")
    command = [sys.executable, "-c", hold, partial]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert "another command is writing" in refusal("predict", *words)
        assert partial.read_bytes() == b"{}\n"
        other.communicate(b"\n")
    assert predict(*words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_unreadable_files_are_rows_with_an_error(run, photos, tmp_path, capsys):
    good, cut, gone = photos / "val/ant/12.jpg", tmp_path / "cut.jpg", tmp_path / "gone.jpg"
    cut.write_bytes(good.read_bytes()[:900])
    gone.symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.jpg")  # which nobody writes to
    words = (good, cut, gone, good, tmp_path / "pipe.jpg", "--out")
    assert predict(run, *words, tmp_path / "x.csv", "--workers", 1) == 0
    assert capsys.readouterr().err.startswith("3 of 5 files cannot be read; the column `error` of")
    rows = rows_of(tmp_path / "x.csv")
    errors = [row["error"] for row in rows]
    assert errors[::2] == ["", "No such file or directory", "not a plain file"]
    assert "truncated" in errors[1]
    assert rows[1]["label"] == rows[2]["probability_1"] == ""
    first, again = dict(rows[0]), dict(rows[3])
    for name in [name for name in first if name.startswith("probability")]:
        # The last digit may depend on the place in the batch.
        assert float(first.pop(name)) == pytest.approx(float(again.pop(name)), rel=1e-5)
    assert first == again
    assert predict(run, *words, tmp_path / "x.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == [error or None for error in errors]
    assert lines[1]["label"] is None
    best = {"label": rows[0]["label"], "probability": float(rows[0]["probability"])}
    assert lines[0]["top"][0] == best == {name: lines[0][name] for name in best}
    assert predict(run, cut) == 1
    assert "cut.jpg  cannot be read: image file is truncated" in capsys.readouterr().out


def test_embeddings_are_what_the_last_layer_gets_in_the_order_of_the_rows(run, photos, tmp_path):
    cut, npy = tmp_path / "cut é.jpg", tmp_path / "x.npy"
    cut.write_bytes(b"no image")
    words = (photos / "val", cut, "--tta", "none", "--out", tmp_path / "x.csv")
    assert predict(run, *words, "--embeddings", npy) == 0
    found, rows = torch.from_numpy(np.load(npy)), rows_of(tmp_path / "x.csv")
    trained = load_model(run, ComputeConfig(device="cpu"), World(torch.device("cpu")))
    logits = trained.model.head(found) * LOGIT_SCALE
    assert [trained.classes[n] for n in logits[:4].argmax(1)] == [r["label"] for r in rows[:4]]
    shares = logits.softmax(1).amax(1)[:4]
    assert [float(r["probability"]) for r in rows[:4]] == pytest.approx(shares.tolist(), abs=1e-5)
    assert rows[4]["error"]
    assert found[4].isnan().all()
    both = tmp_path / "x.safetensors"
    assert predict(run, *words[:2], "--tta", "flip", "--embeddings", both) == 0  # and no --out
    saved = load_file(both)
    names = bytes(saved["paths"].numpy()).decode().split("\0")
    assert names == [row["path"] for row in rows]
    mean = saved["features"][:4]
    assert mean.shape == found[:4].shape
    assert not torch.allclose(mean, found[:4])


FULL = OSError("1024 requested and 0 written")  # what numpy raises, without a number


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (FULL, 1)])
def test_where_embeddings_are_not_written_out_is_not_and_the_same_command_writes_both(
    error, code, *, run, photos, tmp_path, monkeypatch, capsys
):
    words = (photos / "val", "--out", tmp_path / "x.csv", "--embeddings", tmp_path / "x.npy")
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", Mock(side_effect=error))
        assert predict(run, *words) == code
    (tmp_path / ".x.npy.0123abcd.tmp").touch()  # what SIGKILL leaves, as large as the features
    assert ("x.npy': 1024 requested and 0 written\n" in capsys.readouterr().err) == (code == 1)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"x.csv.partial"}
    assert predict(run, *words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "x.npy"]
    assert not np.isnan(np.load(tmp_path / "x.npy")).any()  # those before the kill are there, too


def test_embeddings_do_not_keep_a_command_that_starts_over_from_its_end(
    run, photos, tmp_path, monkeypatch, refusal
):
    words = (photos / "val", "--out", tmp_path / "x.csv", "--embeddings", tmp_path / "x.npy")
    for fresh in ((), ("--fresh",)):
        with monkeypatch.context() as patch:
            patch.setattr(output.Output, "finish", Mock(side_effect=KeyboardInterrupt))
            assert predict(run, *words, *fresh) == 130
        assert predict(run, *words) == 0
    (tmp_path / "x.csv").unlink()
    (tmp_path / "x.csv.partial").write_text('{"weights": "x"}\n')  # of a command without them
    assert "x.npy' exists already" in refusal("predict", run, *QUICK, *words)


def test_hostile_names_break_no_file_and_no_screen(run, photos, tmp_path, capsys):
    hostile = ("a\nb.jpg", 'q",.jpg', "\x1b[2J.jpg", os.fsdecode(b"\xff.jpg"), "é 名.jpg", " .jpg")
    for name in hostile:
        shutil.copy(photos / "val/ant/12.jpg", tmp_path / name)
    assert predict(run, tmp_path) == 0
    said = capsys.readouterr().out
    assert predict(run, tmp_path, "--out", tmp_path / "x.csv") == 0
    for text in (said, (tmp_path / "x.csv").read_text(encoding="utf-8").partition("\n")[2]):
        assert text.count("\n") == len(hostile)
        assert all(line.isprintable() for line in text.splitlines())
    names = {Path(row["path"]).name for row in rows_of(tmp_path / "x.csv")}
    assert names == {r"a\nb.jpg", 'q",.jpg', r"\x1b[2J.jpg", r"\xff.jpg", "é 名.jpg", " .jpg"}


def test_hostile_names_of_classes_break_no_screen(capsys):
    trained = SimpleNamespace(classes=HOSTILE)
    top = [{"label": name, "probability": 0.25} for name in HOSTILE]
    row = {"path": "a.jpg", **top[0], "top": top, "error": None}
    rows = [row, row | {"labels": [*HOSTILE]}, row | {"decision": "abstain"}]
    assert predicting.print_rows([rows], trained, needs_all=False) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert all(line.isprintable() for line in said)


def test_several_processes_do_not_write_one_file(run, photos, monkeypatch, refusal):
    joined = nullcontext(World(torch.device("cpu"), size=2))
    monkeypatch.setattr(predicting, "join_world", lambda _: joined)
    assert "without torchrun" in refusal("predict", run, *QUICK, photos / "val")


def cells_of(texts, delimiter=","):
    """The cells of a row with such a path and classes, as a spreadsheet reads them."""
    path, *classes = texts
    top = [{"label": name, "probability": 1e-12} for name in classes]
    file = io.BytesIO()
    output.write_csv([{"path": path, **top[0], "top": top, "error": None}], file, len(top))
    text = file.getvalue().decode().splitlines()[1]
    return next(csv.reader([text], delimiter=delimiter, skipinitialspace=True))


SIGNS = {*"=+@-\uff1d\uff0b\uff0d\uff20"}
FORMULAS = ("=cmd|'/C x'!A0", "+1+1", "-2+3", "@SUM(1)", "\uff1d1+1", "\uff0b1+1", " =1", '"=1"')
BEFORE = ("", "x;", 'x";', "x; ", "x;'", 'x;"', "a,x;", "x;;", "\u3000")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_no_spreadsheet_finds_a_formula_whatever_is_between_its_cells(delimiter):
    for text in map("".join, product(BEFORE, FORMULAS)):
        for cell in (*cells_of([f"a/{text}", text, text], delimiter), *cells_of([text, "x"])):
            assert cell[:1] == "'" or cell.lstrip(" \u3000'\"")[:1] not in SIGNS, text


def test_text_is_in_quotes_and_honest_names_remain_as_they_are():
    assert cells_of(["=x.jpg", "=HYPERLINK(1)"])[:2] == ["./=x.jpg", "'=HYPERLINK(1)"]
    classes = ["-1", "a,b", 'a"b', "a;b", "a = b", "R&D", "T-shirt", "\u00e9", "3"]
    cells = cells_of(["photos/a;b.jpg", *classes])
    assert (cells[0], cells[3::2]) == ("photos/a;b.jpg", [*classes, ""])
    file = io.BytesIO()
    output.write_csv([output.NO_ROW | {"path": "a", "error": "no file"}], file, 1)
    head, row = file.getvalue().decode().splitlines()
    assert head == '"path","label","probability","class_1","probability_1","error"'
    assert row == '"a","","","","","no file"'


def test_predictions_are_labels_of_a_table(run, photos, tmp_path):
    pytest.importorskip("image_classifier.tools.label_table")
    assert predict(run, photos / "val", "--out", tmp_path / "found.csv") == 0
    data = DataConfig("folder", str(photos), 0.001, labels=str(tmp_path / "found.csv"))
    source = open_dataset(data, "train")
    rows = rows_of(tmp_path / "found.csv")
    assert [str(source.paths[n]) for n in range(len(source))] == [row["path"] for row in rows]
    assert [source.classes[n] for n in source.labels] == [row["label"] for row in rows]


def test_folders_patterns_and_lists_give_images(tmp_path, monkeypatch):
    def listed(*paths, stdin=b"", separator=b"\n"):
        files = images.list_files([str(path) for path in paths], io.BytesIO(stdin), separator)
        return [files.relative(index) for index in range(len(files))]

    monkeypatch.chdir(tmp_path)
    for folder in ("a/b", "a-b", "none", "a/.old", "a/b/.old"):
        Path(folder).mkdir(parents=True)
    names = ("2.jpg", "10.PNG", "x.txt", ".3.jpg", "[1].jpg", "b/4.jpg", "../a-b/1.jpg")
    for name in (*names, ".old/5.jpg", "b/.old/6.jpg"):
        Path("a", name).touch()
    Path("a/b/loop").symlink_to("..")
    inside = [b"a/10.PNG", b"a/2.jpg", b"a/[1].jpg", b"a/b/4.jpg"]
    assert listed("a") == listed("a/**") == inside
    assert listed("./a/") == [b"./" + name for name in inside]
    assert listed("**/*.jpg") == [b"a-b/1.jpg", *inside[1:]]
    assert listed(f"{tmp_path}/**/b/*") == [os.fsencode(tmp_path) + b"/a/b/4.jpg"]
    assert listed("a/.*/*.jpg") == listed("a/.old/**") == [b"a/.old/5.jpg"]
    above = f"../{tmp_path.name}/a/"
    assert listed(f"{above}.*.jpg") == [os.fsencode(f"{above}.3.jpg")]
    named = [b"a/[1].jpg", b"a/x.txt", b"a/2.jpg", b"a/2.jpg"]  # a name comes before a pattern
    assert listed(*map(os.fsdecode, named)) == named
    assert listed("-", stdin=b"b.jpg\n\na\xff.jpg") == [b"b.jpg", b"a\xff.jpg"]
    assert listed("-", stdin=b"a\nb.jpg\0c\0", separator=b"\0") == [b"a\nb.jpg", b"c"]
    assert listed("-", stdin=b"\xef\xbb\xbfb.jpg\r\nc.jpg") == [b"b.jpg", b"c.jpg"]
    assert listed("-", stdin=b"b.jpg\nc\r") == [b"b.jpg", b"c\r"]  # a name, odd as it is
    with pytest.raises(UserError, match="no images: name"):
        listed("none")


def test_a_list_of_names_that_end_with_nul_asks_for_the_option(
    run, photos, tmp_path, monkeypatch, refusal
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a.jpg\0b.jpg\0")))
    said = refusal("predict", run, *QUICK, "-", "--out", tmp_path / "x.csv")
    assert "a name on standard input has NUL in it: --null" in said
    names = b"".join(os.fsencode(path) + b"\0" for path in photos.glob("val/ant/*"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(names)))
    assert predict(run, "-", "--null", "--out", tmp_path / "x.csv") == 0
    assert len(rows_of(tmp_path / "x.csv")) == 2


def test_files_in_folders_that_are_left_out_are_counted(run, tmp_path, capsys):
    for name in ("1.jfif", "2.avif", "x/3", "4.AVIF"):
        write_photo(tmp_path / "new.jpg", 1)
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "new.jpg", tmp_path / "new" / name)
    assert main(["predict", run, str(tmp_path / "new"), "--device", "cpu", "--workers", "0"]) == 0
    said = capsys.readouterr()
    assert "1.jfif" in said.out
    left = (
        "3 files in folders are left out by their suffix: 2 .avif, 1 without one; a file that you "
    )
    assert left in said.err


def test_suffixes_of_what_is_left_out_break_no_screen_and_are_few(run, tmp_path, capsys):
    write_photo(tmp_path / "1.jpg", 1)
    for number in range(9):
        (tmp_path / f"scan.{number:06}").touch()
    (tmp_path / "x.\x1b]0;owned\a").touch()
    (tmp_path / "y.\x1b]0;owned\a").touch()
    assert predict(run, tmp_path) == 0
    line = capsys.readouterr().err
    assert r"suffix: 2 .\x1b]0;owned\x07, 1 ." in line
    assert line.count(" 1 .0000") == 4
    assert ", ...; a file" in line


def test_a_mistake_is_answered_in_one_line(run, photos, tmp_path, refusal):
    (tmp_path / "there.csv").touch()
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "folder.npy").mkdir()
    absent = "mps" if torch.cuda.is_available() else "cuda"
    for words, expected in (
        (["--out", "x.txt"], "'x.txt' ends in none of .csv, .jsonl"),
        (["--out", tmp_path / "there.csv"], "there.csv' exists already: --fresh replaces it"),
        (["--out", tmp_path / "folder.csv", "--fresh"], "folder.csv' is a folder: name a file"),
        (["--embeddings", tmp_path / "folder.npy", "--fresh"], "folder.npy' is a folder: name"),
        (["--embeddings", "x.txt"], "'x.txt' ends in none of .npy, .safetensors"),
        (["--embeddings", tmp_path / "no/x.npy"], "there is no folder that can be written"),
        (["--out", "/proc/x/y.csv"], "cannot write '/proc/x/y.csv.partial'"),
        (["--top-k", "0"], "--top-k 0 is not in 1 .. "),
        (["nowhere"], "there is no file or folder 'nowhere'"),
        (["--device", absent], f"device {absent}: "),
    ):
        assert expected in refusal("predict", run, photos, *words)
    assert "there is no checkpoint" in refusal("predict", tmp_path, photos)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="`**` is `*` there, beside other letters")
def test_a_pattern_that_python_does_not_take_is_answered_in_one_line(run, photos, refusal):
    assert "**.jpg': Invalid pattern" in refusal("predict", run, photos / "**.jpg")


def test_where_a_library_lacks_memory_a_smaller_batch_is_advised(run, photos, monkeypatch, capsys):
    fail = Mock(side_effect=RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    monkeypatch.setattr(images.Images, "batches", fail)
    assert predict(run, photos) == 1
    assert "out of memory: give a smaller --batch-size than 4" in capsys.readouterr().err


def test_images_of_any_channels_are_predicted_as_in_evaluation(config, satellite, tmp_path):
    config = on_deep(config, satellite, 5, epochs=1, data__fit="pad")
    scores = train(config)
    out = tmp_path / "labels.jsonl"
    assert main(["predict", config.run.dir, str(satellite / "val"), "--out", str(out)]) == 0
    shares = [json.loads(line)["probability"] for line in out.read_text().splitlines()]
    best = load_best(Path(config.run.dir, "checkpoints", "best.pt"))
    logits = scores.predictions.probabilities.log() / best.decision.temperature
    expected = logits.softmax(1).amax(1)
    assert shares == pytest.approx(expected.tolist(), abs=1e-5)


def test_an_image_of_other_channels_is_told_no_option_that_predict_has_not():
    row = unread({"path": "a.tif"}, str(wrong_channels(1, 4)))
    assert row["error"] == "it has 1 channel, not 4"


def test_a_command_that_resumes_counts_what_could_not_be_read_before(
    run, photos, tmp_path, monkeypatch, capsys
):
    (tmp_path / "bad.jpg").write_bytes(b"")
    words = (tmp_path / "bad.jpg", photos / "train", "--out", tmp_path / "x.csv")
    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "finish", Mock(side_effect=KeyboardInterrupt))
        assert predict(run, *words) == 130
    assert predict(run, *words) == 0
    assert "1 of 13 files cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("knobs", [{"data__test_size": 48}, {"data__fit": "squash"}], ids=str)
def test_images_become_squares_as_in_an_evaluation(knobs, config, photos, tmp_path):
    world = World(torch.device("cpu"))
    run = untrained_run(changed(config, **knobs), photos)
    assert predict(run, photos / "val", "--out", tmp_path / "x.csv") == 0
    trained = load_model(run, ComputeConfig(device="cpu"), world)
    found = trained.evaluate(trained.open_images("val", world)).predictions
    shares = [float(row["probability"]) for row in rows_of(tmp_path / "x.csv")]
    assert shares == pytest.approx(found.probability.tolist(), abs=1e-6)


def test_an_image_that_cannot_be_read_has_no_label_that_black_pixels_have():
    row = unread({"path": "a.jpg", "label": "ant", "labels": ["ant"], "decision": "ant"}, "gone")
    assert (row["label"], row["labels"], row["decision"]) == (None, None, None)


def test_rows_that_have_no_heat_maps_are_not_taken_for_those_that_have(
    run, photos, tmp_path, monkeypatch, refusal
):
    pytest.importorskip("image_classifier.tools.explain")
    words = (photos / "val", "--out", tmp_path / "x.csv")
    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "finish", Mock(side_effect=KeyboardInterrupt))
        assert predict(run, *words) == 130
    said = refusal("predict", run, *QUICK, *words, "--explain", tmp_path / "heat")
    assert "it was begun with other --explain;" in said


def test_a_command_that_abstains_resumes_too(config, photos, tmp_path, monkeypatch, capsys):
    pytest.importorskip("image_classifier.tools.calibration")
    run = untrained_run(config, photos, 1.0, (0.75,))
    words = (photos / "train", "--out", tmp_path / "x.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "finish", Mock(side_effect=KeyboardInterrupt))
        assert predict(run, *words) == 130
    assert predict(run, *words) == 0
    assert "12 of 12 rows are there" in capsys.readouterr().out


def test_a_head_that_a_kill_has_cut_is_written_anew(run, photos, tmp_path):
    (tmp_path / "x.csv.partial").write_bytes(b'{"weights": "12')
    assert predict(run, photos / "val", "--out", tmp_path / "x.csv") == 0
    assert len(rows_of(tmp_path / "x.csv")) == 4


def test_a_disk_that_is_full_at_the_end_leaves_no_part_of_the_file_and_keeps_its_rows(
    run, photos, tmp_path, monkeypatch, capsys
):
    def write_half(_, file, __):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    words = (photos / "val", "--out", tmp_path / "x.csv")
    with monkeypatch.context() as patch:
        patch.setitem(output.FORMATS, ".csv", write_half)
        assert predict(run, *words) == 1
    assert "x.csv': No space left on device; 4 rows are kept; run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv.partial"]
    assert predict(run, *words) == 0
    assert len(rows_of(tmp_path / "x.csv")) == 4
