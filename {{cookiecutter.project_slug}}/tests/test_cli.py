"""The command line: quick to answer, one line for a mistake, the same run however it is started."""

import gzip
import inspect
import json
import platform
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import is_dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
from conftest import SMOKE, after_each_step, options_of
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from image_classifier import train
from image_classifier.cli import commands, main
from image_classifier.presets import PRESETS, smoke
from image_classifier.runtime import profiler as profiling
from image_classifier.runtime.command_line import summary
from image_classifier.runtime.config_dict import (
    flatten,
    unflatten,
)

PROJECT = Path(__file__).parent.parent


def test_help_comes_at_once_and_names_presets_and_knobs(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", PROJECT / "train.py", "--help"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert " torch" not in done.stderr  # which takes seconds
    columns = set()
    for name, preset in PRESETS.items():
        (found,) = re.findall(rf"^  {name} +(?={re.escape(summary(preset))}$)", done.stdout, re.M)
        columns.add(len(found))
    assert columns == {len(max(PRESETS, key=len)) + 4}


def comments(kind: type, prefix: str = "") -> dict[str, str]:
    """The comment of each option, by its flag or, where it has none, by what stands for it."""
    source = "".join(inspect.getsource(owner) for owner in reversed(kind.__mro__[:-1]))
    found = {}
    for name, first, below in re.findall(
        r"^    (\w+): [^#\n]*(?:# (.*))?((?:\n    # .*)*)", source, re.MULTILINE
    ):
        section = get_type_hints(kind)[name]
        if is_dataclass(section):
            found |= comments(section, f"{prefix}{name}.")
        else:
            knob = {"run": "RUN", "paths": "PATH", "runs": "RUNS"}.get(name)
            knob = knob or f"--{prefix}{name}".replace("_", "-")
            found[knob] = " ".join([first, *re.findall("# (.*)", below)]).strip()
    return found


@pytest.mark.parametrize("verb", commands())
def test_the_help_of_an_option_is_the_whole_of_its_comment(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sort-photos"])
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert said.startswith(f"usage: sort-photos {verb} ")
    expected = comments(options_of(verb))
    assert len(expected) >= 1
    for option, comment in expected.items():
        assert comment, option
        about = rf" {option}\b" + r".{0,90}? " + re.escape(comment) + r" \((default|required)\b"
        assert re.search(about, said), option
    assert unflatten(flatten(smoke())) == smoke()  # what was done to show help changes no type


def test_the_bare_command_says_what_to_type_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sort-photos"])
    assert main([]) == 0
    said = capsys.readouterr().out
    first = re.findall(r"^  (sort-photos train.*?)  ", said, re.MULTILINE)
    assert [words.split()[1:] for words in first] == [["train"], ["train", "--data.root", "photos"]]
    assert re.findall(r"^  ([\w-]+)  ", said, re.MULTILINE)[-len(commands()) :] == list(commands())


@pytest.mark.parametrize("is_installed", [False, True])
def test_the_version_is_that_of_the_project(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = SimpleNamespace(name="photo-sorter", version="1.2.3")
    script = SimpleNamespace(module=main.__module__, dist=mine)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [script] * is_installed)  # noqa: ARG005
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sort-photos"])
    others = f"; torch {metadata.version('torch')}; Python {platform.python_version()}\n"
    for words in (["--version"], ["train", "--version"]):
        assert main(words) == 0
        known = "photo-sorter 1.2.3" if is_installed else "sort-photos, not installed"
        assert capsys.readouterr().out == known + others


MISTAKES = {
    "smok": "no preset 'smok'; there are: smoke",
    "smoke --optim.lrr 1": "did you mean --optim.lr?",
    "smoke --data photos": "did you mean --data.name?",
    "smoke --optimizer adamw": "did you mean --optim.name?",
    "smoke --lr 1": "did you mean --optim.lr?",
    "smoke -lr 1": "did you mean --optim.lr?",
    "smoke --batch_size=9": "did you mean --data.batch-size?",
    "smoke --no-compile": "did you mean --compute.no-compile?",
    "smoke --epoch 3": "did you mean --epochs?",
    "smoke --pretrained": "there is no --pretrained\n",
    "smoke folder": "values follow their flags; unexpected: folder",
    "smoke --data.root photos": "'photos': the dataset shapes is drawn and reads no files",
    "smoke --optim.name sdg": "'sgd', 'adamw', 'muon'",
    "smoke --epochs many": "--epochs",
    "smoke --epochs -1": "--epochs -1 is not in",
    "smoke --model.name resnt18": "did you mean resnet18",
    "smoke --data.batch-size 961": "more than there are training images: 960",
    "smoke --data.batch-size 10 --optim.accumulate 3": "take 9 or 12",
    "smoke --data.where device --augment.policy randaugment": "--data.where auto or stream",
    "smoke --epochs inf": "--epochs inf is not in",
    f"smoke --data.limit 1{'0' * 400}": "00 is not in 0 .. 1e+09",
    "smoke --model.name vit_b_32 --data.image-size 40": "vit_b_32 can't take images of",
    "smoke --optim.warmup-epochs 9": "longer than the run: --epochs 3; about 0.6 is usual",
    "smoke --optim.frozen-epochs 1": "on top of pretrained weights: --run.init-from",
    "smoke --augment.mixup 0.2 --data.batch-size 15": "an even number",
    "smoke --precision fp16 --compute.device cpu": "bf16 or fp32",
    "smoke --run.dir /proc/nowhere": "cannot write to the run folder '/proc/nowhere'",
    "smoke --run.init-from nowhere.pt": "no checkpoint 'nowhere.pt'",
    "folder --data.root nowhere": "--data.root 'nowhere': there is no such folder",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("error: ")
    assert MISTAKES[words] in said
    assert not any(tmp_path.iterdir())


MISSING = {
    "evaluate": "RUN",
    "predict --top-k 3": "RUN",
    "predict runs/a --top-k 3": "PATH",
    "export": "RUN",
    "compare": "RUNS",
}


@pytest.mark.parametrize("words", [words for words in MISSING if words.split()[0] in commands()])
def test_a_word_that_is_missing_is_named_with_an_example(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sort-photos"])
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    verb, missing = words.split(maxsplit=1)[0], MISSING[words]
    assert said.startswith(
        f"error: sort-photos {verb}: {missing} is missing ({'run ' * ('R' in missing)}"
    )
    assert f"; for example: sort-photos {verb} runs/" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "preset", "root"),
    [
        ("", "shapes", "data"),
        ("--epochs 9 --data.root=photos", "folder", "photos"),
        ("--data.name=cifar10 --data.root photos", "shapes", "photos"),
        ("finetune --data.root photos", "finetune", "photos"),
    ],
)
def test_whoever_gives_a_folder_means_the_images_in_it(
    words: str, preset: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setattr(train, "train", begun.append)
    assert main(["train", *words.split()]) == 0
    assert begun[0].data.root == root
    assert begun[0].model == PRESETS[preset]().model
    assert begun[0].data.batch_size == PRESETS[preset]().data.batch_size


def test_a_bad_image_stops_the_run_with_its_name(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, "photos")
    Path("photos/train/ant/4.jpg").write_bytes(b"<html>")
    words = "--data.root photos --data.image-size 32 --data.batch-size 4 --model.name resnet9"
    reason = "not a JPEG, PNG, WEBP, BMP, GIF, TIFF file"
    for workers in ("0", "1"):
        assert main(["train", *words.split(), "--data.workers", workers]) == 2
        said = capsys.readouterr().err
        assert said == f"error: cannot read image 'photos/train/ant/4.jpg': {reason}\n"


def test_evaluate_repeats_the_result_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMOKE.split()]) == 0
    rows = map(json.loads, Path("runs/smoke/metrics.jsonl").read_text().splitlines())
    best = max(row["val/top1"] for row in rows if "val/top1" in row)
    capsys.readouterr()
    assert main(["evaluate", "runs/smoke"]) == 0
    assert f"top-1 {best:.2%}" in capsys.readouterr().out
    assert main(["evaluate", "runs/smoke", "--split", "test"]) == 0
    assert main(["evaluate", "runs/nowhere"]) == 2


def test_a_run_folder_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "SKIPPED_STEPS", 2)
    monkeypatch.setattr(profiling, "RECORDED_STEPS", 1)  # as each takes half a second to write
    monkeypatch.setenv("WANDB_API_KEY", "planted")
    after_each_step(monkeypatch, lambda _, loss: loss.item())  # which waits for the device
    words = "smoke --data.limit 96 --data.batch-size 24 --epochs 2 --profile"
    assert main(["train", *words.split()]) == 0
    folder = Path("runs/smoke")
    for path in folder.rglob("*.*"):
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            assert b"planted" not in file.read(), path
    config = unflatten(json.loads((folder / "config.json").read_text()))
    assert config.data.limit == 96
    environment = json.loads((folder / "environment.json").read_text())
    assert environment.keys() >= {"torch", "device", "threads", "commit"}
    (events,) = (folder / "tensorboard").glob("events*")  # one run, with all that belongs to it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own
        values = [v for event in EventFileLoader(str(events)).Load() for v in event.summary.value]
    assert {"train/loss", "val/top1", "confusion"} <= {value.tag for value in values}
    plugins = {value.metadata.plugin_data.plugin_name for value in values}
    assert {"scalars", "images", "hparams"} <= plugins
    assert (folder / "profile" / "trace.json.gz").stat().st_size > 1000
    said = capsys.readouterr().out
    assert all(f"  {phase} " in said for phase in ("wait for data", "forward", "optimizer"))
    assert re.search(r"wait for the device in a step:\n(  .*\n)*  1 x test_cli\.py:\d+ in", said)
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-2])
    assert row.keys() >= {"step", "epoch", "train/loss", "train/images_per_second", "train/mfu"}
    assert re.search(r"an image: [\d.]+ GFLOP forward", said)
    assert re.search(r"is the limit: .* MFU \d+%\.", said)
    page = folder / "report.html"  # `tools/report` may be deleted
    assert not page.exists() or "MFU" in page.read_text()


def test_a_config_survives_being_written_down() -> None:
    for preset in PRESETS.values():
        assert unflatten(json.loads(json.dumps(flatten(preset())))) == preset()
