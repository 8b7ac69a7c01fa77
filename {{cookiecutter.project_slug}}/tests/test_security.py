"""Nothing that comes from outside is run: not a checkpoint, not a name, not a word of a command."""

import json
import os
import re
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import changed, write_photo
from safetensors import safe_open

from image_classifier.checkpoints import saving as checkpoint
from image_classifier.checkpoints.reading import load_best
from image_classifier.cli import commands, main
from image_classifier.config import ModelConfig
from image_classifier.errors import UserError
from image_classifier.metrics.table import scores_text
from image_classifier.models import build_model
from image_classifier.runtime.console import printable
from image_classifier.train import train

WHERE = os.mkdir.__module__


class Payload:
    """An object whose pickle makes a folder when it is read."""

    def __reduce__(self):
        return os.mkdir, ("owned",)


def by_call(path):
    torch.save({"state": {"model": Payload()}}, path)


def by_name_on_the_terminal(path):
    torch.save(Payload(), path, _use_new_zipfile_serialization=False)
    name = f"{WHERE}\nmkdir".encode()
    path.write_bytes(path.read_bytes().replace(name, b"\x1b[31mos\n\x1b[2Jmkdir"))


def bomb(path):
    torch.save({"state": torch.zeros(2)}, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x/data/9", bytes(2**22))


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("w.pt", by_call, f"objects other than tensors and plain values ({WHERE}.mkdir)"),
        ("w.pt", by_name_on_the_terminal, r"plain values (\x1b[31mos.\x1b[2Jmkdir)"),
        ("w.pt", bomb, "'w.pt' is damaged: it is compressed, as no checkpoint is"),
        ("w.safetensors", by_call, "--run.init-from 'w.safetensors': "),
        ("w.safetensors", os.mkfifo, "there is no checkpoint 'w.safetensors'"),  # nor waited for
    ],
)
def test_hostile_weights_are_refused_in_a_line(
    tmp_path, monkeypatch, refusal, *, name, write, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # torch's way to allow it
    write(Path(name))
    said = refusal("train", "smoke", "--run.init-from", name)
    assert message in said
    assert said.rstrip("\n").isprintable()
    last = Path("run/checkpoints/last.pt")
    last.parent.mkdir(parents=True)
    Path(name).rename(last)
    assert "last.pt" in refusal("train", "smoke", "--run.dir", "run")
    with pytest.raises(UserError):
        load_best(last)
    assert not Path("owned").exists()


def test_the_package_calls_nothing_that_runs_what_it_reads():
    runs = re.compile(
        r"\b(import|from) (pickle|marshal|shelve|dill|cloudpickle|joblib|yaml)\b"
        r"|(?<![\w.])(eval|exec|compile|__import__)\(|os\.(system|popen)\(|torch\.jit\.load\("
        r"|extractall|unpack_archive|urlopen|urlretrieve|load_state_dict_from_url"
        r"|shell=|weights_only=False|0\.0\.0\.0|--bind_all"
    )
    files = [*Path(checkpoint.__file__).parent.rglob("*.py")]
    texts = {path: path.read_text("utf-8") for path in files if path.parent.name != "tests"}
    assert [match for text in texts.values() for match in runs.findall(text)] == []
    loads = [path.name for path, text in texts.items() for _ in re.findall(r"torch\.load\(", text)]
    assert loads == ["reading.py"]


NAMES = ["'; mkdir owned #", "$(mkdir owned)`mkdir owned`", "{" + "{7*7}} ${a} %s {0}", "x" * 255]
CONTROLS = {  # names that move the cursor, turn text round, or are no text; and how they are shown
    b"a\r\n\x1b]0;owned\x07\x1b[2J": r"a\r\n\x1b]0;owned\x07\x1b[2J",
    "\u202egnp.exe".encode(): r"\u202egnp.exe",
    b"\xff\xfe": r"\xff\xfe",
}


def test_names_are_shown_and_reach_no_shell_and_no_terminal(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = [*NAMES, *map(os.fsdecode, CONTROLS)]
    for name in names:
        for split in ("train", "val"):
            write_photo(Path("photos", split, name, "1.jpg"), 0, size=(32, 32))
    run = "run \x1b[31m<b> $(mkdir owned)\udcff"
    config = changed(config, data__name="folder", data__root="photos", data__batch_size=len(names))
    train(changed(config, optim__warmup_epochs=0, epochs=1, run__dir=run))
    if "evaluate" in commands():  # it may be deleted
        assert main(["evaluate", run]) == 0
        assert main(["evaluate", run, "--root", "photos\x1b[2J"]) == 2
    said = capsys.readouterr()
    assert all(line.isprintable() for line in (said.out + said.err).splitlines())
    assert r"run \x1b[31m<b> $(mkdir owned)\udcff" in said.out

    best = load_best(Path(run, "checkpoints", "best.pt"))
    assert {*best.classes} == {*NAMES, *CONTROLS.values()}
    Path("best").symlink_to(best.path.with_suffix(".safetensors"))
    with safe_open("best", "pt") as weights:
        assert json.loads(weights.metadata()["about"])["classes"] == list(best.classes)
    for name in ("config.json", "environment.json", "status.json"):
        json.loads(Path(run, name).read_text())
    assert not Path("owned").exists()


def test_names_of_all_scripts_are_shown_and_nothing_moves_the_cursor():
    for text in ("日本\u3000🦊", "👩\u200d🔬", 'Zoë\'s \\ "ant"', "a\u00a0b"):
        assert printable(text) == text
    scores = {"val/top1": 1.0, "val/top5": 1.0, "val/loss": 0.0}
    classes = ("\x1b[2Jant", "bee\n\u2028")  # as a checkpoint may bring them
    text = scores_text(scores, (1.0, 0.5), classes, "top1")
    assert r"\x1b[2Jant" in text
    assert r"bee\n\u2028" in text


@pytest.mark.parametrize("name", ["list_models", "os.mkdir", "../../owned", "__loader__"])
def test_a_model_is_looked_up_in_tables_alone(name):
    with pytest.raises(UserError, match=f"no model '{name}'"):
        build_model(ModelConfig(name=name), 2, 32)
