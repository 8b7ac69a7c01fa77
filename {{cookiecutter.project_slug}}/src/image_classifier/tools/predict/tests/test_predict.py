"""`predict` gives the predictions of an evaluation, in a file that resumes after a kill."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import changed, tiny, untrained_run

from image_classifier.cli import main
from image_classifier.config import ComputeConfig
from image_classifier.data.loader import EvalData
from image_classifier.errors import UserError
from image_classifier.evaluate import evaluate
from image_classifier.runtime.distributed import join_world
from image_classifier.tools.loaded_model import load_model
from image_classifier.tools.predict import images, output

HOSTILE = [b"a\nb.jpg", b'q",.jpg', b"\x1b[2J.jpg", b"\xff.jpg", "é 名.jpg".encode(), b" .jpg"]


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """A run folder with an untrained model."""
    config = tiny(tmp_path_factory.mktemp("predict") / "run")
    return untrained_run(changed(config, augment__tta="flip"), photos)


def predict(run, *words):
    """The exit code of the command `predict`, four images at a time."""
    text = [str(word) for word in words]
    workers = [] if "--workers" in text else ["--workers", "0"]
    return main(["predict", run, *text, "--batch-size", "4", "--device", "cpu", *workers])


def rows_of(path):
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_predictions_are_those_of_an_evaluation(run, photos, tmp_path):
    out = tmp_path / "out.csv"
    assert predict(run, photos / "val", "--out", out, "--workers", 2) == 0
    compute = ComputeConfig(device="cpu")
    with join_world(compute) as world:
        trained = load_model(run, compute, world)
        assert trained.normalize.tta == "flip"
        data = EvalData(trained.config.data, "val", world)
        scores = evaluate(trained.model, data, trained.normalize, trained.precision, world)
    rows, found = rows_of(out), scores.predictions
    assert [row["path"] for row in rows] == [str(data.source.paths[n]) for n in range(4)]
    assert [row["label"] for row in rows] == [data.source.classes[n] for n in found.predicted]
    shares = found.probability.tolist()
    for name, expected in (
        ("probability", shares),
        ("probability_1", shares),
        ("probability_2", [1 - share for share in shares]),
    ):
        assert [float(row[name]) for row in rows] == pytest.approx(expected, abs=1e-6)
    assert predict(run, photos / "val", "--out", out, "--tta", "none", "--fresh") == 0
    assert rows_of(out) != rows


def interrupt(*_, **__):
    """Ctrl-C, in place of a function."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_killed_command_resumes_to_the_same_bytes(
    kind, *, run, photos, tmp_path, monkeypatch, capsys
):
    out, partial = tmp_path / f"x.{kind}", tmp_path / f"x.{kind}.partial"
    words = (photos / "train", photos / "val/ant", "--out", out, "--tta", "none")  # 14 images
    assert predict(run, *words) == 0
    whole = out.read_bytes()
    assert sorted(tmp_path.iterdir()) == [out]
    (tmp_path / f".x.{kind}.0123abcd.tmp").touch()  # of a command that was killed at its end
    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "finish", interrupt)
        assert predict(run, *words, "--fresh") == 130
    assert out.read_bytes() == whole  # until the new one is complete
    head, *rows = partial.read_bytes().splitlines(keepends=True)
    for damage, num_kept in ((b"", 12), (rows[10][:-9], 8), (b"{}\n", 8), (b"\0\0\0", 8)):
        partial.write_bytes(b"".join([head, *rows[: 10 if damage else 14], damage]))
        assert predict(run, *words) == 0
        assert f"{num_kept} of 14 rows are there" in capsys.readouterr().out
        assert out.read_bytes() == whole
        assert sorted(tmp_path.iterdir()) == [out]


def test_rows_of_another_command_are_refused(run, photos, tmp_path, monkeypatch, refusal):
    out = tmp_path / "x.csv"
    words = (photos / "train", "--out", out, "--device", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "finish", interrupt)
        assert predict(run, *words) == 130
    partial = Path(f"{out}.partial")
    cause = f"cannot resume '{partial}': it was begun with other"
    assert f"{cause} --top-k;" in refusal("predict", run, "--top-k", 1, *words)
    assert f"{cause} images;" in refusal("predict", run, photos / "val", *words)
    partial.write_text(partial.read_text().replace('"weights": "', '"weights": "0'))
    assert f"{cause} weights;" in refusal("predict", run, *words)
    assert predict(run, *words, "--fresh") == 0


