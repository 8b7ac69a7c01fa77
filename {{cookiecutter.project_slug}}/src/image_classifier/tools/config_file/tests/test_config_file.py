"""A file of options lies between the preset and the flags; a run's config.json repeats it."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import SMOKE, losses

from image_classifier import train
from image_classifier.cli import main
from image_classifier.config import Config, ImagesConfig
from image_classifier.runtime.command_line import (
    parse,
    take_preset,
)
from image_classifier.runtime.config_dict import (
    MOVED,
    changed_knobs,
    flatten,
    to_save,
    words_of,
)
from image_classifier.tools.config_file.presets import again

OWN = """
epochs = 2
run.trackers = []
[data]
limit = 192
[optim]
lr = 0.25
warmup-epochs = 0.5
"""
YAML = """
epochs: 2
run.trackers: []
data: {limit: 192}
optim: {lr: 25e-2, warmup_epochs: 0.5}
"""
OWN_JSON = {"epochs": 2, "run": {"trackers": []}, "data.limit": 192}
OWN_JSON |= {"optim": {"lr": 0.25, "warmup_epochs": 0.5}}


@dataclass
class DataOptions:
    """The options of a command that reads images and trains nothing."""

    data: ImagesConfig = field(default_factory=ImagesConfig)
    json: str = ""  # a file


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def begun(monkeypatch):
    """A function from the words of `train` to the config of the run that would begin."""
    configs = []
    monkeypatch.setattr(train, "train", configs.append)

    def config_of(words):
        assert main(["train", *words.split()]) == 0
        return configs.pop()

    return config_of


@pytest.mark.parametrize("name", ["mine.toml", "mine.yaml", "mine.json"])
def test_flags_win_over_the_file_and_the_file_over_the_preset(name, begun):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    texts = {"toml": OWN, "yaml": YAML, "json": json.dumps(OWN_JSON)}
    # With the mark that editors on Windows write in front.
    Path(name).write_text(texts[name.partition(".")[2]], encoding="utf-8-sig")
    found = begun(f"smoke --data.limit 96 --config {name} --seed 3")
    given = "smoke --epochs 2 --run.trackers --optim.lr 0.25 --optim.warmup-epochs 0.5 --seed 3"
    assert found == begun(f"{given} --data.limit 96 --run.dir runs/mine")
    assert begun(f"smoke --config={name} --run.dir a").data.limit == 192


def test_what_contradicts_in_a_file_may_be_mended_by_a_flag(begun):
    Path("mine.toml").write_text("epochs = 2\noptim.warmup_epochs = 5")
    assert begun("smoke --config mine.toml --optim.warmup-epochs 1").optim.warmup_epochs == 1


def test_without_a_preset_the_file_chooses_as_its_flags_would(begun):
    Path("mine.toml").write_text("epochs = 2\ndata.root = 'photos'")
    given = begun("--epochs 2 --data.root photos --run.dir runs/mine")
    assert begun("--config mine.toml") == given
    assert given.optim == begun("finetune --epochs 2").optim
    assert begun("folder --config mine.toml").augment == begun("folder").augment


def test_the_config_of_a_run_is_whole_and_names_another_run(begun):
    words = "folder --data.limit 64 --augment.tta flip --run.dir runs/a --run.fresh"
    config = begun(words)
    saved = to_save(config)
    saved.pop("augment.policy", None)  # as of a run without one, whatever the preset has
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.json").write_text(json.dumps(saved))
    usual = flatten(Config())
    expected = flatten(config) | {"run.dir": "runs/a-again", "run.fresh": False}
    if "augment.policy" in usual:
        expected |= {"augment.policy": usual["augment.policy"]}
    for given in ("", "smoke "):
        assert flatten(begun(f"{given}--config runs/a/config.json")) == expected
    assert flatten(begun("--config runs/a")) == expected
    assert take_preset(["--config", "runs/a"], "shapes")[0] == "folder"  # the closest
    assert begun("--config runs/a --data.limit 7").data.limit == 7


def test_each_repetition_of_a_run_has_a_folder_of_its_own():
    for name, following in (
        ("a", "a-again"),
        ("a-again", "a-again-2"),
        ("a-again-9", "a-again-10"),
    ):
        assert again(Path("runs", name)) == following
        assert again(Path("runs", name, "config.json")) == following


def test_an_old_config_is_read_without_what_it_did_not_use(begun, monkeypatch, refusal):
    monkeypatch.setitem(MOVED, "data.gone", "stop")  # of a tool that is not here
    old = to_save(begun("smoke")) | {"data.on_bad_image": "stop", "optim.teacher": ""}
    old |= {"model.head": "last", "data.columns": [], "data.gone": "stop"}
    del old["compute.gradient_dtype"]
    del old["run.max_minutes"]
    Path("old.json").write_text(json.dumps(old))
    found = begun("--config old.json")
    assert flatten(found) == flatten(begun("smoke")) | {"run.dir": "runs/old-again"}
    Path("old.json").write_text(json.dumps(old | {"data.gone": "skip"}))
    assert "'old.json': there is no --data.gone" in refusal("train", "--config", "old.json")


def test_a_command_takes_those_options_of_the_file_that_it_has():
    Path("mine.toml").write_text("data.root = 'photos'\noptim.lr = 0.25")
    words = ["--config", "mine.toml", "--json", "a.json"]
    take_preset(words, "smoke", kind=DataOptions)
    assert words == ["--data.root", "photos", "--json", "a.json"]


def test_runs_that_a_command_starts_have_the_options_of_the_file():
    Path("mine.toml").write_text(OWN)
    words = ["--config", "mine.toml"]
    name, preset = take_preset(words, "smoke", "runs/repeat/{}")
    assert preset.run.dir == "runs/repeat/mine"
    config = parse(Config, words, prog="", about="", default=preset)
    started = [name, *words_of(changed_knobs(config, preset))]  # by their words alone
    _, preset = take_preset(started, "", "runs/repeat/mine")
    assert parse(Config, started, prog="", about="", default=preset) == config


MISTAKES = {
    ("a.toml", "[optim]\nlrr = 0.3"): "there is no --optim.lrr; did you mean --optim.lr?",
    ("a.toml", "lr = 0.3"): "there is no --lr; did you mean --optim.lr?",
    ("a.toml", '[optim]\nlr = "high"'): "--optim.lr: could not convert string to float: 'high'",
    ("a.toml", "x =="): "is not TOML: Invalid value (at line 1, column 4)",
    ("a.toml", '[run]\ndir = "b"'): "run.dir belongs on the command line",
    ("a.toml", 'config = "b.toml"'): "config belongs on the command line",
    ("a.json", "{"): "is not JSON",
    ("a.json", "[1]"): "holds no options by name, such as {'optim.lr': 0.3}",
    ("a.json", "[" * 100_000): "is not JSON",
    ("a.json", '{"optim.lr": -1}'): "--optim.lr -1 is not in 0 .. 1e+09",
    ("a.json", '{"optim.lr": NaN}'): "--optim.lr nan is not in 0 .. 1e+09",
    ("a.json", '{"optim.lr": true}'): "optim.lr should be a number or a word, not of type bool",
    ("a.json", '{"data": {"name": {"x": 1}}}'): "data.name should be a number or a word, not of",
    ("a.json", '{"deterministic": "yes"}'): "deterministic should be true or false, not of type",
    ("a.json", '{"run.trackers": "wandb"}'): "run.trackers should be a list of words",
    ("a.json", '{"run.trackers": ["--run.fresh"]}'): "should be a list of words that are no flags",
    ("a.json", '{"data.batch_size": 96.5}'): "--data.batch-size: invalid literal for int()",
    ("a.json", '{"optim.schedule": "fast"}'): "Expected one of ('cosine', 'linear')",
    ("a.json", '{"help": true}'): "there is no --help",
    ("a.json", '{"a b": 1}'): "unexpected: --a b",
    ("a.json", b"\xff\xfe"): "is not JSON",
    ("a.ini", ""): "should be called *.json, *.toml, *.yaml, *.yml",
    ("b.toml", None): "cannot read the config file 'b.toml': No such file or directory",
}


@pytest.mark.parametrize(("name", "text"), MISTAKES)
def test_a_mistake_in_a_file_is_answered_in_one_line_that_names_it(name, text, refusal, tmp_path):
    if text is not None:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refusal("train", "smoke", "--config", name)
    assert f"'{name}'" in said
    assert MISTAKES[name, text] in said
    assert len([*tmp_path.iterdir()]) == (text is not None)


def test_two_files_are_refused(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.toml", "b.toml"):
        Path(name).write_text("[optim]\nlr = 0.3")
    said = refusal("train", "smoke", "--config", "a.toml", "--config", "b.toml")
    assert "--config is one file, not 2" in said


def test_a_yaml_file_runs_no_code(refusal):
    pytest.importorskip("yaml")
    Path("a.yaml").write_text("data.name: !!python/object/apply:os.mkdir [ran]")
    assert "is not YAML: could not determine a constructor" in refusal(
        "train", "smoke", "--config", "a.yaml"
    )
    assert not Path("ran").exists()


def test_yaml_says_which_library_it_needs(refusal, monkeypatch):
    Path("a.yaml").write_text("epochs: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "YAML needs a library: " in refusal("train", "smoke", "--config", "a.yaml")
    assert "--config needs a file" in refusal("train", "smoke", "--config")


def test_a_run_is_repeated_from_its_config(tmp_path):
    assert main(["train", *SMOKE.split(), "--run.dir", "runs/a"]) == 0
    assert main(["train", "--config", "runs/a/config.json"]) == 0
    assert losses("runs/a-again") == losses("runs/a")
    assert main(["train", "--config", "runs/a", "--seed", "1", "--run.dir", "runs/b"]) == 0
    assert losses("runs/b") != losses("runs/a")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"a", "a-again", "b"}
