"""`predict` gives the predictions of an evaluation, in a file that resumes after a kill."""

import csv
import io
import json
import os
import shutil
import sys
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import changed

from image_classifier.cli import main
from image_classifier.config import ComputeConfig
from image_classifier.data.loader import EvalData
from image_classifier.errors import UserError
from image_classifier.evaluate import (
    LoadedModel,
    evaluate_run,
    load_model,
    predict_logits,
)
from image_classifier.presets import smoke
from image_classifier.runtime.distributed import World, join_world
from image_classifier.tools.predict import images, output
from image_classifier.tools.predict import predict as predicting
from image_classifier.train import train

HOSTILE = [b"a\nb.jpg", b'q",.jpg', b"\x1b[2J.jpg", b"\xff.jpg", "é 名.jpg".encode(), b" .jpg"]


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that has learned little."""
    folder = str(tmp_path_factory.mktemp("predict") / "run")
    data = {"data__name": "folder", "data__root": str(photos), "data__limit": 0}
    data |= {"data__batch_size": 4, "data__workers": 0, "augment__tta": "flip"}
    config = changed(smoke(), epochs=1, optim__warmup_epochs=0, **data)
    train(changed(config, run__dir=folder, run__trackers=()))
    return folder


@pytest.fixture(autouse=True)
def quick_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open a model once."""
    monkeypatch.setattr(predicting, "load_model", open_once)


@cache
def opened(run: str, compute: ComputeConfig) -> LoadedModel:
    """A model that most tests share: opening it takes longer than using it."""
    return load_model(run, compute, World(torch.device("cpu")))


def open_once(run: str, compute: ComputeConfig, _: World) -> LoadedModel:
    """A model as `load_model` gives it."""
    trained = opened(run, compute)
    return replace(trained, normalize=copy(trained.normalize))


