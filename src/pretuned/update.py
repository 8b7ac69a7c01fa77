"""A project that was made before gets what changed here, or other tools.

`pretuned diff`, `pretuned update`, `pretuned add` and `pretuned remove`.

Git does the work: it merges the project, as it is committed, with the project that this template
makes of the same answers. Their common base is the project as it was made. `.pretuned.json` has
git's name for the content of each of its files, so the base is in the project's own history; what
was never committed comes from the version of the template that made it (`--base`).

An update is a tree in git before the first file is written. Killed in the midst of it, the same
command writes the rest.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pretuned_answers import RefusedError, tools

MANIFEST = ".pretuned.json"
NEEDED_GIT = 2, 38  # of which `merge-tree` merges trees
SETTINGS = {  # of git, whatever the user's are
    "core.quotePath": "false",
    "core.safecrlf": "false",
    "merge.conflictStyle": "merge",
    "merge.directoryRenames": "false",
    "merge.renameLimit": "10000",
    "merge.renames": "true",
    "user.email": "pretuned@localhost",
    "user.name": "pretuned",
}
NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # that git has for a content
KEYS = {"sha1": "files", "sha256": "files_sha256"}  # of these names in the manifest, by their kind
# What stands for the answer of a project from before the question, if not the default.
UNASKED = {"tools": "all"}
VERSION = re.compile(r"\d+(\.\d+)*([a-z]+\d+|\.dev\d+)*")
PACKAGE = re.compile(r"src/[^/]+/__init__\.py")

Answers = dict[str, object]
Render = Callable[[Answers, Path], Path]  # answers, where to -> the new folder


class File(NamedTuple):
    """A file in git."""

    mode: str
    blob: str  # the name of its content


Files = dict[str, File]  # by path, with slashes


@dataclass(frozen=True)
class Tools:
    """Tools to add to a project, or to remove from it, by name."""

    add: Sequence[str] = ()
    remove: Sequence[str] = ()

    def change(self, answers: Answers) -> Answers:
        """The answers that a project of these has afterwards.

        Raises:
            RefusedError: if there is no such tool, or one that stays needs one that goes.
        """
        before = answers.get("tools", UNASKED["tools"])
        is_list = isinstance(before, list)
        had = self.named(before) if is_list else tools.chosen(tools.TEMPLATE, str(before))
        gone = {*self.named(self.remove)}
        wanted = {*had, *self.named(self.add)} - gone
        for name in sorted(wanted):
            if needed := tools.with_needs(tools.TEMPLATE, [name]) & gone:
                words = f"{name} needs {', '.join(needed)}".replace("_", "-")
                raise RefusedError(f"{words}: remove {name.replace('_', '-')} too")
        return answers | {"tools": tools.size_of(tools.TEMPLATE, wanted) or sorted(wanted)}

    def needed(self) -> set[str]:
        """The modules of `tools/` that those to add need."""
        names = self.named(self.add)
        return {"__init__", *tools.with_needs(tools.TEMPLATE, names)} if names else set()

    def named(self, names: Sequence[str]) -> list[str]:
        """The folders of the tools of these names, each once."""
        return [*dict.fromkeys(tools.named(tools.TEMPLATE, name) for name in names)]


@dataclass(frozen=True)
class Update:
    """What an update does: trees of git, and what there is to say."""

    tree: str  # the repository afterwards
    new: str  # the commit of the project as the template makes it now
    is_clean: bool  # whether git merged everything
    report: str


class Repository:
    """The git repository of a project, which may be a folder in a larger one."""

    def __init__(self, project: Path) -> None:
        """Of the folder `project`.

        Raises:
            RefusedError: if git is missing or old, or the folder is not in a repository.
        """
        self.project = project
        self.private: Path | None = None  # our own index: the user's stays as it is
        if not shutil.which("git"):
            raise RefusedError("git is needed, and is not there")
        found = re.search(r"(\d+)\.(\d+)", self.git("version"))
        if not found or (int(found[1]), int(found[2])) < NEEDED_GIT:
            raise RefusedError(f"git {'.'.join(map(str, NEEDED_GIT))} or newer is needed")
        try:
            self.prefix = self.git("rev-parse", "--show-prefix")
            self.git("rev-parse", "--verify", "HEAD:./pyproject.toml")
        except RefusedError as error:
            if not re.search(r"not a git repository|Needed a single revision", str(error)):
                raise
            raise RefusedError(
                f"{str(project)!a} is not committed in a git repository, which merges and can undo "
                "changes: git init && git add --all && git commit --message made"
            ) from error
        self.key = KEYS[self.git("rev-parse", "--show-object-format")]
        private = self.git("rev-parse", "--git-path", "pretuned-index")
        place = sha256(os.fsencode(self.prefix)).hexdigest()[:12]
        self.pending = f"refs/worktree/pretuned/{place}/update"  # an update that is being written
        self.private = Path(project, private).absolute()

    def git(self, *words: str, content: str = "", can_conflict: bool = False) -> str:
        """What git prints, without its last line feed.

        Raises:
            RefusedError: if it fails, with what it says.
        """
        # Not the repository that a hook is of, but the settings that its user gave.
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or name.startswith("GIT_CONFIG_")
        }
        own["LC_ALL"] = "C"
        settings = [word for pair in SETTINGS.items() for word in ("-c", "=".join(pair))]
        if self.private and words[0] not in ("status", "ls-files"):
            own["GIT_INDEX_FILE"] = str(self.private)
            # Or git would delete what the user has outside of a sparse checkout.
            settings += ["-c", "core.sparseCheckout=false"]
        done = subprocess.run(
            ["git", *settings, *words],
            cwd=self.project,
            env=own,
            input=os.fsencode(content),
            capture_output=True,
            check=False,
        )
        if done.returncode and not (can_conflict and done.returncode == 1):
            said = os.fsdecode(done.stderr).strip().splitlines() or ["it gives no reason"]
            raise RefusedError(f"git {words[0]} failed in {str(self.project)!a}: {said[0]}")
        return os.fsdecode(done.stdout).removesuffix("\n")

    def files(self, tree: str) -> Files:
        """The files of a tree, by their paths in it; `HEAD:./` is the project."""
        found = {}
        for row in self.git("ls-tree", "-r", "-z", "--full-tree", tree).split("\0"):
            if row:
                about_it, _, path = row.partition("\t")
                mode, _, blob = about_it.split()
                found[path] = File(mode, blob)
        return found

    def tree(self, files: Files) -> str:
        """A tree of files; git refuses paths that lead out of it.

        Raises:
            RefusedError: if git does not have one of them.
        """
        self.forget_index()
        rows = [f"{file.mode} {file.blob}\t{path}\0" for path, file in files.items()]
        self.git("update-index", "-z", "--index-info", content="".join(rows))
        return self.git("write-tree")

    def forget_index(self) -> None:
        """Begin with an empty index; a lock on it is of an update that was killed."""
        assert self.private
        self.private.unlink(missing_ok=True)
        self.private.with_name(f"{self.private.name}.lock").unlink(missing_ok=True)

    def keep(self, folder: Path) -> Files:
        """Put the files of a folder into git."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        paths = [path for path in paths if path.name != MANIFEST]
        words = "hash-object", "-w", "--no-filters", "--stdin-paths"
        blobs = self.git(*words, content="".join(f"{path}\n" for path in paths)).splitlines()
        names = [path.relative_to(folder).as_posix() for path in paths]
        modes = map(mode_of, paths)
        rows = zip(names, modes, blobs, strict=True)
        return {name: File(mode, blob) for name, mode, blob in rows}

    def manifest(self, new: Files) -> File:
        """What `.pretuned.json` holds after an update to the files `new`."""
        blobs = {path: file.blob for path, file in sorted(new.items())}
        text = json.dumps({self.key: blobs}, indent=0) + "\n"
        return File("100644", self.git("hash-object", "-w", "--stdin", content=text))

    def whole(self, project: Files) -> Files:
        """The files of the repository with those of the project in place of what it is now."""
        others = self.files("HEAD")
        kept = {path: file for path, file in others.items() if not path.startswith(self.prefix)}
        own = {f"{self.prefix}{path}": file for path, file in project.items()}
        return kept | own

    def check_seen(self) -> None:
        """Check that git looks at all files of the project, so that it can update and undo them.

        Raises:
            RefusedError: naming the first one at which it does not.
        """
        for row in self.git("ls-files", "-v", "-z").split("\0"):
            letter = row[:1]
            path = row[2:]
            if letter == "S" or letter.islower():
                kind = "skip-worktree" if letter in "Ss" else "assume-unchanged"
                cure = f"git update-index --no-{kind} -- {shlex.quote(path)}"
                if not os.path.lexists(self.project / path):
                    cure = "git sparse-checkout disable"
                raise RefusedError(
                    f"git does not look at {path!a}, and would not update it: {cure}"
                )

    def check_manifest(self) -> None:
        """Check, where nothing else is left to commit, that the manifest is committed.

        Raises:
            RefusedError: if git ignores it.
        """
        if (self.project / MANIFEST).exists() and MANIFEST not in self.files("HEAD:./"):
            raise RefusedError(
                f"{str(self.project / MANIFEST)!a} is not committed, as git ignores it: "
                f"git add --force {MANIFEST} && git commit --message manifest"
            )

    def pending_update(self) -> str | None:
        """The commit of an update that was killed while it wrote; None if there is none."""
        pending = self.git("for-each-ref", "--format=%(objectname)", self.pending)
        if pending and self.git("rev-parse", "HEAD") == self.git("rev-parse", f"{pending}^"):
            return pending
        return None  # or its owner went on without it

    def half_written(self, commit: str) -> Files:
        """The files of the repository where an update to `commit` was killed while it wrote.

        What git has written of a file when it is killed, or the disk is full, is deleted.

        Raises:
            RefusedError: if one that it writes is neither as it was nor as it will be, nor gone,
                as git deletes a file before it writes another.
        """
        root = Path(self.git("rev-parse", "--show-toplevel"))
        before = self.files("HEAD")
        after = self.files(commit)
        found = dict(before)
        begun = []
        for path in before.keys() | after.keys():
            sides = before.get(path), after.get(path)
            if sides[0] == sides[1]:
                continue
            found.pop(path, None)
            file = root / path
            if not os.path.lexists(file):
                continue
            blob = mode = ""
            if file.is_file() and not file.is_symlink():
                blob = self.git("hash-object", "--", path.removeprefix(self.prefix))
                mode = mode_of(file)
            same = [side for side in sides if side and side.blob == blob]
            if not same and mode and sides[1] and self.is_begun(file, f"{commit}:{path}"):
                begun.append(file)
                continue
            if not same:
                raise RefusedError(
                    f"{path!a} was changed since an update of it was killed: commit all that "
                    "you want to keep; then run the same command"
                )
            # If the mode alone differs, the side of that mode; some file systems have none.
            found[path] = next((side for side in same if side.mode == mode), same[0])
        for file in begun:
            file.unlink()
        return found

    def is_begun(self, file: Path, name: str) -> bool:
        """Whether a file is the beginning of the one that git has by this name."""
        whole = self.git("cat-file", "--filters", name)  # with the line ends that it would write
        return os.fsencode(whole).startswith(file.read_bytes())

    def look_for_obstacles(self, tree: str) -> None:
        """Refuse new files where there are others that git does not have, or which it ignores.

        Git itself would overwrite those that it ignores, and their owner would not commit them.
        """
        root = Path(self.git("rev-parse", "--show-toplevel"))
        before = self.files("HEAD").keys()
        new = self.files(tree).keys() - before
        folders = {str(above) for path in new for above in PurePosixPath(path).parents[:-1]}
        for place in sorted((new | folders) - before):
            file = root / place
            is_folder = place in folders and file.is_dir() and not file.is_symlink()
            if os.path.lexists(file) and not is_folder:
                raise RefusedError(f"{str(file)!a} is in the way of a new file: move it")
        self.check_not_ignored(path.removeprefix(self.prefix) for path in new)

    def check_not_ignored(self, paths: Iterable[str]) -> None:
        """Check that git ignores no file at these paths in the project.

        Raises:
            RefusedError: naming the first that it ignores, and the rule.
        """
        names = "".join(f"{path}\0" for path in sorted(paths))
        words = "check-ignore", "--no-index", "-v", "-z", "--stdin"
        found = self.git(*words, content=names, can_conflict=True).split("\0")
        for file, line, rule, path in zip(*(found[at::4] for at in range(4)), strict=False):
            if not rule.startswith("!"):  # which says that it is not ignored
                raise RefusedError(
                    f"git ignores {path!a}, a file of the template, by {rule!a} in line {line} of "
                    f"{file!a}: change that rule, and commit it"
                )

    def write(self, start: str, commit: str) -> None:
        """Write what differs between the trees `start`, which is there, and that of `commit`.

        git refuses to touch a file that is otherwise than in `start`, and leaves all others alone.
        The manifest comes last: if this is killed, and its owner commits what is there, the next
        update brings the rest.
        """
        manifest = f"{self.prefix}{MANIFEST}"
        after = {path: file for path, file in self.files(commit).items() if path != manifest}
        before = {path: file for path, file in self.files(start).items() if path == manifest}
        others = self.tree(after | before)
        self.forget_index()
        self.git("read-tree", start)
        self.git("update-index", "-q", "--really-refresh", can_conflict=True)
        self.git("read-tree", "-m", "-u", start, others)
        self.git("read-tree", "-m", "-u", others, commit)
        self.forget_index()

    def commit(self, tree: str, *parents: str, message: str = "pretuned") -> str:
        """A commit of a tree, on no branch."""
        words = [word for parent in parents for word in ("-p", parent)]
        return self.git("commit-tree", tree, *words, content=message)

    def changes(self, old: str, new: str, *words: str) -> list[list[str]]:
        """What differs between two trees: rows of a letter, as `git status` has them, and paths."""
        how = "-r", "-z", "-M", "-l10000", "--name-status"
        found = iter(self.git("diff-tree", *how, *words, old, new).split("\0")[:-1])
        # A file that moved or was copied has two paths.
        return [[letter, *islice(found, 2 if letter[0] in "RC" else 1)] for letter in found]


