"""Hostile and hapless answers: refused in one line and without a trace, or kept as they are."""

import errno
import io
import json
import os
import re
import shutil
import sys
import tracemalloc
from collections import UserDict
from importlib.metadata import distributions, packages_distributions
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import cookiecutter.cli
import cookiecutter.main
import pytest
import yaml
from conftest import PROJECT, ROOT, contents, pyproject, render_with_cookiecutter, run, template
from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

from pretuned import cli
from pretuned_answers import gate

pytestmark = pytest.mark.usefixtures("here")  # where a relative path that escapes would be seen

BAD_SLUGS = [
    "", ".", "..", "../../x", "/tmp/x", "a/b", "a\\b", "-x", "x-", "a--b", "x y", "X", "3d", "x.",
    ".x", "~", "$HOME", "$(touch x)", "a;b", "a\nb", "a'b", 'a"b', "ünde", "😀", "con", "com1",
    "torch", "import_linter", "nvidia-nccl-cu14", "python", "train", "slurm", "x" * 51, "x" * 300,
]  # fmt: skip
BAD_PACKAGES = [
    "", "class", "match", "None", "json", "torch", "tests", "src", "train", "3d", "a-b", "a.b",
    "_x", "X", "../x", "aux", "lpt9", "ñ", "x" * 51, "test", "sitecustomize", "asyncore",
]  # fmt: skip
BAD_TEXTS = [
    "", " ", "a\nb", "a\rb", "a\tb", "a\0b", "a\x7fb", "a\u2028b", "a\u202eb", "a\u200eb",
    "\ud800", "x" * 201, "{{ 1 }}", "{% raw %}", "{# a #}", "a {{",
]  # fmt: skip
CODE = "{{ cycler.__init__.__globals__.os.mkdir('executed') }}"
BAD_EMAILS = ["ada", "ada@", "@b.c", "a b@c.d", "a@b", "a@b.c\n", 'a"@b.c', "a@b.c, d@e.f"]
BAD_EMAILS += [".a@b.c", "a..b@c.d", "a.@b.c"]  # hatchling builds no project of these
SCRIPTS = "Makefile", "Dockerfile", "slurm.sh"
REFUSED = [
    *(("project_slug", slug) for slug in BAD_SLUGS),
    *(("package_name", package) for package in BAD_PACKAGES),
    *((key, text) for text in BAD_TEXTS for key in ("author", "description", "project_name")),
    *(("email", email) for email in BAD_EMAILS),
    *((key, CODE) for key in ("project_name", "project_slug", "package_name", "author", "email")),
]

ODD_TEXTS = [
    'O"Brien', "D'Arc", "back\\slash", "tail\\", "Zoë 😀 名前", "👩\u200d🔬", "a # b", "%s {0} {x}",
    "</script>", "'''", '"""', '"; __import__("os").mkdir("executed") #', "$(mkdir executed)",
    "`mkdir executed`", "\\N{BULLET} \\u0000", "x" * 200, "[a](b)", "= [1]", "- birds", "---",
    "2026. Birds",
    "Image Classifier by Ada Lovelace, image-classifier",
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), REFUSED)
@pytest.mark.parametrize("way", ["cookiecutter", "pretuned"])
def test_a_refused_answer_leaves_one_line_and_nothing_else(way, key, value, here, capfd):
    output = here / "a/b/output"
    if way == "pretuned":
        code = cli.main(["--no-input", "--output-dir", str(output), f"{key}={value}"])
    else:
        with pytest.raises(SystemExit) as ending:
            render_with_cookiecutter(output, **{key: value})
        code = ending.value.code
    assert code == 2
    assert re.fullmatch(r"ERROR: [ -~]+\n", capfd.readouterr().err)
    assert not contents(here)
    assert not output.exists()


@pytest.mark.parametrize("said", ["no", "ask"])
def test_without_hooks_no_project_with_the_names_of_another_is_made(said, here, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(here / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))  # to the question of `ask`
    monkeypatch.setattr(cookiecutter.cli, "configure_logger", Mock())  # to the stderr of this test
    with pytest.raises(SystemExit) as ending:
        cookiecutter.cli.main([str(ROOT), "--no-input", "--accept-hooks", said, "author=Me"])
    assert ending.value.code == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "--accept-hooks yes" in error
    assert not (here / "image-classifier").exists()


