"""The layout of the package, and that its documentation is true."""

import ast
import hashlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import described_commands, options_of, run_alone

from image_classifier import config as config_module
from image_classifier.cli import commands
from image_classifier.config import Config, DataConfig
from image_classifier.data.datasets import open_dataset
from image_classifier.errors import UserError
from image_classifier.extensions import find_tool
from image_classifier.runtime.command_line import (
    COMMENT,
    all_presets,
    parse,
)
from image_classifier.runtime.config_dict import flatten

PROJECT = Path(__file__).parent.parent
PACKAGE = Path(config_module.__file__).parent
FILES = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "tests"]
MODULES = {str(path.relative_to(PACKAGE)): path.read_text() for path in FILES}
README = PROJECT / "README.md"
NAMED = README, PROJECT / "docs" / "extend.md", PROJECT / "docs" / "guide.md"
PAGES = sorted({*NAMED, *PROJECT.glob("docs/*.md"), *PACKAGE.glob("tools/*/README.md")})
TEXTS = {page: page.read_text() for page in PAGES if page.exists()}  # you may delete any
# But for the title and the description of the project, which are your words.
PAGES_TEXT = re.sub(r"\A# .*\n\n.*\n", "", "\n".join(TEXTS.values()))


def blocks(language):
    """The blocks of code in `language` of the documents: those of the tools that are there, too."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES_TEXT, re.DOTALL | re.MULTILINE)


def test_imports_point_downwards(monkeypatch):
    linter = pytest.importorskip("importlinter.cli")
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT / "src"))
    assert linter.lint_imports(no_cache=True) == 0


def test_every_knob_is_read():
    readers = "".join(t for path, t in MODULES.items() if path not in ("config.py", "presets.py"))
    for knob in flatten(Config()):
        assert re.search(rf"\b\w+\.{knob.rpartition('.')[2]}\b", readers), knob


def test_every_knob_has_its_help_beside_it():  # a comment that is parted from its line is none
    config = Config()
    for section in (config, *filter(is_dataclass, vars(config).values())):
        owners = filter(inspect.get_annotations, type(section).__mro__)
        comments = dict(COMMENT.findall("\n".join(map(inspect.getsource, owners))))
        for name, value in vars(section).items():
            assert comments[name] or is_dataclass(value), name


def imported(text):
    """The names of modules in the absolute imports of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_the_package_never_imports_by_its_own_name_and_rooms_are_imported_by_their_faces():
    for path, text in MODULES.items():
        assert PACKAGE.name not in {name.partition(".")[0] for name in imported(text)}, path
        for room in {"data", "models", "tracking"} - {path.partition("/")[0]}:
            assert not re.search(rf"^\s*from \.+{room}\.", text, re.MULTILINE), path


LACKING = r"import (fcntl|msvcrt|resource)\b|\bsys\.platform\b|\bwindll\b|\bpthread_sigmask\b"
LACKING += r"|\bsignal\.SIG(HUP|USR|KILL|CHLD|BUS)|\bos\.(sched_|O_N|sysconf|fork|setsid)"


def test_only_one_module_knows_what_a_system_lacks():
    assert [name for name, text in MODULES.items() if re.search(LACKING, text)] == [
        "runtime/platform.py"
    ]


def test_the_shapes_are_the_same_bytes_everywhere():
    source = open_dataset(DataConfig(limit=256), "train")
    found = hashlib.sha256(source.pixels.numpy().tobytes() + source.labels.numpy().tobytes())
    assert found.hexdigest().startswith("ea4717f671641dbe03792556206b88dc")


def skip_if_changed(*paths):
    """Skip a test of these files if you have changed, added or deleted one since they were made."""
    manifest = PROJECT / ".pretuned.json"  # what was made; the template itself has none
    if not manifest.exists():
        return
    made = json.loads(manifest.read_text())
    key, kind = ("files", "sha1") if "files" in made else ("files_sha256", "sha256")
    for path in paths:
        name = path.relative_to(PROJECT).as_posix()
        found = None
        if path.exists():
            content = path.read_bytes()
            blob = f"blob {len(content)}\0".encode() + content  # as git names it
            found = hashlib.new(kind, blob).hexdigest()
        if found != made[key].get(name):
            pytest.skip(f"{name} is your own now")