def mode_of(file: Path) -> str:
    """The mode that git has for a file, also on a disk from which nothing may be executed."""
    return "100755" if file.stat().st_mode & 0o100 else "100644"


def about(project: Path) -> tuple[str, Answers]:
    """The version of the template that made a project, and the answers.

    Raises:
        RefusedError: if it is no project of this template.
    """
    path = project / "pyproject.toml"
    reason = "has no [tool.pretuned] with version and answers"
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["pretuned"]
        version, answers = known["version"], known["answers"]
        if isinstance(answers, dict) and isinstance(version, str) and VERSION.fullmatch(version):
            return version, answers
    except (LookupError, TypeError):
        pass
    except (OSError, ValueError, RecursionError) as error:
        reason = f"can't be read: {error}"
    raise RefusedError(f"{str(path)!a} {reason}: no project of this template, or a damaged one")


def manifest(repository: Repository) -> dict[str, str]:
    """Git's name for each file as the template made it; none where there is no manifest."""
    path = repository.project / MANIFEST
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8")).get(repository.key, {})
        reason = "it names no contents of git"
        if all(NAME.fullmatch(blob) for blob in files.values()):
            reason = "it names files that are not in the project"
            if not any({"", ".", "..", ".git"} & {*name.split("/")} for name in files):
                return dict(files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)
    raise RefusedError(f"{str(path)!a} can't be read: {reason}")