@pytest.mark.parametrize("version", ["2.1.1", "2.5.0"])
def test_an_older_cookiecutter_is_refused_by_name(version, here, monkeypatch, capfd):
    monkeypatch.setattr(gate, "__version__", version)
    with pytest.raises(SystemExit):
        render_with_cookiecutter(here / "output")
    said = f"ERROR: cookiecutter {version} is too old: take 2.6 or newer\n"
    assert capfd.readouterr().err == said
    assert not contents(here)


@pytest.mark.parametrize("version", ["2.6.0", "2.10.1", "3.0"])
def test_a_newer_cookiecutter_is_taken(version, monkeypatch):
    monkeypatch.setattr(gate, "__version__", version)
    gate.Gate(Environment())


@pytest.mark.parametrize(("key", "value"), [("author", "a\nb"), ("_tools", "serch")])
def test_a_replayed_answer_is_refused_too(key, value, here, capfd):
    render_with_cookiecutter(here / "output")
    (replay,) = (here / "cookiecutter").glob("*.json")
    answers = json.loads(replay.read_text())
    answers["cookiecutter"][key] = value
    replay.write_text(json.dumps(answers))
    places = {"replay_dir": str(here), "cookiecutters_dir": str(here)}
    knobs = {"output_dir": str(here / "again"), "default_config": places}
    with pytest.raises(FailedHookException):
        cookiecutter.main.cookiecutter(str(ROOT), replay=str(replay), **knobs)
    assert re.fullmatch(r"ERROR: [ -~]+\n", capfd.readouterr().err)
    assert not [*here.glob("again/*")]


class Locals(UserDict):
    """Local variables of a frame as Python 3.13 has them: no dict."""

    def keys(self):
        """A list, which is no set."""
        return [*self.data]


def frame_of_3_13(frame):
    """A frame and those that called it."""
    caller = frame.f_back and frame_of_3_13(frame.f_back)
    return SimpleNamespace(f_locals=Locals(frame.f_locals), f_back=caller)


def test_frames_of_newer_pythons_tell_what_cookiecutter_was_told(here, monkeypatch):
    newer = SimpleNamespace(currentframe=lambda: frame_of_3_13(sys._getframe(1)))
    monkeypatch.setattr(gate, "inspect", newer)
    assert render_with_cookiecutter(here).is_dir()


def test_the_oldest_cookiecutter_shows_which_one_is_needed():
    extensions = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))["_extensions"]
    # Its only words are those of the import, which it does outside the template.
    code = f"import jinja2; jinja2.Environment(extensions={extensions})"
    error = run(sys.executable, "-I", "-c", code, code=1).stderr
    assert "No module named 'needs_cookiecutter_2_6'" in error


@pytest.mark.parametrize("way", ["cookiecutter", "pretuned"])
def test_a_full_disk_is_refused_before_a_file_is_written(way, here, monkeypatch, capfd):
    full = SimpleNamespace(total=10**9, free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    command = ["--no-input", "--output-dir", "a/b"]
    with pytest.raises(SystemExit) as ending:
        cli.main(command) if way == "pretuned" else render_with_cookiecutter(here / "a/b")
    assert ending.value.code == 2
    said = r"ERROR: a project needs [0-9.]+ MB, and its disk has 1\.0 MB left\n"
    assert re.fullmatch(said, capfd.readouterr().err)
    assert not contents(here)
    full.total = 0  # some file systems say nothing
    assert cli.main(["--no-input"]) == 0


def test_the_disk_that_is_asked_is_that_of_the_folder(here, monkeypatch):
    (here / "full").mkdir()
    free = lambda place: 10**9 * (place.name != "full")  # noqa: E731
    usage = lambda place: SimpleNamespace(total=10**9, free=free(place))  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(SystemExit):
        render_with_cookiecutter(here / "full/a")


def test_a_disk_without_inodes_is_refused_before_a_file_is_written(here, monkeypatch, capfd):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=120, f_favail=100))
    with pytest.raises(SystemExit):
        render_with_cookiecutter(here / "a/b")
    said = r"ERROR: a project needs [0-9]+ files, and its disk has room for 100 \(inodes\)\n"
    assert re.fullmatch(said, capfd.readouterr().err)
    assert not contents(here)


