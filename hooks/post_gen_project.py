"""Turn the copied folder, a project with the default answers, into the one that was asked for.

Nothing in the folder is Jinja: the words of the default answers are what is replaced. Free text
(names of people and of the project, the description) goes into pyproject.toml, Markdown and the
license alone, quoted for where it lands; all other files take only the slug and the package name.
"""

import hashlib
import json
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

# JSON inside a JSON string: nothing that an answer holds can leave the literal.
answers = json.loads({{cookiecutter | tojson | tojson}})
template_folder = Path(json.loads({{template_folder | tojson | tojson}}))
sys.path.insert(0, str(template_folder))
sys.dont_write_bytecode = True

from pretuned_answers import RefusedError, tools  # noqa: E402

# The words that the folder was written with.
DEFAULTS = json.loads((template_folder / "cookiecutter.json").read_text(encoding="utf-8"))
DEFAULTS |= {"project_slug": "image-classifier", "package_name": "image_classifier"}
NAMES = ("project_slug", "package_name")
TEXTS = ("project_name", "description", "author", "email")

# What each choice owns in the folder; alternatives/ has what other choices put in its place.
OWNED = {
    "license": ["LICENSE"],
    "docker": ["Dockerfile", ".dockerignore"],
    "slurm": ["slurm.sh"],
    "skypilot": ["sky.yaml"],
    "ci": [".github"],
    "pre_commit": [".pre-commit-config.yaml"],
}

# What systems, editors and uv leave in the folder of whoever worked in the template.
LEFT = (".*_cache", ".DS_Store", ".idea", ".ipynb_checkpoints", ".vscode", "Thumbs.db", "uv.lock")

# A name of SPDX, or one of those it leaves to us.
SPDX = {"proprietary": "LicenseRef-Proprietary"}


def main() -> None:
    """Clear away, choose files, replace the words, name the package."""
    for path in Path.cwd().rglob("*"):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)  # a template may be read-only, a project not
    for pattern in leftovers():
        for path in list(Path.cwd().glob(pattern)):
            if path.exists():  # not below one that has gone
                remove(path)
    for key, files in OWNED.items():
        choose(key, files)
    choose_tools()
    for path in list(Path.cwd().rglob("*")):
        if path.is_file():
            rewrite(path)
    Path("src", DEFAULTS["package_name"]).rename(Path("src", answers["package_name"]))
    write_manifest()


def leftovers() -> list[str]:
    """What has a name that git ignores, or another that is of nobody's project."""
    lines = Path(".gitignore").read_text(encoding="utf-8").splitlines()
    rules = [line.rstrip("/") for line in [*lines, *LEFT] if line and line[0] != "#"]
    return [rule[1:] if rule.startswith("/") else f"**/{rule}" for rule in rules]


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_manifest() -> None:
    """Keep git's names for the content of each file, by which an update finds it in the history.

    Names are of one of two kinds, and nobody knows yet which: the second is git's SHA-256.
    """
    made: dict[str, dict[str, str]] = {"files": {}, "files_sha256": {}}
    for path in sorted(Path.cwd().rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            blob = b"blob %d\0" % len(content) + content
            name = path.relative_to(Path.cwd()).as_posix()
            made["files"][name] = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
            made["files_sha256"][name] = hashlib.sha256(blob).hexdigest()
    text = json.dumps(made, indent=0) + "\n"
    Path(".pretuned.json").write_text(text, encoding="utf-8", newline="\n")


def choose(key: str, files: list[str]) -> None:
    """Replace the `files` of the default choice by those of the chosen one, if it is another."""
    default = DEFAULTS[key][0] if isinstance(DEFAULTS[key], list) else DEFAULTS[key]
    if answers[key] == default:
        return
    for file in map(Path, files):
        remove(file)
    name = str(answers[key]).lower().replace(" ", "-")
    others = template_folder / "alternatives" / key / name
    for file in others.glob("*"):  # none where there is no such folder
        shutil.copyfile(file, file.name)  # not its mode: a template may be read-only


def choose_tools() -> None:
    """Leave out the tools that were not asked for, and what names them."""
    project = Path.cwd()
    names = tools.chosen(project, answers["tools"], answers["_tools"])
    kept = tools.with_needs(project, names)
    answers["tools"] = tools.size_of(project, names) or sorted(names)
    missing = {name: path for name, path in tools.there(project).items() if name not in kept}
    commands = {verb for path in missing.values() for verb in tools.verbs(path)}
    for name, path in missing.items():
        for page in map(Path, tools.PAGES.get(name, ())):
            page.unlink()
        remove(path)
    if not kept:
        shutil.rmtree(tools.FOLDER)
    for path in [Path("pyproject.toml"), *project.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        text = tools.without(text, path.suffix, missing.keys(), commands)
        path.write_text(text, encoding="utf-8", newline="\n")


def rewrite(path: Path) -> None:
    """Replace the default words in one text file, all in one pass: an answer is not read again."""
    words = {DEFAULTS[key]: answers[key] for key in NAMES}
    if path.name == "sky.yaml":  # no bucket of S3 or Azure has `_` in its name
        bucket = f"{answers['project_slug']}-runs".replace("_", "-")
        words = {f"{DEFAULTS['project_slug']}-runs": bucket} | words
    quote = QUOTES.get(path.suffix or path.name)
    if quote:
        words |= {DEFAULTS[key]: quote(answers[key]) for key in TEXTS}
    if path.name == "pyproject.toml":
        words |= choices_in_toml()
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return  # an image, say
    new = re.sub("|".join(map(re.escape, words)), lambda match: words[match[0]], text)
    if new != text:
        path.write_bytes(new.encode())


def choices_in_toml() -> dict[str, str]:
    """Return the lines of pyproject.toml that name a choice, and what they become."""
    name = answers["license"]
    docker = f"docker = {str(answers['docker']).lower()}"
    return {
        'license = "MIT"\ndocker = true': f'license = "{name}"\n{docker}',  # among the answers
        'license = "MIT"': f'license = "{SPDX.get(name, name)}"',
        "slurm = true": f"slurm = {str(answers['slurm']).lower()}",
        "skypilot = true": f"skypilot = {str(answers['skypilot']).lower()}",
        'ci = "GitHub Actions"': f'ci = "{answers["ci"]}"',
        "pre_commit = true": f"pre_commit = {str(answers['pre_commit']).lower()}",
        'tools = "all"': f"tools = {json.dumps(answers['tools'])}",
    }


def toml(value: str) -> str:
    """Return `value` as it stands between the quotes of a TOML string."""
    return value.replace("\\", "\\\\").replace('"', '\\"')


def markdown(value: str) -> str:
    """Return `value` as a line of Markdown that reads as it is written."""
    value = re.sub(r"([\\`*_\[\]<>&|~#$])", r"\\\1", value.strip())
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", value)  # no list, rule or heading begins here


QUOTES: dict[str, Callable[[str], str]] = {".toml": toml, ".md": markdown, "LICENSE": str}

try:
    main()
except (OSError, RefusedError) as error:
    sys.exit(f"ERROR: {error}; no project was made")
except KeyboardInterrupt:  # who called this says so
    sys.exit(130)