@contextmanager
def rendered(base: str, answers: Answers) -> Iterator[Path]:
    """A folder with what another version of the template makes of `answers`.

    `base` is its wheel, its checkout, or its number, for which uv asks the package index. It is
    the user who names it: its code runs.
    """
    with tempfile.TemporaryDirectory(prefix="pretuned-") as scratch:
        home = Path(scratch).resolve()
        command = [sys.executable, "-P", "-m", "pretuned"]
        source = Path(base).resolve()
        try:
            if base.endswith(".whl"):
                with zipfile.ZipFile(source) as wheel:
                    wheel.extractall(home / "wheel")
                source = home / "wheel"
            elif source.is_dir():
                source /= "src"
            elif VERSION.fullmatch(base):
                command = ["uvx", f"pretuned=={base}"]
                source = None
            if source and not (source / "pretuned/__main__.py").is_file():
                raise RefusedError(f"--base {base!a} is no wheel, checkout or version of pretuned")
            command += ["--no-input", "--output-dir", str(home / "made")]
            reason = reason_against(command, answers, source, home)
        except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise RefusedError(f"--base {base!a} can't be had: {error}") from error
        if reason:
            raise RefusedError(f"--base {base!a} can't make the project: {reason}")
        yield next((home / "made").iterdir())


