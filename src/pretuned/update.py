"""`pretuned diff` and `pretuned update`: a project that was made before gets what changed here.

A project remembers in `.pretuned.json` the digest of each of its files as the template made it.
Against that, a file is its owner's work, the template's, or both. What both changed is merged by
git, with the file as it was made as the base: from the project's own history, where it is if it
was ever committed, or from the version that made it (`--base`).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pretuned_answers import RefusedError

MANIFEST = ".pretuned.json"
JOURNAL = "pretuned-update"  # in the git folder: what an update is about to write
BASES = "refs/pretuned/made"  # in git, a tree of files as the template made them
PLAN = "plan.json"  # there; from when it has its name on, the update happens
# Files that moved, by their old path, with the default names; what moved twice is there twice.
MOVES = {
    "src/image_classifier/tools/probe/layers.py": (
        "src/image_classifier/tools/head_layers/layers.py"
    ),
    "src/image_classifier/tools/probe/tests/test_layers.py": (
        "src/image_classifier/tools/head_layers/tests/test_layers.py"
    ),
}

Render = Callable[[dict[str, object], Path], Path]  # answers, where to -> the new folder
Read = Callable[[str], bytes | None]  # a path in the project -> the file as the template made it


class MissingBaseError(RefusedError):
    """Nobody knows what a file was when the template made it."""


@dataclass(frozen=True)
class Change:
    """What an update does to one file."""

    path: str  # relative to the project, with slashes
    verdict: str  # one of VERDICTS
    content: bytes | None = None  # to write; None: nothing is written
    was: str = ""  # where the file was, if it moved


@dataclass(frozen=True)
class Sides:
    """One file, from all sides; None: it is not there."""

    path: str
    was: str  # its path before, if it moved
    made: str | None  # the digest of what the template made of it
    mine: bytes | None  # as it is in the project
    new: bytes | None  # as the template makes it now

    @property
    def verdict(self) -> str:
        """One of VERDICTS; `both` if both changed it, `same` if it is as the template has it."""
        if self.mine is None:
            if self.made is None:
                return "added"
            return "same" if self.new is None else "gone"
        is_touched = self.made is None or blob(self.mine) != self.made
        if self.new is None:
            return "kept" if is_touched else "deleted"
        if self.mine == self.new:
            return "same"
        if not is_touched:
            return "replaced"
        return "yours" if self.made == blob(self.new) else "both"


@dataclass(frozen=True)
class Plan:
    """What an update does, and what the project knows afterwards."""

    changes: list[Change]
    new: dict[str, bytes]  # the files as the template makes them now
    runnable: frozenset[str]  # those that can be executed

    @property
    def made(self) -> dict[str, str]:
        """Their digests."""
        return {path: blob(content) for path, content in self.new.items()}


VERDICTS = {
    "yours": "you changed it, the template did not: stays",
    "replaced": "the template changed it, you did not",
    "moved": "the template moved it",
    "added": "new in the template",
    "deleted": "no longer in the template, and you did not change it",
    "merged": "both changed it",
    "conflict": "both changed the same lines, which are marked: settle them",
    "unmerged": "both changed it, and it is no text: yours stays",
    "kept": "you changed it, and the template has no such file any more: stays",
    "gone": "you deleted it: stays deleted",
}


DIFFERING = ("yours", "merged", "conflict", "unmerged")  # from the template's, afterwards


def blob(content: bytes) -> str:
    """The digest of a file: the name that git has for its content."""
    head = b"blob %d\0" % len(content)
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a render by their paths, without the manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    found.pop(MANIFEST, None)
    return found


def answers_of(project: Path) -> tuple[str, dict[str, object]]:
    """The version of the template that made a project, and the answers.

    Raises:
        RefusedError: if it is no project of this template.
    """
    path = project / "pyproject.toml"
    try:
        about = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["pretuned"]
        return str(about["version"]), dict(about["answers"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RefusedError(
            f"{str(path)!a} has no [tool.pretuned] with version and answers: {str(project)!a} is "
            "no project of this template"
        ) from error


def git(project: Path, *words: str, content: bytes | None = None) -> bytes:
    """What git prints in `project`.

    Raises:
        RefusedError: if it fails, with what it says.
    """
    done = subprocess.run(
        ["git", "-C", str(project), *words], input=content, capture_output=True, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
        raise RefusedError(f"git {words[0]} failed in {str(project)!a}: {said[-1]}")
    return done.stdout


def read_manifest(project: Path) -> dict[str, str]:
    """The digest of each file as the template made it; none where there is no manifest."""
    path = project / MANIFEST
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        made = {str(name): str(digest) for name, digest in files.items()}
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in made):
            raise ValueError("it names a file outside of the project")
        return made
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RefusedError(f"{str(path)!a} can't be read: {error}") from error


@contextmanager
def render_of(base: str, answers: dict[str, object]) -> Iterator[Path]:
    """A folder with what another version of the template makes of `answers`.

    `base` is its wheel, its checkout, or its number, for which uv asks the package index.
    """
    with tempfile.TemporaryDirectory(prefix="pretuned-") as scratch:
        home = Path(scratch)
        variables = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pretuned"]
        if base.endswith(".whl"):
            try:
                with zipfile.ZipFile(base) as wheel:
                    wheel.extractall(home / "wheel")
            except (OSError, zipfile.BadZipFile) as error:
                raise RefusedError(f"--base {base!a} can't be had: {error}") from error
            variables["PYTHONPATH"] = str(home / "wheel")
        elif Path(base).is_dir():
            variables["PYTHONPATH"] = str(Path(base, "src").resolve())
        else:
            command = ["uvx", f"pretuned=={base}"]
        words = ["--no-input", "--output-dir", str(home / "made")]
        words += [f"{key}={value}" for key, value in answers.items()]
        try:
            done = subprocess.run(
                [*command, *words], env=variables, capture_output=True, check=False, text=True
            )
            said = done.stderr.strip().splitlines()
        except OSError as error:
            said = [str(error)]
        if not (home / "made").is_dir():
            raise RefusedError(
                f"the template {base} that made this project can't be had "
                f"({said[-1] if said else 'no reason'}): give its wheel or its checkout by --base"
            )
        yield next((home / "made").iterdir())


def changes_of(
    project: Path, made: dict[str, str], new: dict[str, bytes], base: Read, moves: dict[str, str]
) -> list[Change]:
    """What an update does to each file that it does not leave as it is, and what it leaves.

    Args:
        project: its folder.
        made: the digest of each file as the template made it.
        new: the files as the template makes them now.
        base: reads a file as the template made it; None if that is not known.
        moves: new paths by old ones.
    """
    moved = {
        there: was
        for was, there in moves.items()
        if was in made and was not in new and there in new and there not in made
    }
    changes = []
    for path in sorted((made.keys() | new.keys()) - set(moved.values())):
        was = moved.get(path, path)
        mine = (project / was).read_bytes() if (project / was).is_file() else None
        change = change_of(Sides(path, was, made.get(was), mine, new.get(path)), base)
        if change is not None:
            changes.append(change)
    return changes


def change_of(sides: Sides, base: Read) -> Change | None:
    """What an update does to a file; None if it is as the template has it."""
    verdict = sides.verdict
    content = sides.new if verdict in ("added", "replaced") else None
    moved = sides.was if sides.was != sides.path else ""
    if verdict == "both":
        before = b"" if sides.made is None else base(sides.was)
        if before is None:
            raise MissingBaseError(
                f"you and the template changed {sides.was!a}, and what it was when it was made is "
                "not in the history of the project: give the wheel or the checkout of that "
                "version by --base"
            )
        verdict, content = merge(sides.mine, before, sides.new)
    if moved and content is None:  # else it would be lost at its old place
        content = sides.mine
        verdict = "moved" if verdict in ("same", "yours") else verdict
    return None if verdict == "same" else Change(sides.path, verdict, content, moved)


def merge(mine: bytes, before: bytes, new: bytes) -> tuple[str, bytes | None]:
    """The three of them merged by git, with markers where both changed, after the verdict."""
    with tempfile.TemporaryDirectory(prefix="pretuned-") as scratch:
        names = {"yours": mine, "as it was made": before, "template": new}
        paths = []
        for number, content in enumerate(names.values()):
            paths.append(Path(scratch, str(number)))
            paths[-1].write_bytes(content)
        labels = [word for name in names for word in ("-L", name)]
        command = ["git", "merge-file", "-p", *labels, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode > 127:  # else it is the number of conflicts
        return "unmerged", None
    return "conflict" if done.returncode else "merged", done.stdout


def keep_bases(project: Path, plan: Plan) -> None:
    """Let git keep the template's own version of what differs from it: the next merge needs it."""
    differing = [change.path for change in plan.changes if change.verdict in DIFFERING]
    rows = []
    for number, path in enumerate(path for path in differing if path in plan.new):
        digest = git(project, "hash-object", "-w", "--stdin", content=plan.new[path])
        rows.append(f"100644 blob {digest.decode().strip()}\t{number}\n")
    tree = git(project, "mktree", content="".join(rows).encode()).decode().strip()
    git(project, "update-ref", BASES, tree)