def predict(run: str, *words: object) -> int:
    """The exit code of the command `predict`, four images at a time."""
    text = [str(word) for word in words]
    workers = [] if "--workers" in text else ["--workers", "0"]
    return main(["predict", run, *text, "--batch-size", "4", "--device", "cpu", *workers])


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_predictions_are_those_of_an_evaluation(run: str, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert predict(run, photos / "val", "--out", out, "--workers", 2) == 0
    with join_world(ComputeConfig(device="cpu")) as world:
        trained = open_once(run, ComputeConfig(device="cpu"), world)
        data = EvalData(trained.config.data, "val", world)
        with torch.inference_mode():
            model = trained.model, trained.normalize, trained.precision
            logits = [predict_logits(model[0], b.images, *model[1:]) for b in data.batches()]
        expected = torch.cat(logits).softmax(1)
        assert trained.normalize.tta == "flip"
    rows = rows_of(out)
    assert [row["path"] for row in rows] == [str(data.source.paths[n]) for n in range(4)]
    for row, shares in zip(rows, expected, strict=True):
        found = {row[f"class_{n}"]: float(row[f"probability_{n}"]) for n in (1, 2)}
        assert [found[name] for name in ("ant", "bee")] == pytest.approx(shares.tolist(), abs=1e-6)
        assert (row["label"], float(row["probability"])) == max(found.items(), key=lambda x: x[1])
    right = sum(Path(row["path"]).parent.name == row["label"] for row in rows)
    assert right / 4 == evaluate_run(run, "val", "", ComputeConfig(device="cpu")).top1
    assert predict(run, photos / "val", "--out", out, "--tta", "none", "--fresh") == 0
    assert rows_of(out) != rows


def interrupt(*_: object, **__: object) -> None:
    """Ctrl-C, in place of a function."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_killed_command_resumes_to_the_same_bytes(
    kind: str,
    *,
    run: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    out, partial = tmp_path / f"x.{kind}", tmp_path / f"x.{kind}.partial"
    words = (photos / "train", photos / "val/ant", "--out", out, "--tta", "none")  # 14 images
    assert predict(run, *words) == 0
    whole = out.read_bytes()
    assert sorted(tmp_path.iterdir()) == [out]
    (tmp_path / f".x.{kind}.0123abcd.tmp").touch()  # of a command that was killed at its end
    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "finish", interrupt)
        assert predict(run, *words, "--fresh") == 130
    assert f"x.{kind}.partial' is kept; run the same command" in capsys.readouterr().err
    assert out.read_bytes() == whole  # until the new one is complete
    head, *rows = partial.read_bytes().splitlines(keepends=True)
    for damage, num_kept in ((b"", 12), (rows[10][:-9], 8), (b"{}\n", 8), (b"\0\0\0", 8)):
        partial.write_bytes(b"".join([head, *rows[: 10 if damage else 14], damage]))
        assert predict(run, *words) == 0
        assert f"{num_kept} of 14 rows are there" in capsys.readouterr().out
        assert out.read_bytes() == whole
        assert sorted(tmp_path.iterdir()) == [out]


def test_rows_of_another_command_are_refused(
    run: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, words = tmp_path / "x.csv", (photos / "train", "--out", tmp_path / "x.csv")
    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "finish", interrupt)
        assert predict(run, *words) == 130
    other = shutil.copytree(run, tmp_path / "other")
    weights = torch.load(other / "checkpoints/best.pt", weights_only=True)
    weights["state"]["step"] = 7
    torch.save(weights, other / "checkpoints/best.pt")
    capsys.readouterr()

    def refused(expected: str, run: str, *words: object) -> None:
        assert predict(run, *words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"cannot resume '{out}.partial': {expected}" in said
        assert "--fresh starts over" in said

    refused("it was begun with other --top-k: 2, not 1;", run, *words, "--top-k", "1")
    refused("it was begun with other images;", run, photos / "val", *words)
    refused("it was begun with other weights;", str(other), *words)
    Path(f"{out}.partial").write_text("[")
    refused("it was begun with other weights;", run, *words)
    assert predict(run, *words, "--fresh") == 0


def test_unreadable_files_are_rows_with_an_error(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = photos / "val/ant/12.jpg"
    (tmp_path / "cut.jpg").write_bytes(good.read_bytes()[:900])
    (tmp_path / "gone.jpg").symlink_to("nowhere")
    out = tmp_path / "x.csv"
    words = (good, tmp_path / "cut.jpg", tmp_path / "gone.jpg", good)
    assert predict(run, *words, "--out", out, "--workers", "1") == 0
    rows = rows_of(out)
    assert "truncated" in rows[1]["error"]
    assert rows[2]["error"] == "No such file or directory"
    assert rows[1]["label"] == rows[2]["probability_1"] == ""
    assert rows[0] == rows[3]
    assert rows[0]["label"] in ("ant", "bee")
    assert capsys.readouterr().err.startswith("2 of 4 files cannot be read; the column `error` of")
    assert predict(run, tmp_path / "cut.jpg") == 1
    assert "cut.jpg  cannot be read: image file is truncated" in capsys.readouterr().out
    assert predict(run, *words, "--out", tmp_path / "x.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == [row["error"] or None for row in rows]
    assert lines[1]["label"] is None
    assert lines[0]["top"][0]["label"] == lines[0]["label"] == rows[0]["label"]
    assert lines[0]["top"][0]["probability"] == float(rows[0]["probability"])


def test_hostile_names_break_no_file_and_no_screen(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "names"
    folder.mkdir()
    for name in HOSTILE:
        shutil.copy(photos / "val/ant/12.jpg", os.fsdecode(os.fsencode(folder) + b"/" + name))
    assert predict(run, folder) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == len(HOSTILE)
    assert all(line.isprintable() for line in said.splitlines())
    for kind in ("csv", "jsonl"):
        assert predict(run, folder, "--out", tmp_path / f"x.{kind}") == 0
    shown = sorted(name.decode("utf-8", "backslashreplace") for name in HOSTILE)
    lines = (tmp_path / "x.jsonl").read_text(encoding="ascii").splitlines()
    assert sorted(Path(json.loads(line)["path"]).name for line in lines) == shown
    text = (tmp_path / "x.csv").read_text(encoding="utf-8")
    assert text.count("\n") == 1 + len(HOSTILE)
    assert all(line.isprintable() for line in text.splitlines())
    names = {Path(row["path"]).name for row in rows_of(tmp_path / "x.csv")}
    assert names >= {r"a\nb.jpg", 'q",.jpg', r"\x1b[2J.jpg", r"\xff.jpg", "é 名.jpg", " .jpg"}


def test_a_class_is_no_formula_of_a_spreadsheet() -> None:
    classes, file = ("=HYPERLINK(1)", "-1", "@x", 'a,"b', "\x1b[2J"), io.BytesIO()
    top = [{"label": name, "probability": 1e-12} for name in classes]
    output.write_csv(iter([{"path": "x.jpg", **top[0], "top": top, "error": None}]), file, 5)
    (cells,) = list(csv.reader(file.getvalue().decode().splitlines()))[1:]
    assert cells[1] == "'=HYPERLINK(1)"
    assert cells[3::2] == ["'=HYPERLINK(1)", "-1", "'@x", 'a,"b', r"\x1b[2J", ""]
    assert cells[12] == "1e-12"


def listed(*paths: object, stdin: bytes = b"", separator: bytes = b"\n") -> list[bytes]:
    """The files that a command line names."""
    files = images.list_files([str(path) for path in paths], io.BytesIO(stdin), separator)
    return [files.relative(index) for index in range(len(files))]


def test_folders_and_patterns_give_sorted_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert listed("**/*.jpg") == [b"./=5.jpg", b"a-b/1.jpg", *inside[1:]]
    assert listed(f"{tmp_path}/**/b/*") == [os.fsencode(tmp_path) + b"/a/b/4.jpg"]
    assert listed("a*/*.jpg") == [b"a-b/1.jpg", *inside[1:3]]
    assert listed("a/[1].jpg", "a/x.txt", "a/2.jpg", "a/2.jpg") == [
        *(b"a/[1].jpg", b"a/x.txt", b"a/2.jpg", b"a/2.jpg")  # a name comes before a pattern
    ]
    Path("none").mkdir()
    for path, expected in (
        ("nowhere", "no file or folder 'nowhere'"),
        ("none", "'none': there are no images"),
        ("*/*.bmp", r"'\*/\*.bmp': there are no images; \*\*"),
        ("/dev/null", "neither a file nor a folder"),
        ("-", None),
    ):
        with pytest.raises(UserError, match=expected or "there are no images: name files"):
            listed(*(["a"] if expected else []), path)


def test_a_list_on_standard_input_is_taken_as_it_is(
    run: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listed("-", stdin=b"b.jpg\n\na\xff.jpg") == [b"b.jpg", b"a\xff.jpg"]
    assert listed("-", stdin=b"a\nb.jpg\0c\0", separator=b"\0") == [b"a\nb.jpg", b"c"]
    image = photos / "val/ant/12.jpg"
    os.mkfifo(tmp_path / "pipe.jpg")
    odd = {str(photos): "Is a directory", "/dev/zero": "not a plain file"}
    odd |= {str(tmp_path / "pipe.jpg"): "not a plain file"}  # which nobody writes to
    text = b"\0".join(map(os.fsencode, (image, *odd)))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert predict(run, "-", "--null", "--out", tmp_path / "x.csv") == 0
    errors = {row["path"]: row["error"] for row in rows_of(tmp_path / "x.csv")}
    assert errors == {str(image): ""} | odd


def test_parquet_has_the_columns_of_csv(run: str, photos: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "bad.jpg").touch()
    for kind in ("csv", "parquet"):
        assert predict(run, photos / "val", tmp_path, "--out", tmp_path / f"x.{kind}") == 0
    table = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    for row, cells in zip(table, rows_of(tmp_path / "x.csv"), strict=True):
        for name, cell in cells.items():
            if name.startswith("probability") and cell:
                assert row[name] == torch.tensor(float(cell), dtype=torch.float32).item()
            else:
                assert row[name] == (cell or None)
    assert table[-1]["error"]


def test_a_mistake_is_answered_in_one_line(
    run: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "there.csv").touch()
    for words, expected in (
        (["--out", "x.txt"], "'x.txt' ends in none of .csv, .jsonl, .parquet"),
        (["--out", "x.parquet"], "'x.parquet' needs pyarrow: pip install pyarrow"),
        (["--out", tmp_path / "there.csv"], "there.csv' exists already: --fresh replaces it"),
        (["--out", "/proc/x/y.csv"], "cannot write '/proc/x/y.csv.partial'"),
        (["--top-k", "0"], "--top-k 0 is not in 1 .. "),
        (["nowhere"], "there is no file or folder 'nowhere'"),
    ):
        assert predict(run, photos, *words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert expected in said
    assert main(["predict", str(tmp_path), str(photos)]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