def reason_against(command: list[str], answers: Answers, source: Path | None, home: Path) -> str:
    """Run the `command` of another version with `answers`: why it fails; empty if it does not.

    If a question or a choice is newer than that version, its default stands for the answer.
    """
    variables = os.environ | {"PYTHONPATH": str(source or ""), "PYTHONDONTWRITEBYTECODE": "1"}
    words = {}
    for key, value in answers.items():
        if re.fullmatch("[a-z_]+", key):  # no option
            text = ",".join(map(str, value)) or "none" if isinstance(value, list) else value
            words[key] = f"{key}={text}"
    while True:
        done = subprocess.run(
            [*command, *words.values()], cwd=home, env=variables, capture_output=True, check=False
        )
        if not done.returncode:
            return ""
        said = os.fsdecode(done.stderr).strip().splitlines() or ["it gives no reason"]
        newer = re.search(r"unknown (?:key ')?(\w+)", said[-1])
        if not newer or newer[1] not in words:
            return said[-1]
        del words[newer[1]]


def base_of(repository: Repository, base: str, new: Files, version: str, answers: Answers) -> Files:
    """The files of the project as `version` of the template made them, all of them in git.

    `new` are those that it makes of the same `answers` now.

    Raises:
        RefusedError: if git does not have all of them, ignores one, or `base` did not make them.
    """
    made = manifest(repository)
    if base:
        with rendered(base, answers) as folder:
            theirs, _ = about(folder)
            if theirs != version:
                raise RefusedError(f"--base {base!a} is {theirs}, and made no {version}")
            blobs = {path: file.blob for path, file in repository.keep(folder).items()}
        if made and blobs != made:
            raise RefusedError(
                f"--base {base!a} did not make {str(repository.project)!a}: it makes other files "
                "of these answers"
            )
        made = blobs
    mine = repository.files("HEAD:./")
    lacking = made.keys() - mine.keys()  # in git; one that is in the folder is not deleted
    repository.check_not_ignored(path for path in lacking if (repository.project / path).exists())
    modes = {path: file.mode for path, file in (mine | new).items()}
    files = {path: File(modes.get(path, "100644"), blob) for path, blob in made.items()}
    try:
        repository.tree(files)
    except RefusedError as error:
        raise RefusedError(
            f"what the files of {str(repository.project)!a} were when they were made is not in its "
            "git history: give the wheel or the checkout that made it by --base"
        ) from error
    if not files:
        raise RefusedError(
            f"{str(repository.project)!a} has no {MANIFEST} with names of this kind of repository: "
            "it is older than that; give the wheel or the checkout that made it by --base"
        )
    return files