def test_a_disk_is_asked_for_its_space_without_as_much_memory(here):
    tracemalloc.start()
    gate._check_space(here)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < sum(len(content) for content, _ in template().values()) / 2


QUOTA = "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (20_000, 20_000)); "
WAYS = {
    "cookiecutter": f"from cookiecutter.cli import main; main({[str(ROOT), '--no-input']})",
    "pretuned": "from pretuned.cli import main; sys.exit(main(['--no-input']))",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_quota_is_met_before_a_file_is_written(way, here):
    home = {"COOKIECUTTER_CONFIG": "/dev/null", "HOME": str(here.parent)}
    error = run(sys.executable, "-c", QUOTA + WAYS[way], folder=here, code=2, **home).stderr
    assert re.fullmatch(r"ERROR: a project needs [0-9.]+ MB in '.*': File too large\n", error)
    assert not list(here.iterdir())


def test_a_disk_that_fills_up_leaves_one_line_and_nothing_else(here, monkeypatch, capfd):
    full = OSError(errno.ENOSPC, "No space left on device")
    copies = Mock(wraps=shutil.copyfile, side_effect=[*[DEFAULT] * 9, *[full] * 1000])
    monkeypatch.setattr(shutil, "copyfile", copies)
    assert cli.main(["--no-input", "--output-dir", "a/b"]) == 2
    error = capfd.readouterr().err
    assert re.fullmatch(r"ERROR: \[Errno 28\] [ -~]{,300}; no project was made\n", error)
    assert not list(here.iterdir())


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_an_odd_but_lawful_text_is_kept_as_it_is(text, here):
    texts = ("project_name", "description", "author")
    given = ["project_slug=image-classifier", "tools=all", *(f"{key}={text}" for key in texts)]
    assert cli.main(["--no-input", *given]) == 0
    folder = here / "image-classifier"
    project = pyproject(folder)
    answers = project["tool"]["pretuned"]["answers"]
    assert [answers[key] for key in texts] == [text] * 3
    assert project["project"]["authors"][0]["name"] == text
    assert text in (folder / "LICENSE").read_text(encoding="utf-8")
    tokens = MarkdownIt().parse((folder / "README.md").read_text(encoding="utf-8"))
    title, description = (token.children or [] for token in tokens[:6] if token.type == "inline")
    for parts in (title, description):
        assert {part.type for part in parts} <= {"text", "text_special"}  # no link, no HTML
        assert "".join(part.content for part in parts) == text.strip()
    # No other file is touched: not a line of shell, YAML, Dockerfile, Makefile or Python.
    new, default = contents(folder), template()
    assert new.keys() == default.keys()
    changed = {file for file in new if new[file] != default[file]}
    assert changed <= {"pyproject.toml", "README.md", "LICENSE"}
    assert not list(here.rglob("executed"))


@pytest.mark.parametrize(
    "slug", ["odd", "a-b_c", "x" * 50, "true", "null", "on", "eval-exec", "rm-rf", "n0"]
)
def test_a_slug_means_nothing_in_shell_yaml_or_make(slug, here):
    assert cli.main(["--no-input", f"project_slug={slug}", "package_name=odd", "ci=GitLab CI"]) == 0
    folder = here / slug
    for script in ("slurm.sh", "Dockerfile"):
        assert slug in (folder / script).read_text(encoding="utf-8")
    run("bash", "-n", "slurm.sh", folder=folder)
    run("make", "--dry-run", "help", folder=folder)
    yaml.safe_load((folder / ".gitlab-ci.yml").read_text(encoding="utf-8"))
    sky = yaml.safe_load((folder / "sky.yaml").read_text(encoding="utf-8"))
    assert sky["name"] == slug
    assert sky["file_mounts"]["/bucket"]["name"] == f"{slug}-runs".replace("_", "-")  # as S3 asks
    project = pyproject(folder)["project"]
    assert (project["name"], project["scripts"]) == (slug, {slug: "odd.cli:main"})


def test_a_suggested_name_passes(here, capfd):
    for key, values in (("project_slug", BAD_SLUGS), ("package_name", BAD_PACKAGES)):
        for value in values:
            cli.main(["--no-input", f"{key}={value}"])
            suggestion = capfd.readouterr().err.rsplit("try ", 1)[1].strip().strip("'")
            cli.check({key: suggestion})
    assert not list(here.iterdir())


def test_no_name_that_the_project_uses_is_accepted():
    found = dependencies()
    assert {"safetensors", "timm", "pyyaml", "nvidia-ml-py", "hatchling"} <= found.keys()
    imports = packages_distributions().items()
    packages = {name.lower() for name, names in imports if {*map(canonical, names)} & found.keys()}
    packages |= {name.replace("-", "_") for name in found} | sys.stdlib_module_names
    packages |= {path.stem for path in PROJECT.rglob("test_*.py")}
    scripts = [entry for known in found.values() if known for entry in known.entry_points]
    commands = {entry.name for entry in scripts if entry.group == "console_scripts"}
    beside = {path.name.partition(".")[0].lower() for path in PROJECT.iterdir()}
    for key, taken in (("package_name", packages), ("project_slug", found.keys() | commands)):
        for name in taken | beside:  # add one that is accepted to `pretuned_answers/__init__.py`
            with pytest.raises(cli.RefusedError):
                cli.check({key: name})


def test_no_command_that_a_script_of_the_project_calls_is_accepted():
    found = called()
    assert found > {"cat", "find", "mktemp", "rm", "scontrol", "sleep", "touch", "useradd", "uv"}
    for name in found:  # add one that is accepted to `pretuned_answers/__init__.py`
        with pytest.raises(cli.RefusedError):
            cli.check({"project_slug": name})


def called():
    """The commands that scripts of the project call by name, but for those of the shell itself."""
    task = yaml.safe_load((PROJECT / "sky.yaml").read_text())
    rules, layers, job = ((PROJECT / name).read_text() for name in SCRIPTS)
    lines = [*re.findall(r"(?m)^\t(.*)", rules), *re.findall(r"(?m)^(?:RUN|    &&) (.*)", layers)]
    code = "\n".join([*lines, job, task["setup"], task["run"]])
    code = re.sub(r"(?m)'[^'\n]*'|(^|\s)#.*", "", code)  # no texts, no comments
    place = r"(?m)(?:^|[|&;(]|-exec|-v)[ @]*(?:(?:if|then|do|else|elif|while|!|\{) +)*"
    found = {*re.findall(rf"{place}([a-z][a-z0-9-]*)(?![\w=(/.:+-])", code)}
    functions = {*re.findall(r"(\w+)\(\)", code)}
    return found - functions - {*run("bash", "-c", "compgen -bk").stdout.split()}


def dependencies():
    """What the project needs or can use, and what that needs; None: it is not installed."""
    project = pyproject(PROJECT)
    optional = project["project"]["optional-dependencies"] | project["dependency-groups"]
    lines = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    lines += [line for group in optional.values() for line in group]
    found = {}
    for line in lines:  # which grows on the way
        need = Requirement(line)
        name = canonical(need.name)
        if name in found or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        found[name] = next(iter(distributions(name=name)), None)
        lines += (found[name].requires if found[name] else None) or []
    return found


@pytest.mark.parametrize(
    ("program", "options", "code"),
    [
        (["cookiecutter", ROOT], [], 1),
        (["cookiecutter", ROOT], ["--overwrite-if-exists"], 1),
        (["cookiecutter", ROOT], ["--skip-if-file-exists", "-f"], 1),
        (["pretuned"], [], 2),
    ],
)
def test_a_folder_with_something_in_it_is_left_alone(program, options, code, here):
    mine = here / "image-classifier/src/mine.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("my work")
    command = [sys.executable, "-m", *program, *options, "--no-input"]
    places = {"HOME": here / "home", "PYTHONPATH": ROOT / "src"}
    done = run(*command, folder=here, code=code, **places)
    assert "exists" in done.stdout + done.stderr or "is not empty" in done.stderr
    assert done.stderr.count("\n") <= 1 or program != ["pretuned"]
    assert contents(here / "image-classifier").keys() == {"src/mine.py"}
    assert mine.read_text() == "my work"