def test_unreadable_files_are_rows_with_an_error(run, photos, tmp_path, capsys):
    good = photos / "val/ant/12.jpg"
    (tmp_path / "cut.jpg").write_bytes(good.read_bytes()[:900])
    (tmp_path / "gone.jpg").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.jpg")  # which nobody writes to
    out = tmp_path / "x.csv"
    words = (good, tmp_path / "cut.jpg", tmp_path / "gone.jpg", good, tmp_path / "pipe.jpg")
    assert predict(run, *words, "--out", out, "--workers", "1") == 0
    rows = rows_of(out)
    assert "truncated" in rows[1]["error"]
    assert rows[2]["error"] == "No such file or directory"
    assert rows[1]["label"] == rows[2]["probability_1"] == ""
    assert rows[4]["error"] == "not a plain file"
    assert rows[0] == rows[3]
    assert rows[0]["label"] in ("ant", "bee")
    assert capsys.readouterr().err.startswith("3 of 5 files cannot be read; the column `error` of")
    assert predict(run, tmp_path / "cut.jpg") == 1
    assert "cut.jpg  cannot be read: image file is truncated" in capsys.readouterr().out
    assert predict(run, *words, "--out", tmp_path / "x.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == [row["error"] or None for row in rows]
    assert lines[1]["label"] is None
    assert lines[0]["top"][0]["label"] == lines[0]["label"] == rows[0]["label"]
    assert lines[0]["top"][0]["probability"] == float(rows[0]["probability"])


def test_hostile_names_break_no_file_and_no_screen(run, photos, tmp_path, capsys):
    folder = tmp_path / "names"
    folder.mkdir()
    for name in HOSTILE:
        shutil.copy(photos / "val/ant/12.jpg", os.fsdecode(os.fsencode(folder) + b"/" + name))
    assert predict(run, folder) == 0
    said = capsys.readouterr().out
    assert predict(run, folder, "--out", tmp_path / "x.csv") == 0
    for text in (said, (tmp_path / "x.csv").read_text(encoding="utf-8").partition("\n")[2]):
        assert text.count("\n") == len(HOSTILE)
        assert all(line.isprintable() for line in text.splitlines())
    names = {Path(row["path"]).name for row in rows_of(tmp_path / "x.csv")}
    assert names == {r"a\nb.jpg", 'q",.jpg', r"\x1b[2J.jpg", r"\xff.jpg", "é 名.jpg", " .jpg"}
    classes, file = ("=HYPERLINK(1)", "-1", "@x", 'a,"b', "\x1b[2J"), io.BytesIO()
    top = [{"label": name, "probability": 1e-12} for name in classes]
    output.write_csv([{"path": "=x.jpg", **top[0], "top": top, "error": None}], file, 5)
    (cells,) = list(csv.reader(file.getvalue().decode().splitlines()))[1:]
    assert cells[:2] == ["./=x.jpg", "'=HYPERLINK(1)"]  # formulas that no spreadsheet runs
    assert cells[3::2] == ["'=HYPERLINK(1)", "-1", "'@x", 'a,"b', r"\x1b[2J", ""]
    assert cells[12] == "1e-12"


def listed(*paths, stdin=b"", separator=b"\n"):
    """The files that a command line names."""
    files = images.list_files([str(path) for path in paths], io.BytesIO(stdin), separator)
    return [files.relative(index) for index in range(len(files))]


def test_folders_patterns_and_lists_give_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/2.jpg", "a/10.PNG", "a/x.txt", "a/.3.jpg", "a-b/1.jpg", "a/b/4.jpg", "=5.jpg"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    Path("a/[1].jpg").touch()
    Path("a/b/loop").symlink_to("..")
    Path("a/b/loop2").symlink_to(".")
    inside = [b"a/10.PNG", b"a/2.jpg", b"a/[1].jpg", b"a/b/4.jpg"]
    assert listed("a") == listed("a/**") == inside
    assert listed("./a/") == [b"./" + name for name in inside]
    assert listed("**/*.jpg") == [b"=5.jpg", b"a-b/1.jpg", *inside[1:]]
    assert listed(f"{tmp_path}/**/b/*") == [os.fsencode(tmp_path) + b"/a/b/4.jpg"]
    named = [b"a/[1].jpg", b"a/x.txt", b"a/2.jpg", b"a/2.jpg"]  # a name comes before a pattern
    assert listed(*map(os.fsdecode, named)) == named
    assert listed("-", stdin=b"b.jpg\n\na\xff.jpg") == [b"b.jpg", b"a\xff.jpg"]
    assert listed("-", stdin=b"a\nb.jpg\0c\0", separator=b"\0") == [b"a\nb.jpg", b"c"]
    Path("none").mkdir()
    for path, expected in (("nowhere", "no file or folder 'nowhere'"), ("none", "no images: name")):
        with pytest.raises(UserError, match=expected):
            listed(path)


def test_a_mistake_is_answered_in_one_line(run, photos, tmp_path, refusal):
    (tmp_path / "there.csv").touch()
    for words, expected in (
        (["--out", "x.txt"], "'x.txt' ends in none of .csv, .jsonl"),
        (["--out", tmp_path / "there.csv"], "there.csv' exists already: --fresh replaces it"),
        (["--out", "/proc/x/y.csv"], "cannot write '/proc/x/y.csv.partial'"),
        (["--top-k", "0"], "--top-k 0 is not in 1 .. "),
        (["nowhere"], "there is no file or folder 'nowhere'"),
    ):
        assert expected in refusal("predict", run, photos, *words)
    assert "there is no checkpoint" in refusal("predict", tmp_path, photos)
