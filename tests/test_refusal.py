"""Hostile and hapless answers: refused in one line and without a trace, or kept as they are."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from conftest import PROJECT, ROOT, all_files, contents, render_with_cookiecutter
from markdown_it import MarkdownIt
from packaging.requirements import Requirement

from pretuned import cli

BAD_SLUGS = [
    "", ".", "..", "../x", "../../x", "/tmp/x", "a/b", "a\\b", "-x", "x-", "a--b", "x y", "X",
    "3d", "x.", ".x", "~", "$HOME", "$(touch x)", "`touch x`", "a;b", "a\nb", "a'b", 'a"b', "ünde",
    "名前", "😀", "con", "nul", "com1", "torch", "import_linter", "nvidia-nccl-cu14", "python",
    "train", "slurm", "x" * 51, "x" * 300,
]  # fmt: skip
BAD_PACKAGES = [
    "", "class", "match", "None", "json", "torch", "torchvision", "numpy", "tests", "src", "train",
    "3d", "a-b", "a.b", "_x", "X", "../x", "aux", "lpt9", "ñ", "x" * 51, "simplejpeg", "test",
    "docs", "conftest", "sitecustomize", "asyncore", "compression", "test_bench",
]  # fmt: skip
BAD_TEXTS = [
    "", " ", "a\nb", "a\rb", "a\tb", "a\0b", "a\x7fb", "a\u2028b", "a\u202eb", "a\u200eb",
    "\ud800", "x" * 201, "{{ 1 }}", "{% raw %}", "{# a #}", "a {{",
]  # fmt: skip
CODE = "{{ cycler.__init__.__globals__.os.mkdir('executed') }}"
BAD_EMAILS = ["ada", "ada@", "@b.c", "a b@c.d", "a@b", "a@b.c\n", 'a"@b.c', "a@b.c, d@e.f"]
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
    "`mkdir executed`", "\\N{BULLET} \\x00 \\u0000", "x" * 200, "Ada Lovelace", "[a](b)", "= [1]",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Be where a relative path that escapes would be seen, and with an output folder below."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("key", "value"), REFUSED)
@pytest.mark.parametrize("way", ["cookiecutter", "pretuned"])
def test_a_refused_answer_leaves_one_line_and_nothing_else(way, key, value, tmp_path, capfd):
    output = tmp_path / "a" / "b" / "output"
    if way == "pretuned":
        code = cli.main(["--no-input", "--output-dir", str(output), f"{key}={value}"])
    else:
        with pytest.raises(SystemExit) as ending:
            render_with_cookiecutter(output, **{key: value})
        code = ending.value.code
    assert code == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ERROR: ")
    assert lines[0].isascii()
    # Cookiecutter's own folder of past answers is the one that it was told to use.
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not output.exists()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The files of a project called `odd` with the default texts."""
    output = tmp_path_factory.mktemp("plain") / "output"
    folder = render_with_cookiecutter(output, project_slug="odd", package_name="odd")
    return contents(folder, all_files(folder))


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_an_odd_but_lawful_text_is_kept_as_it_is(text, tmp_path, plain):
    arguments = [f"{key}={text}" for key in ("project_name", "description", "author")]
    names = ["project_slug=odd", "package_name=odd"]
    assert cli.main(["--no-input", "--output-dir", "output", *names, *arguments]) == 0
    project = tomllib.loads(Path("output/odd/pyproject.toml").read_text(encoding="utf-8"))
    answers = project["tool"]["pretuned"]["answers"]
    assert [answers["project_name"], answers["description"], answers["author"]] == [text] * 3
    assert project["project"]["authors"][0]["name"] == text
    assert text in Path("output/odd/LICENSE").read_text(encoding="utf-8")
    tokens = MarkdownIt().parse(Path("output/odd/README.md").read_text(encoding="utf-8"))
    title, description = (token.children or [] for token in tokens[:6] if token.type == "inline")
    for parts in (title, description):
        assert {part.type for part in parts} <= {"text", "text_special"}  # no link, no HTML
        assert "".join(part.content for part in parts) == text.strip()
    # No other file is touched: not a line of shell, YAML, Dockerfile, Makefile or Python.
    folder = Path("output/odd")
    new = contents(folder, all_files(folder))
    assert new.keys() == plain.keys()
    changed = {str(file) for file in new if new[file] != plain[file]}
    assert changed <= {"pyproject.toml", "README.md", "LICENSE"}
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.parametrize(
    "slug", ["odd", "a-b_c", "x" * 50, "true", "null", "on", "eval-exec", "rm-rf", "n0"]
)
def test_a_slug_means_nothing_in_shell_yaml_or_make(slug):
    answers = [f"project_slug={slug}", "package_name=odd", "ci=GitLab CI"]
    assert cli.main(["--output-dir", "output", "--no-input", *answers]) == 0
    folder = Path("output", slug)
    for script in ("slurm.sh", "Dockerfile"):
        assert slug in (folder / script).read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", "slurm.sh"], cwd=folder, check=True)
    subprocess.run(["make", "--dry-run", "help"], cwd=folder, check=True, capture_output=True)
    yaml.safe_load((folder / ".gitlab-ci.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["name"] == slug
    assert project["project"]["scripts"] == {slug: "odd.cli:main"}


def test_a_suggested_name_passes(tmp_path, capfd):
    for key, values in (("project_slug", BAD_SLUGS), ("package_name", BAD_PACKAGES)):
        for value in values:
            cli.main(["--no-input", f"{key}={value}"])
            suggestion = capfd.readouterr().err.rsplit("try ", 1)[1].strip().strip("'")
            cli.check({key: suggestion})
    assert not list(tmp_path.iterdir())


def test_no_name_that_the_project_uses_is_accepted():
    found = dependencies()
    assert {"simplejpeg", "timm", "pyyaml", "nvidia-ml-py", "hatchling"} <= found.keys()
    installed = [known for known in found.values() if known]
    imports = {name for known in installed for name in imports_of(known)}
    scripts = [entry for known in installed for entry in known.entry_points]
    commands = {entry.name for entry in scripts if entry.group == "console_scripts"}
    beside = {path.name.partition(".")[0].lower() for path in PROJECT.iterdir()}
    tests = {path.stem for path in PROJECT.rglob("test_*.py")}
    packages = imports | {name.replace("-", "_") for name in found} | sys.stdlib_module_names
    # What is named here is to be added to `pretuned_answers/__init__.py`.
    assert accepted("package_name", packages | tests | beside) == set()
    assert accepted("project_slug", found.keys() | commands | beside) == set()


def accepted(key, names):
    """Those of the names that a project may have."""

    def passes(name):
        try:
            cli.check({key: name})
        except cli.RefusedError:
            return False
        return True

    return set(filter(passes, names))


def dependencies():
    """What the project needs or can use, and what that needs; None: it is not installed."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = project["project"]["optional-dependencies"] | project["dependency-groups"]
    lines = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    lines += [line for group in optional.values() for line in group]
    found = {}
    for line in lines:  # which grows on the way
        need = Requirement(line)
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if name in found or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        found[name] = next(iter(distributions(name=name)), None)
        lines += (found[name].requires if found[name] else None) or []
    return found


def imports_of(known):
    """What a distribution is imported as, in lower case: a file system may not tell the cases."""
    code = [file for file in known.files or [] if file.suffix in (".py", ".so", ".pyd")]
    tops = {file.parts[0].partition(".")[0] for file in code if file.parts[0] != ".."}
    return {name.lower() for name in {*tops, *(known.read_text("top_level.txt") or "").split()}}


@pytest.mark.parametrize(
    "words",
    [
        ["cookiecutter", str(ROOT)],
        ["cookiecutter", str(ROOT), "--overwrite-if-exists"],
        ["cookiecutter", str(ROOT), "--skip-if-file-exists", "-f"],
        ["pretuned"],
    ],
)
def test_a_folder_with_something_in_it_is_left_alone(words, tmp_path):
    mine = tmp_path / "image-classifier" / "src" / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("my work")
    command = [sys.executable, "-m", *words, "--no-input"]
    environment = os.environ | {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert result.returncode == (2 if words == ["pretuned"] else 1)
    assert "exists" in result.stdout + result.stderr or "is not empty" in result.stderr
    assert result.stderr.count("\n") <= 1 or words != ["pretuned"]
    files = [path for path in (tmp_path / "image-classifier").rglob("*") if path.is_file()]
    assert files == [mine]
    assert mine.read_text() == "my work"