def journal_of(project: Path) -> Path:
    """Where an update keeps what it is about to write."""
    path = git(project, "rev-parse", "--git-path", JOURNAL).decode().strip()
    return Path(project, path)


def write_journal(folder: Path, plan: Plan) -> None:
    """Keep all that an update writes; it happens from when the plan has its name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writes = {}
    for number, change in enumerate(plan.changes):
        if change.content is not None:
            kept = folder / str(number)
            kept.write_bytes(change.content)
            kept.chmod(0o755 if change.path in plan.runnable else 0o644)
            writes[change.path] = kept.name
    deletes = [change.path for change in plan.changes if change.verdict == "deleted"]
    deletes += [change.was for change in plan.changes if change.was]
    about = json.dumps({"writes": writes, "deletes": deletes, "made": plan.made})
    partial = folder / f"{PLAN}.partial"
    partial.write_text(about, encoding="utf-8")
    partial.rename(folder / PLAN)


def apply_journal(project: Path, folder: Path) -> None:
    """Do what the plan says; after a kill in the midst of it, once more."""
    about = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    for name, number in about["writes"].items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = (path if path.exists() else folder / number).stat().st_mode
        write(path, (folder / number).read_bytes(), mode)
    for name in about["deletes"]:
        (project / name).unlink(missing_ok=True)
        with suppress(OSError):  # there are other files in it
            (project / name).parent.rmdir()
    text = json.dumps({"files": about["made"]}, indent=0) + "\n"
    write(project / MANIFEST, text.encode(), 0o644)
    (folder / PLAN).unlink()
    shutil.rmtree(folder)


def write(path: Path, content: bytes, mode: int) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.pretuned")
    partial.write_bytes(content)
    partial.chmod(mode)
    partial.replace(path)


def compare(project: Path, render: Render, base: str) -> Plan:
    """What an update of `project` does; `base` is what `--base` says.

    Raises:
        RefusedError: if it is no project of this template, or the base of a merge can't be had.
    """
    version, answers = answers_of(project)
    made = read_manifest(project)
    with tempfile.TemporaryDirectory(prefix="pretuned-") as scratch:
        folder = render(answers, Path(scratch))
        new = files_of(folder)
        runnable = frozenset(path for path in new if os.access(folder / path, os.X_OK))
    package = str(answers["package_name"])
    moves = {
        was.replace("image_classifier", package): there.replace("image_classifier", package)
        for was, there in MOVES.items()
    }

    def in_history(path: str) -> bytes | None:
        with suppress(RefusedError):
            return git(project, "cat-file", "blob", made[path])
        return None

    if made and not base:
        with suppress(MissingBaseError):
            return Plan(changes_of(project, made, new, in_history, moves), new, runnable)
    with render_of(base or version, answers) as folder:
        old = files_of(folder)
    if made and {path: blob(content) for path, content in old.items()} != made:
        raise RefusedError(
            f"{base or version} is not the template that made {str(project)!a}: it makes other "
            "files of these answers"
        )
    made = made or {path: blob(content) for path, content in old.items()}
    return Plan(changes_of(project, made, new, old.get, moves), new, runnable)


def update(project: Path, render: Render, base: str) -> list[Change] | None:
    """Bring `project` to this version of the template; None: one that was killed is finished.

    Raises:
        RefusedError: if it is no project of this template, its git tree is not clean, or the base
            of a merge can't be had.
    """
    answers_of(project)
    journal = journal_of(project)
    if (journal / PLAN).exists():
        apply_journal(project, journal)
        return None
    if git(project, "status", "--porcelain", "--", "."):
        raise RefusedError(
            f"{str(project)!a} has changes that are not committed: commit them, so that "
            "`git diff` shows what the update does and `git checkout .` undoes it"
        )
    plan = compare(project, render, base)
    keep_bases(project, plan)
    write_journal(journal, plan)
    apply_journal(project, journal)
    return plan.changes


def account(changes: list[Change]) -> str:
    """The changes as lines: a verdict, what it means, and its files."""
    lines = []
    for verdict, meaning in VERDICTS.items():
        names = [
            f"{change.was} -> {change.path}" if change.was else change.path
            for change in changes
            if change.verdict == verdict
        ]
        if names:
            lines += [f"{verdict} ({meaning}):", *(f"  {name}" for name in names)]
    return "\n".join(lines)