def test_the_layout_of_the_readme_is_that_of_the_package():
    text = TEXTS.get(README, "").partition("## Layout")[2]
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`(.*?)`", row)}
    there = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__pycache__"}
    new = [PACKAGE / path for path in MODULES if path.partition("/")[0] in there - named]
    skip_if_changed(README, *new)
    assert named - {"tools"} == there - {"tools"}  # all tools may be deleted


# A call of a command; its name may be that of the project, too.
CALL = r"(?:^|\| )image-classifier (.*)"
CALL += r"|(?:^| )(train)\.py(.*)"


def test_every_command_of_the_readme_is_understood():
    skip_if_changed(*PAGES)
    found = set()
    presets = all_presets()
    for line in "".join(blocks("sh")).splitlines():
        called = re.search(CALL, line)
        text = "".join(filter(None, called.groups())) if called else ""
        verb, *words = shlex.split(text, comments=True) or [""]
        if verb in commands():  # else it may be of a tool that was deleted
            named = [word for word in words[:2] if word in presets]  # `repeat 5 cifar10`
            preset = presets[words.pop(words.index(named[0])) if named else "smoke"]
            others = {"default": preset()} if verb == "train" else {}
            is_missing = "openvino" in words and find_spec("openvino") is None
            needs = pytest.raises(UserError, match=r"needs .*pip install")
            with needs if is_missing else nullcontext():
                parse(options_of(verb), words, prog=verb, about="", **others)
            found.add(verb)
    assert found >= {*described_commands()}


def test_optional_libraries_go_into_this_environment_which_has_a_pip():
    skip_if_changed(*PAGES, PROJECT / "Makefile", PROJECT / "pyproject.toml")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    libraries = " ".join(name for names in extras.values() for name in names)
    commands = re.findall(r"python -m pip install([^`\n]*)", PAGES_TEXT)
    assert len(commands) == len(re.findall(r"(?<!uv )pip install", PAGES_TEXT)) >= 1
    for library in shlex.split(" ".join(commands)):
        assert f"{library}>=" in libraries
    for extra in re.findall(r"uv pip install -e '\.\[(\w+)\]'", PAGES_TEXT):
        assert extra in extras
    makers = PAGES_TEXT + (PROJECT / "Makefile").read_text(encoding="utf-8")
    assert makers.count("uv venv") == makers.count("uv venv --seed") == 3


def run_in(folder, *lines):
    """Run commands in the copy of the project in `folder`; the sum of their exit codes."""
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE.name]:
        del sys.modules[name]
    sys.path.insert(0, str(folder / "src"))
    os.chdir(folder)
    from image_classifier.cli import main

    return sum(main(line.split()) for line in lines)


def test_every_extension_of_the_documents_works(tmp_path):
    names = re.findall(r"^\+\+\+ b/(.*)", "".join(blocks("diff")), re.MULTILINE)
    skip_if_changed(*PAGES, *(PROJECT / name for name in names))
    shutil.copytree(PROJECT / "src", tmp_path / "src")
    assert len(blocks("diff")) >= 11
    for patch in blocks("diff"):
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    mine = "train mine --epochs 1 --optim.warmup-epochs 0 --data.limit 192"
    commands = [mine, f"{mine} --run.fresh", "hello runs/mine"]
    if find_tool("conversion", "torch-dataset"):
        commands.append(f"{mine} --data.name theirs --run.dir runs/theirs")
    assert run_alone(run_in, tmp_path, *commands) == (0, 0)
    logged = (tmp_path / "runs" / "mine" / "mine.csv").read_text()
    rows = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text()
    assert logged.count("train/loss") == rows.count("train/loss")  # of the second start alone
    names = "train/loss", "val/balanced", "val/rmse", "mine/epoch_seconds"
    assert all(name in logged for name in names)
