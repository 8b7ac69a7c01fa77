"""The command line: quick to answer, one line for a mistake, the same run however it is started."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import changed, described_commands, logged, options_of

from image_classifier import train
from image_classifier.cli import commands, main
from image_classifier.config import Config
from image_classifier.errors import UserError
from image_classifier.presets import PRESETS, smoke
from image_classifier.runtime.command_line import (
    check_flags,
    summary,
    take_preset,
    value_of,
)
from image_classifier.runtime.config_dict import flatten, unflatten


def test_help_comes_at_once_and_names_presets(tmp_path):
    words = [sys.executable, "-X", "importtime", Path(__file__).parents[1] / "train.py", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert " torch" not in done.stderr  # which takes seconds
    for name, preset in PRESETS.items():
        assert re.search(rf"\n  {name} +{re.escape(summary(preset))}\n", done.stdout)


@pytest.mark.parametrize("verb", described_commands())
def test_the_help_of_an_option_is_the_whole_of_its_comment(verb, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sort-photos"])
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    said = re.sub(r"[\s│╭╮╰╯─]", "", capsys.readouterr().out)  # lines break within words, too
    assert said.startswith(f"usage:sort-photos{verb}")
    kind = options_of(verb)
    kinds = [kind, *(option.type for option in fields(kind) if is_dataclass(option.type))]
    # Python 3.13 finds no source of a class that `section` made.
    owners = (owner for kind in kinds for owner in kind.__mro__)
    source = "".join(map(inspect.getsource, filter(inspect.get_annotations, owners)))
    found = re.findall(r"^    (\w+): [^#\n]*# (.*(?:\n    # .*)*)", source, re.MULTILINE)
    assert found
    for name, comment in found:
        about = re.escape(re.sub(r"\n    #|\s", "", comment))
        knob = rf"({name.upper()}|--[a-z.]*{name.replace('_', '-')})"
        assert re.search(knob + ".{0,90}?" + about + r"\((default|required)", said), name


def test_the_bare_command_says_what_to_type_first(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sort-photos"])
    assert main([]) == 0
    said = capsys.readouterr().out
    first = re.findall(r"^  sort-photos (train.*?)  ", said, re.MULTILINE)
    assert first == ["train", "train --data.root photos"]
    assert re.findall(r"^  ([\w-]+)  ", said, re.MULTILINE) == list(commands())


@pytest.mark.parametrize("words", ["--version", "train --version"])
def test_the_version_is_that_of_the_project(words, monkeypatch, capsys):
    mine = SimpleNamespace(name="photo-sorter", version="1.2.3")
    script = SimpleNamespace(module=main.__module__, dist=mine)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [script])
    assert main(words.split()) == 0
    said = f"photo-sorter 1.2.3; torch {metadata.version('torch')}; Python "
    assert capsys.readouterr().out.startswith(said)


def test_a_command_behind_train_py_is_shown_as_it_is_called(refusal, monkeypatch):
    verb = next((verb for verb in commands() if verb != "train"), None)
    if verb is None:
        pytest.skip("there is no command but train")
    script = SimpleNamespace(module=main.__module__, name="photo-sorter")
    for scripts, name in ([script], "photo-sorter"), ([], "the command line that pyproject"):
        monkeypatch.setattr(metadata, "entry_points", lambda found=scripts, **_: found)
        said = refusal("train", verb, "runs/folder")
        assert said.startswith(f"error: {verb} is a command of its own: {name}")


BEGINNING = """
import builtins, sys
from image_classifier.cli import main

