"""Nothing that comes from outside is run: not a checkpoint, not a name, not a word of a command."""

import ast
import io
import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import Shown, changed, write_photo
from safetensors import safe_open
from torch import nn

from image_classifier import checkpoint
from image_classifier.checkpoint import read_newest
from image_classifier.cli import commands, main
from image_classifier.config import Config, ModelConfig, RunConfig
from image_classifier.errors import UserError
from image_classifier.models import (
    build_model,
    load_best,
    load_pretrained,
)
from image_classifier.predictions import scores_text
from image_classifier.runtime.console import printable
from image_classifier.runtime.distributed import World
from image_classifier.train import train

PACKAGE = Path(checkpoint.__file__).parent
OWNED = "owned"  # the folder that a payload makes where it runs


class Payload:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function, *arguments):
        """Call `function(*arguments)`."""
        self.call = function, arguments

    def __reduce__(self):
        """What pickle writes down."""
        return self.call


def by_call(path):
    torch.save({"state": {"model": Payload(os.mkdir, OWNED)}}, path)


def by_name_on_the_terminal(path):
    content = io.BytesIO()
    torch.save({"state": torch.zeros(1)}, content)
    with zipfile.ZipFile(content) as good, zipfile.ZipFile(path, "w") as archive:
        for name in good.namelist():
            bad = b"\x80\x02c\x1b[31mos\n\x1b[2Jmkdir\nq\x00X\x05\x00\x00\x00owned\x85R."
            archive.writestr(name, bad if name.endswith("data.pkl") else good.read(name))


def old_format(path):
    torch.save(Payload(os.mkdir, OWNED), path, _use_new_zipfile_serialization=False)