@dataclass(frozen=True)
class Sides:
    """A project as it was made, as it is, and as the template makes it now: trees.

    What its owner deleted is in none of them, so that it stays deleted.
    """

    made: str
    mine: str
    new: str
    all_new: Files  # what its owner deleted, too


def sides_of(repository: Repository, render: Render, base: str, change: Tools) -> Sides:
    """The sides of a project in git.

    Raises:
        RefusedError: if it is no project of this template, or of a later one, or its base can't be
            had; and if its tools change, of an earlier one.
    """
    version, answers = about(repository.project)
    new = made_now(repository, render, answers, version)
    is_same = manifest(repository) == {path: file.blob for path, file in new.items()}
    if change != Tools() and not is_same:
        raise RefusedError(
            f"another template made {str(repository.project)!a}, or its answers in pyproject.toml "
            "have changed since: run pretuned update first"
        )
    made = base_of(repository, base, new, version, answers)
    if change != Tools():
        new = made_now(repository, render, change.change(answers), version)
    mine = repository.files("HEAD:./")
    mine.pop(MANIFEST, None)
    made = with_own_package(made, mine, new)
    rows = repository.changes(repository.tree(made), repository.tree(mine), "--diff-filter=D")
    gone = {path for _, path in rows}
    deleted = {tool_of(path) for path in gone} - {tool_of(path) for path in made.keys() - gone}
    deleted -= {""}
    back = deleted & change.needed()
    left = {
        path: file
        for path, file in new.items()
        if tool_of(path) in back or (path not in gone and tool_of(path) not in deleted)
    }
    made = {path: file for path, file in made.items() if path not in gone}
    return Sides(repository.tree(made), repository.tree(mine), repository.tree(left), new)