real, first = print, []
builtins.print = lambda *words, **more: (first.append("torch" in sys.modules), real(*words, **more))
assert main("train smoke --run.processes 1 --data.limit 192 --epochs 1".split()) == 0
assert first[0] is False, "nothing was printed before torch was imported"
assert "torch._dynamo" not in sys.modules, "the tracer of torch.compile was imported"
"""


def test_a_run_begins_quickly(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", BEGINNING], cwd=tmp_path, env=environment, check=True)


MISTAKES = {
    "trian": "no command 'trian'; there are: train",
    "train smok": "no preset 'smok'; there are: smoke",
    "train smoke --optimizer adamw": "did you mean --optim.name?",
    "train smoke -lr 1": "did you mean --optim.lr?",
    "train smoke --batch_size=9": "did you mean --data.batch-size?",
    "train smoke --no-compile": "did you mean --compute.no-compile?",
    "train smoke --pretrained": "torchvision has no weights of resnet9_gn; give the file",
    "train smoke folder": "values follow their flags; unexpected: folder",
    "train smoke --optim.name sdg": "no optimizer 'sdg'; there are: sgd, adamw",
    f"train smoke --data.limit 1{'0' * 400}": "00 is not in 0 .. 1e+09",
    "train smoke --model.name resnt18": "did you mean resnet18",
    "train smoke --run.trackers outo": "did you mean auto?",
    "train smoke --model.pretrained": "did you mean --pretrained?",
    "train smoke --data.batch-size 961": "images: 960; take --data.batch-size 480",
    "train smoke --data.limit 8": "96 is more than there are training images: 8; take ",
    "train smoke --data.batch-size 10 --optim.accumulate 3": "should be a multiple of 3: ",
    "train smoke --optim.warmup-epochs 9": "longer than the run: --epochs 3; about 0.6 is usual",
    "train smoke --epochs 0": "trains only the last layer, on top of pretrained weights: ",
    "train smoke --precision fp16 --compute.device cpu": "bf16 or fp32",
    "train smoke --run.dir /proc/nowhere": "cannot write to the run folder '/proc/nowhere'",
    "train smoke --run.init-from nowhere.pt": "no checkpoint 'nowhere.pt'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line(words, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sort-photos"])
    said = refusal(*words.split())
    assert said.startswith("error: ")
    assert MISTAKES[words] in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["--pretrained", "--epochs", "--optim.lr", "--no-deterministic"])
def test_a_command_that_lacks_an_option_of_train_says_who_has_it(name):
    with pytest.raises(UserError, match=rf"^there is no {name}; `train` has it$"):
        check_flags([name, "1"], ["top"])


def test_without_docstrings_the_commands_are_there(monkeypatch, capsys):
    for verb in commands().values():  # as `python -OO` and PYTHONOPTIMIZE=2 leave them
        monkeypatch.setattr(verb, "__doc__", None)
    assert main([]) == 0
    assert "\n  train" in capsys.readouterr().out


def test_whoever_gives_a_folder_means_the_images_in_it(monkeypatch):
    begun = []
    monkeypatch.setattr(train, "train", begun.append)
    for words, preset, root in (
        ("", "shapes", "data"),
        ("--epochs 9 --data.root=photos", "finetune", "photos"),
        ("--data.name=shapes --data.root photos", "shapes", "photos"),
        ("folder --data.root photos", "folder", "photos"),
    ):
        assert main(["train", *words.split()]) == 0
        config, (_, expected) = begun.pop(), take_preset([preset], "")
        assert (config.data.root, config.model) == (root, expected.model)
        assert config.data.batch_size == expected.data.batch_size


def test_a_run_folder_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "smoke", "--data.limit", "192", "--optim.lr", "0.0123456789"]) == 0
    folder = Path("runs/smoke")
    config = changed(smoke(), data__limit=192, optim__lr=0.0123456789, run__dir="runs/smoke")
    saved = json.loads((folder / "config.json").read_text())
    assert unflatten(saved) == changed(config, run__best_by="top1")  # what auto became
    environment = json.loads((folder / "environment.json").read_text())
    assert environment.keys() >= {"torch", "simplejpeg", "device", "driver", "threads", "commit"}
    for library in ("numpy", "pillow", "torchvision"):
        assert environment[library] == metadata.version(library)
    assert logged(folder)[-2].keys() >= {"step", "epoch", "train/loss", "train/images_per_second"}


def test_values_that_look_like_flags_are_values_when_a_config_is_read_again():
    config = changed(Config(), run__dir="-run", data__root="--help-me")
    assert unflatten(flatten(config)) == config


def test_of_a_flag_that_is_given_twice_the_last_counts():
    assert value_of(["--epochs", "3", "--epochs=5"], "--epochs") == "5"