def program(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still read
        torch.jit.script(nn.Linear(2, 2)).save(path)


def bomb(path):
    torch.save({"state": torch.zeros(2)}, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x/data/9", bytes(2**22))


HOSTILE = {
    by_call: "refusing to load 'last.pt': it holds objects other than tensors and plain values "
    f"({os.mkdir.__module__}.mkdir)",
    by_name_on_the_terminal: r"plain values (\x1b[31mos.\x1b[2Jmkdir)",
    old_format: "'last.pt' is damaged: File is not a zip file",
    program: "'last.pt' is damaged: it is compressed, as no checkpoint is",
    bomb: "'last.pt' is damaged: it is compressed, as no checkpoint is",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to be in, where a payload leaves its trace."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begin_with(path):
    """Take the first weights of a model from a file."""
    world = World(torch.device("cpu"))
    weights = load_pretrained(path, ModelConfig(), world)
    weights.load_into(nn.Linear(2, 2), ("ant", "bee"))


@pytest.mark.parametrize("write", HOSTILE, ids=lambda write: write.__name__)
def test_a_hostile_checkpoint_is_refused_in_a_line(here, write, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # torch's way to allow it
    write(Path("last.pt"))
    with pytest.raises(UserError) as refused:
        load_best(Path("last.pt"))
    said = str(refused.value)
    assert said.isprintable()
    assert HOSTILE[write] in said
    with pytest.raises(UserError):
        begin_with("last.pt")
    Path("run/checkpoints").mkdir(parents=True)
    Path("last.pt").rename("run/checkpoints/last.pt")
    with pytest.raises(UserError, match=r"last\.pt"):
        read_newest(RunConfig(dir="run"), World(torch.device("cpu")))
    assert not (here / OWNED).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (2**62).to_bytes(8, "little") + b"{}",
        b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[999999999999],"data_offsets":[0,4]}}',
        pickle.dumps(Payload(os.mkdir, OWNED)),
    ],
    ids=["empty", "endless header", "endless tensor", "pickle"],
)
def test_a_hostile_safetensors_is_refused(here, content):
    Path("w.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"--run.init-from 'w.safetensors': "):
        begin_with("w.safetensors")
    Path("w.safetensors").unlink()
    os.mkfifo("w.safetensors")  # which is not waited for
    with pytest.raises(UserError, match="there is no checkpoint"):
        begin_with("w.safetensors")
    assert not (here / OWNED).exists()


def test_the_package_calls_nothing_that_runs_what_it_reads():
    imports = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
    calls = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.jit.load"}
    calls |= {"extractall", "unpack_archive", "urlopen", "urlretrieve", "load_state_dict_from_url"}
    loads, found = [], []
    for path in (path for path in PACKAGE.rglob("*.py") if path.parent.name != "tests"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            match node:
                case ast.Import() | ast.ImportFrom():
                    names = [getattr(node, "module", None) or "", *(n.name for n in node.names)]
                    names = [name for name in names if name.partition(".")[0] in imports]
                case ast.Call(func=ast.Name(id=name)):
                    names = [name]
                case ast.Call(func=ast.Attribute(attr=name, value=value)):
                    names = [name] if name not in ("eval", "compile") else []  # a model's
                    names.append(f"{getattr(value, 'id', '')}.{name}")
                case ast.Constant(value=str(text)):
                    found += [text for word in ("0.0.0.0", "--bind_all") if word in text]
                case ast.keyword(arg="shell" | "weights_only" as arg, value=value):
                    loads.append((path.name, arg, ast.unparse(value)))
            found += [name for name in names if name in calls or name in imports]
            loads += [(path.name, name, "") for name in names if name == "torch.load"]
    assert found == []
    assert {name for name, *_ in loads} == {"weights.py"}
    assert sorted(loads)[1:] == [("weights.py", "weights_only", "True")]


HOSTILE_NAMES = [
    b"<script>alert(1)<\xe2\x88\x95script>",
    b'"><img src=x onerror=alert(1)>',
    b"'; mkdir owned #",
    b"$(mkdir owned)`mkdir owned`",
    b"{" + b"{7*7}} ${facts} %s {0}",
    b"%2e%2e%2f..%5c",
    b"a\r\n\x1b]0;owned\x07\x1b[2J",
    "\u202egnp.exe".encode(),
    b"x" * 255,
    b"\xff\xfe",
]
ESCAPED = {r"a\r\n\x1b]0;owned\x07\x1b[2J", r"\u202egnp.exe", r"\xff\xfe"}


def test_names_are_shown_and_reach_neither_page_nor_shell_nor_terminal(here, config, capsys):
    for name in HOSTILE_NAMES:
        for split in ("train", "val"):
            write_photo(here / "photos" / split / os.fsdecode(name) / "1.jpg", 0, size=(32, 32))
    folder = Path("run \x1b[31m<b> $(mkdir owned)\udcff")
    config = changed(
        config,
        epochs=1,
        data__name="folder",
        data__root="photos",
        data__batch_size=len(HOSTILE_NAMES),
        optim__warmup_epochs=0,
        run__dir=str(folder),
    )
    train(config)
    if "evaluate" in commands():  # it may be deleted
        assert main(["evaluate", str(folder)]) == 0
        assert main(["evaluate", str(folder), "--root", "photos\x1b[2J"]) == 2
    said = capsys.readouterr()
    assert all(line.isprintable() for line in (said.out + said.err).splitlines())
    assert r"run \x1b[31m<b> $(mkdir owned)\udcff" in said.out

    best = load_best(folder / "checkpoints" / "best.pt")
    assert set(best.classes) >= ESCAPED
    Path("best").symlink_to(folder / "checkpoints" / "best.safetensors")
    with safe_open("best", "pt") as weights:
        assert json.loads(weights.metadata()["classes"]) == list(best.classes)
    for name in ("config.json", "environment.json", "status.json"):
        json.loads((folder / name).read_text())
    if (page := folder / "report.html").exists():  # `tools/report` may be deleted
        shown = Shown(page.read_text())
        assert not {"script", "iframe"} & shown.tags
        assert all(picture.startswith("data:image/") for picture in shown.pictures)
        assert not [name for name in shown.attributes if name.startswith("on")]
        assert {row[0] for row in shown.tables[-1][1:]} == set(best.classes)
    assert not (here / OWNED).exists()


def test_names_of_all_scripts_are_shown_and_nothing_moves_the_cursor():
    for text in ("日本\u3000🦊", "👩\u200d🔬", 'Zoë\'s \\ "ant"', "a\u00a0b"):
        assert printable(text) == text
    scores = {"val/top1": 1.0, "val/top5": 1.0, "val/loss": 0.0}
    classes = ("\x1b[2Jant", "bee\n\u2028")  # as a checkpoint may bring them
    text = scores_text(scores, torch.eye(2, dtype=torch.int64), classes)
    assert r"\x1b[2Jant" in text
    assert r"bee\n\u2028" in text


@pytest.mark.parametrize("name", ["list_models", "os.mkdir", "../../owned", "__loader__"])
def test_a_model_is_looked_up_in_tables_alone(name):
    with pytest.raises(UserError, match=f"no model '{name}'"):
        build_model(changed(Config(), model__name=name).model, 2, 32)