def with_own_package(made: Files, mine: Files, new: Files) -> Files:
    """The files `made`, in the package of `new` if the owner has renamed that of `made` to it.

    Or a file that its owner deleted would pass for one that the template adds.
    """
    own = package_of(new)
    old = package_of(made) or own
    if old == own or f"{old}__init__.py" in mine or f"{own}__init__.py" not in mine:
        return made
    return {
        f"{own}{path.removeprefix(old)}" if path.startswith(old) else path: file
        for path, file in made.items()
    }


def package_of(files: Files) -> str:
    """The folder of the package, with a slash at its end; empty if there is none."""
    found = (path.removesuffix("__init__.py") for path in files if PACKAGE.fullmatch(path))
    return next(found, "")


def made_now(repository: Repository, render: Render, answers: Answers, version: str) -> Files:
    """The files of the project that this template makes of `answers`, all of them in git.

    Raises:
        RefusedError: if this template is older than `version`.
    """
    with tempfile.TemporaryDirectory(prefix="pretuned-") as scratch:
        folder = render(answers, Path(scratch))
        ours, _ = about(folder)
        if numbers(version) > numbers(ours):
            raise RefusedError(f"pretuned {version} made this project; this one is older: {ours}")
        return repository.keep(folder)


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    return tuple(map(int, re.split(r"\.?[a-z]", version)[0].split(".")))


def tool_of(path: str) -> str:
    """The tool that a file belongs to, or the module that tools share; empty if it is of none."""
    found = re.match(r"src/[^/]+/tools/(\w+)", path)
    return found[1] if found else ""


def compare(project: Path, render: Render, base: str) -> str:
    """What the owner of a project changed since it was made, what this template did, and what both.

    Raises:
        RefusedError: if it is no project of this template in git, or its base can't be had.
    """
    about(project)  # or it is no project
    repository = Repository(project)
    sides = sides_of(repository, render, base, Tools())
    yours = {row[1]: row for row in repository.changes(sides.made, sides.mine)}
    theirs = {row[1]: row for row in repository.changes(sides.made, sides.new)}
    lines = []
    for path in sorted(yours.keys() | theirs.keys()):
        who = "both" if path in yours and path in theirs else "yours" if path in yours else "theirs"
        letter, *paths = theirs.get(path) or yours[path]
        lines.append(f"{who:<6}  {letter[0]}  {' -> '.join(paths)}")
    return "\n".join(lines)


def plan(repository: Repository, render: Render, base: str, change: Tools) -> Update:
    """What an update of a project does; nothing is written but objects of git."""
    sides = sides_of(repository, render, base, change)
    made = repository.commit(sides.made)
    names = {"worktree/yours": sides.mine, "worktree/template": sides.new}
    for name, tree in names.items():  # as conflicts are marked
        repository.git("update-ref", f"refs/{name}", repository.commit(tree, made))
    words = "merge-tree", "--write-tree", "--name-only", "--messages", *names
    found, _, messages = repository.git(*words, can_conflict=True).partition("\n\n")
    merged, *conflicts = found.splitlines()
    for name in names:
        repository.git("update-ref", "-d", f"refs/{name}")
    own = repository.files("HEAD:./").get(MANIFEST)
    if manifest(repository) != {path: file.blob for path, file in sides.all_new.items()}:
        own = repository.manifest(sides.all_new)
    assert own  # `check_manifest` has seen it
    project = repository.files(merged) | {MANIFEST: own}
    rows = repository.changes("HEAD:./", repository.tree(project))
    if len(rows) > 1:  # it goes without saying that the manifest changes, too
        rows = [row for row in rows if row[1:] != [MANIFEST]]
    lines = [f"{letter[0]}  {' -> '.join(paths)}" for letter, *paths in rows]
    lines += [line for line in messages.splitlines() if line.startswith("CONFLICT")]
    return Update(
        tree=repository.tree(repository.whole(project)),
        new=repository.commit(repository.tree(sides.all_new)),
        is_clean=not conflicts,
        report="\n".join(lines),
    )


def update(project: Path, render: Render, base: str) -> tuple[str, bool]:
    """Bring `project` to this version of the template, or finish an update that was killed.

    Returns the changes, as lines, and whether git merged all of them.

    Raises:
        RefusedError: if it is no project of this template, its git tree is not clean, the base of
            the merge can't be had, or a file was changed since an update was killed.
    """
    about(project)  # or it is no project
    repository = Repository(project)
    return carry_out(repository, "update", lambda found: plan(found, render, base, Tools()))


def change_tools(project: Path, render: Render, change: Tools) -> tuple[str, bool]:
    """Add tools to `project` or remove some, and what its texts say of them.

    Returns and raises what `update` does, and refuses a tool that another one needs.
    """
    change.named([*change.add, *change.remove])  # wrong names are told before anything is done
    about(project)  # and so is a folder that is no project
    return carry_out(
        Repository(project), str(change), lambda found: plan(found, render, "", change)
    )


def carry_out(
    repository: Repository, request: str, make_plan: Callable[[Repository], Update]
) -> tuple[str, bool]:
    """Do what was planned for a `request`, or finish what was killed; return what is said of it.

    Raises:
        RefusedError: if what was killed, and is finished now, was another request; or if one of
            its files was changed since.
    """
    repository.check_seen()
    pending = repository.pending_update()
    head = repository.files("HEAD")
    there = head if pending is None else repository.half_written(pending)
    if pending is not None and there != head:
        start = repository.tree(there)
    else:  # nothing was killed, or it had written nothing, or that was undone
        left = repository.git("status", "--porcelain", "--untracked-files=all", "--", ".")
        if left:
            raise RefusedError(
                f"{str(repository.project)!a} has changes that are not committed, such as "
                f"{left.splitlines()[0][3:]!a}: commit them, so that git can undo the update, "
                "or let git ignore them"
            )
        repository.check_manifest()
        found = make_plan(repository)
        repository.look_for_obstacles(found.tree)
        verdict = "clean" if found.is_clean else "conflict"
        message = f"{verdict}\n{found.new}\n{request}\n{found.report}"
        pending = repository.commit(found.tree, "HEAD", message=message)
        repository.git("update-ref", repository.pending, pending)
        start = "HEAD"
    try:
        repository.write(start, pending)
    except RefusedError as error:
        raise RefusedError(f"{error}; run the same command to finish") from error
    about_it = repository.git("log", "-1", "--format=%B", pending).split("\n")
    verdict, new, done, *lines = about_it
    tree = repository.git("rev-parse", f"{new}^{{tree}}")
    repository.git("update-ref", f"refs/pretuned/made/{tree}", tree)  # git keeps what is in it
    repository.git("update-ref", "-d", repository.pending)
    if done != request:
        settle = "" if verdict == "clean" else "settle its conflicts (git diff --check), "
        raise RefusedError(
            f"another command was killed, and is finished only now: {settle}commit its changes, "
            "then run this one again"
        )
    return "\n".join(lines).strip(), verdict == "clean"
