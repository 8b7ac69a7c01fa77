"""A project gets what changed in the template since it was made, and loses nothing of its owner."""

import json
import os
import shlex
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import PROJECT, RENDER, ROOT, contents, git_until, python, run

from pretuned import cli, update
from pretuned_answers import RefusedError, tools

pytestmark = pytest.mark.usefixtures("renders_once")
AS = ("-c", "user.name=a", "-c", "user.email=a@b.c")
OLD = "src/photos/tools/probe/layers.py"
NEW = "src/photos/tools/head_layers/network.py"
HOOKS = ".pre-commit-config.yaml"
ANSWERS = {"project_slug": "photos", "package_name": "photos", "tools": "all"}
VERSION = f'version = "{update.about(PROJECT)[0]}"'
LAYERS = (PROJECT / "src/image_classifier/tools/head_layers/network.py").read_bytes()


def git(folder, *words):
    """What git prints in a folder."""
    return run("git", *AS, *words, folder=folder).stdout


def commit(folder):
    """Commit all that is in a folder."""
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--allow-empty", "--message=all")


def write(path, content):
    """Write a file in a folder that there may not be yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def edit(path, line, at_end=True):
    """Add a line to a file."""
    text = path.read_bytes()
    path.write_bytes(text + line if at_end else line + text)


def as_made(folder, old):
    """Make a project as an older template would have: with these files in place of some."""
    manifest = folder / update.MANIFEST
    made = json.loads(manifest.read_text())["files"]
    for name, content in old.items():
        made.pop(name, None)
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            write(folder / name, content)
            made[name] = run("git", "hash-object", name, folder=folder).stdout.strip()
    manifest.write_text(json.dumps({"files": made}))


@pytest.fixture
def project(render):
    """A project whose owner changed, deleted and added files, made by an older template."""
    folder = render(**ANSWERS)
    git(folder, "init")
    gone = dict.fromkeys((NEW, "docs/guide.md", "src/photos/tools/lora/network.py"))
    old = {OLD: LAYERS, "docs/old.md": b"old\n", "docs/older.md": b"old\n" * 9}
    as_made(folder, gone | old)
    commit(folder)
    edit(folder / "Makefile", b"# mine\n")
    edit(folder / OLD, b"# mine\n")
    edit(folder / "README.md", b"mine\n")
    edit(folder / "AGENTS.md", b"mine\n", at_end=False)
    edit(folder / "docs/older.md", b"mine\n")
    (folder / "sky.yaml").unlink()
    shutil.rmtree(folder / "src/photos/tools/lora")
    write(folder / "src/photos/mine.py", b"MINE = 1\n")
    commit(folder)
    return folder


@pytest.fixture
def newer(tmp_path):
    """A function that renders a newer template: other files, of which some moved."""
    made = tmp_path / "newer" / "photos"

    def again(answers, folder):
        if not made.exists():
            cli._render_again(answers, made.parent)
            edit(made / "README.md", b"theirs\n", at_end=False)
            edit(made / "AGENTS.md", b"theirs\n", at_end=False)
            edit(made / "LICENSE", b"theirs\n")
            edit(made / "sky.yaml", b"# theirs\n")
            edit(made / NEW, b"# theirs\n", at_end=False)
            write(made / "run.sh", b"true\n")
            (made / "run.sh").chmod(0o755)
        return Path(shutil.copytree(made, folder / "photos"))

    return again


CHANGES = """\
M  AGENTS.md
M  LICENSE
M  README.md
A  docs/guide.md
D  docs/old.md
A  run.sh
R  src/photos/tools/probe/layers.py -> src/photos/tools/head_layers/network.py
CONFLICT (content): Merge conflict in AGENTS.md
CONFLICT (modify/delete): docs/older.md deleted in worktree/template and modified in \
worktree/yours.  Version worktree/yours of docs/older.md left in tree."""


def test_an_answer_of_a_project_of_before_is_read_by_its_former_name(tmp_path):
    project = cli._render_again({"licence": "Apache-2.0", "tools": "none"}, tmp_path)
    assert "Apache License" in (project / "LICENSE").read_text(encoding="utf-8")
    assert 'license = "Apache-2.0"\ndocker' in (project / "pyproject.toml").read_text()


def test_a_project_from_before_tools_were_asked_for_has_all_of_them(tmp_path):
    project = cli._render_again({"project_slug": "photos"}, tmp_path)
    assert update.about(project)[1]["tools"] == "all"


def test_a_project_keeps_a_name_and_an_address_that_a_new_one_may_not_have(tmp_path):
    answers = {"project_slug": "cat", "package_name": "torch", "tools": "none"}
    answers["email"] = "not an address"
    with pytest.raises(RefusedError, match=r"project_slug 'cat' is taken"):
        cli.check(answers)
    assert cli._render_again(answers, tmp_path).name == "cat"
    with pytest.raises(RefusedError, match=r"project_slug '\.\./x' must match"):
        cli._render_again(answers | {"project_slug": "../x"}, tmp_path)


def test_an_update_brings_what_is_new_and_keeps_what_is_yours(project, newer):
    found = update.compare(project, newer, "").splitlines()
    for line in ("yours   M  Makefile", "both    M  README.md", "theirs  M  LICENSE"):
        assert line in found
    assert git(project, "status", "--porcelain") == ""
    said, is_clean = update.update(project, newer, "")
    assert said == CHANGES
    assert not is_clean
    readme = (project / "README.md").read_text()
    assert readme.startswith("theirs\n")
    assert readme.endswith("mine\n")
    assert (project / NEW).read_bytes() == b"# theirs\n" + LAYERS + b"# mine\n"
    assert not (project / OLD).exists()
    first = (project / "AGENTS.md").read_text().splitlines()[:5]
    assert [line[:7] for line in first] == ["<<<<<<<", "mine", "=======", "theirs", ">>>>>>>"]
    assert (project / "docs/older.md").read_bytes() == b"old\n" * 9 + b"mine\n"
    assert (project / "src/photos/mine.py").read_text() == "MINE = 1\n"
    assert os.access(project / "run.sh", os.X_OK)
    deleted = project / "sky.yaml", project / "src/photos/tools/lora"
    assert not any(path.exists() for path in deleted)
    assert git(project, "for-each-ref", "refs/pretuned/made")  # of all work trees, and no less
    assert not git(project, "for-each-ref", "refs/worktree")  # what it needed for itself
    # Once more, nothing changes: what is the owner's stays so, and what was deleted.
    commit(project)
    assert update.update(project, newer, "") == ("", True)
    assert git(project, "status", "--porcelain") == ""
    assert not any(path.exists() for path in deleted)
    found = update.compare(project, newer, "").splitlines()
    assert {line[:5] for line in found} == {"yours"}


def test_a_change_that_its_owner_had_made_before_the_template_is_told_by_the_manifest(render):
    folder = render(project_slug="photos", tools="none")
    git(folder, "init")
    new = (folder / "LICENSE").read_bytes()
    as_made(folder, {"LICENSE": b"old\n"})
    commit(folder)
    (folder / "LICENSE").write_bytes(new)
    commit(folder)
    said = update.update(folder, cli._render_again, "")
    assert said == (f"M  {update.MANIFEST}", True)
    assert git(folder, "status", "--porcelain") == f" M {update.MANIFEST}\n"


def test_the_mode_of_a_file_is_known_on_a_disk_from_which_nothing_may_be_executed(
    render, monkeypatch
):
    folder = render(project_slug="photos", tools="none")
    git(folder, "init")
    commit(folder)
    real = os.access
    no_execution = lambda path, mode: "pretuned-" not in str(path) and real(path, mode)  # noqa: E731
    monkeypatch.setattr(os, "access", no_execution)  # as Linux answers on such a disk
    assert update.compare(folder, cli._render_again, "") == ""


def test_a_project_below_a_folder_whose_name_is_no_utf8_is_made_and_updated(
    here, capsys, monkeypatch
):
    monkeypatch.setattr(cli, "_render", RENDER)  # there, and no copy from elsewhere
    latin = here / os.fsdecode(b"caf\xe9")
    sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    assert cli.main(["--no-input", "tools=none", "--output-dir", str(latin)]) == 0
    assert capsys.readouterr().out.startswith(f"{here}/caf\\udce9/image-classifier is ready: ")
    git(here, "init")
    commit(here)
    assert update.update(latin / "image-classifier", cli._render_again, "") == ("", True)


def test_what_its_owner_deleted_stays_deleted_when_the_package_gets_another_name(render):
    folder = render(project_slug="photos", tools="none")
    git(folder, "init")
    commit(folder)
    (folder / "src/photos/models/torchvision.py").unlink()
    (folder / "src/photos").rename(folder / "src/birds")
    edit(folder / "src/birds/train.py", b"# mine\n")
    answers = (folder / "pyproject.toml").read_text()
    answers = answers.replace('package_name = "photos"', 'package_name = "birds"')
    (folder / "pyproject.toml").write_text(answers)
    commit(folder)
    said, is_clean = update.update(folder, cli._render_again, "")
    assert is_clean
    assert "M  tests/test_loop.py" in said.splitlines()  # which imports the package by its name
    assert not [line for line in said.splitlines() if "src/" in line]
    assert not (folder / "src/birds/models/torchvision.py").exists()
    assert (folder / "src/birds/train.py").read_bytes().endswith(b"# mine\n")


def test_a_package_that_its_owner_alone_has_renamed_keeps_that_name(render):
    folder = render(project_slug="photos", tools="none")
    git(folder, "init")
    commit(folder)
    (folder / "src/photos").rename(folder / "src/birds")
    commit(folder)
    assert update.update(folder, cli._render_again, "") == ("", True)


def test_a_file_of_the_owner_stays_in_its_folder_when_the_files_of_the_template_move(render):
    folder = render(project_slug="photos", tools="none")
    git(folder, "init")
    page = (folder / "docs/extend.md").read_bytes()
    as_made(folder, {"docs/extend.md": None, "pages/extend.md": page})
    write(folder / "pages/mine.md", b"mine\n")
    commit(folder)
    said, is_clean = update.update(folder, cli._render_again, "")
    assert (said, is_clean) == ("R  pages/extend.md -> docs/extend.md", True)
    assert (folder / "pages/mine.md").read_bytes() == b"mine\n"


def test_all_tools_stay_deleted_with_their_folder(render):
    folder = render(project_slug="photos", tools="few")
    git(folder, "init")
    commit(folder)
    shutil.rmtree(folder / "src/photos/tools")
    commit(folder)
    assert update.update(folder, cli._render_again, "") == ("", True)
    update.change_tools(folder, cli._render_again, update.Tools(add=["lora"]))
    back = {path.name for path in folder.glob("src/photos/tools/*")}
    assert back >= {"__init__.py", "lora"}  # what it is imported by comes with it
    assert not back & {*tools.FEW}


def test_an_update_that_is_killed_at_any_moment_is_finished_by_the_same_command(
    project, newer, tmp_path, monkeypatch
):
    shutil.copytree(project, tmp_path / "whole")
    call = update.Repository.git
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(
            update.Repository, "git", lambda *all_, **more: calls.append(1) or call(*all_, **more)
        )
        expected = update.update(tmp_path / "whole", newer, "")
    git(tmp_path / "whole", "gc", "--prune=now")  # what the next merge needs is kept
    for moment in range(4, len(calls), 5):
        killed = tmp_path / "killed"
        shutil.copytree(project, killed)
        with monkeypatch.context() as patch:
            patch.setattr(update.Repository, "git", git_until(moment))
            with pytest.raises(KeyboardInterrupt):
                update.update(killed, newer, "")
        if (killed / "run.sh").exists():  # git itself was killed while it wrote
            shutil.copy(project / "LICENSE", killed / "LICENSE")
            (killed / "docs/guide.md").unlink()
            cut_short(killed / "README.md")
            write(killed / ".git/pretuned-index.lock", b"")
        if not git(killed, "status", "--porcelain") or git(killed, "for-each-ref", "refs/worktree"):
            assert update.update(killed, newer, "") == expected
        assert seen(killed) == seen(tmp_path / "whole")
        shutil.rmtree(killed)


def seen(project):
    """The files of a project, and its manifest, without git."""
    files = contents(project)
    made = (project / update.MANIFEST).read_bytes()
    return {name: file for name, file in files.items() if ".git/" not in name}, made


def test_what_was_changed_since_an_update_was_killed_is_not_lost(project, newer, monkeypatch):
    own = update.Repository.write
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(update.Repository, "write", lambda *words: [own(*words), killed()])
        update.update(project, newer, "")
    edit(project / "LICENSE", b"mine\n")
    begun = [project / name for name in ("README.md", "run.sh")]
    for path in begun:
        cut_short(path)
    with pytest.raises(RefusedError, match="'LICENSE' was changed since"):
        update.update(project, newer, "")
    assert (project / "LICENSE").read_bytes().endswith(b"mine\n")
    assert all(path.exists() for path in begun)  # or a commit of all would delete them
    git(project, "checkout", "LICENSE")
    edit(project / "Makefile", b"# not committed\n")  # which the update does not touch
    write(project / "docs/new.md", b"not committed\n")
    git(project, "add", "docs/new.md")
    update.update(project, newer, "")
    assert b"theirs\n" in (project / "LICENSE").read_bytes()
    assert (project / "Makefile").read_bytes().endswith(b"# not committed\n")
    assert (project / "docs/new.md").read_bytes() == b"not committed\n"


def test_an_owner_may_go_on_without_an_update_that_was_killed(project, newer, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(update.Repository, "write", lambda *_, **__: killed())
        update.update(project, newer, "")
    edit(project / "LICENSE", b"mine\n")
    commit(project)  # its owner goes on without that update
    assert update.update(project, newer, "")[0].startswith("M  AGENTS.md\nM  LICENSE\n")
    assert b"mine\n" in (project / "LICENSE").read_bytes()


def test_what_a_killed_update_has_written_may_be_committed_and_the_next_brings_the_rest(
    project, newer, monkeypatch
):
    own = update.Repository.git
    writes = []

    def until_the_manifest(repository, *words, **more):
        writes.append("-u" in words)
        return killed() if sum(writes) == 2 else own(repository, *words, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(update.Repository, "git", until_the_manifest)
        update.update(project, newer, "")
    git(project, "checkout", "LICENSE")
    (project / "run.sh").unlink()
    commit(project)
    update.update(project, newer, "")
    assert (project / "run.sh").read_bytes() == b"true\n"
    assert (project / "LICENSE").read_bytes().endswith(b"theirs\n")


@pytest.mark.parametrize("ending", ["eol=crlf", "autocrlf"])
def test_files_that_end_lines_as_windows_does_are_updated_also_after_a_kill(
    project, newer, monkeypatch, ending
):
    (project / ".gitattributes").write_text("* text=auto eol=crlf\n")
    if ending == "autocrlf":
        (project / ".gitattributes").unlink()
        git(project, "config", "core.autocrlf", "true")
    commit(project)
    git(project, "rm", "-r", "--cached", "--quiet", ".")
    git(project, "reset", "--hard")
    assert b"\r\n" in (project / "LICENSE").read_bytes()
    own = update.Repository.git

    def until_written(repository, *words, **more):
        said = own(repository, *words, **more)
        return killed() if "-u" in words else said

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(update.Repository, "git", until_written)
        update.update(project, newer, "")
    (project / "LICENSE").unlink()  # as git deletes a file before it writes another
    cut_short(project / "README.md")
    update.update(project, newer, "")
    assert (project / "LICENSE").read_bytes().endswith(b"theirs\r\n")
    assert (project / "README.md").read_bytes().endswith(b"mine\r\n")
    changed = git(project, "status", "--porcelain", "LICENSE", "run.sh", "Makefile").splitlines()
    assert changed == [" M LICENSE", "?? run.sh"]


def test_what_was_undone_after_a_kill_stays_undone(project, newer, monkeypatch):
    own = update.Repository.write
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(update.Repository, "write", lambda *words: [own(*words), killed()])
        update.update(project, newer, "")
    assert (project / "run.sh").exists()
    git(project, "stash", "--include-untracked", "--", ".")
    write(project / "note.txt", b"mine\n")
    with pytest.raises(RefusedError, match=r"changes that are not committed, such as 'note\.txt'"):
        update.update(project, newer, "")
    (project / "note.txt").unlink()
    update.update(project, cli._render_again, "")  # another version
    assert not (project / "run.sh").exists()


def cut_short(path):
    """Leave of a file what git leaves of one in which it is killed, or the disk is full."""
    path.write_bytes(path.read_bytes()[:20])


def killed():
    """A kill."""
    raise KeyboardInterrupt


def test_a_project_without_names_of_contents_is_updated_from_the_template_that_made_it(
    project, newer, tmp_path
):
    python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, folder=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    (project / update.MANIFEST).unlink()
    commit(project)
    with pytest.raises(RefusedError, match=r"has no .pretuned.json.* by --base"):
        update.compare(project, newer, "")
    for base in (wheel, ROOT):
        found = update.compare(project, newer, str(base)).splitlines()
        assert "both    M  README.md" in found
        assert "theirs  M  LICENSE" in found
        assert not [line for line in found if line.endswith("slurm.sh")]  # nobody changed it
    write(tmp_path / "argparse.py", b"raise SystemExit('planted')")
    (tmp_path / "empty").mkdir()
    for base in (tmp_path / "empty", tmp_path / "no.whl", "../x", "0.0.0; true"):
        with pytest.raises(RefusedError, match="--base "):
            update.compare(project, newer, str(base))


@pytest.mark.parametrize("answer", ["", "pre_commit = false\n"])
def test_a_project_older_than_a_question_gets_its_default_or_the_answer_that_it_names(
    answer, render
):
    project = render(**ANSWERS)
    text = (project / "pyproject.toml").read_text().replace("pre_commit = true\n", "")
    as_made(project, {HOOKS: None, "pyproject.toml": text.encode()})
    git(project, "init")
    commit(project)
    (project / "pyproject.toml").write_text(text.replace("tools =", f"{answer}tools ="))
    commit(project)
    said, is_clean = update.update(project, cli._render_again, "")
    assert is_clean
    assert (f"A  {HOOKS}" in said.splitlines()) == (project / HOOKS).exists() == (not answer)


def test_a_project_in_a_larger_repository_is_updated_alone(render, newer, tmp_path):
    for name in ("one", "two"):
        shutil.move(render(**ANSWERS), tmp_path / "all" / name)
    git(tmp_path / "all", "init")
    commit(tmp_path / "all")
    write(tmp_path / "all/notes.txt", b"not committed\n")  # which an update does not touch
    said, is_clean = update.update(tmp_path / "all/one", newer, "")
    assert is_clean
    assert "M  LICENSE" in said
    changed = git(tmp_path / "all", "status", "--porcelain").splitlines()
    changed.remove("?? notes.txt")
    assert changed
    assert all(line[3:].startswith("one/") for line in changed)


def test_an_update_that_was_killed_is_none_of_another_project_in_the_repository(tmp_path):
    git(tmp_path, "init")
    folders = [made(tmp_path / name) for name in ("one", "two")]
    commit(tmp_path)
    one, two = map(update.Repository, folders)
    pending = one.commit("HEAD^{tree}", "HEAD")
    one.git("update-ref", one.pending, pending)
    assert (one.pending_update(), two.pending_update()) == (pending, None)


def test_a_repository_whose_names_are_sha256_is_updated_too(render, newer):
    folder = render(**ANSWERS)
    git(folder, "init", "--object-format=sha256")
    commit(folder)
    said, is_clean = update.update(folder, newer, "")
    assert is_clean
    assert "M  LICENSE" in said
    commit(folder)
    assert update.update(folder, newer, "") == ("", True)


def test_a_base_makes_a_project_of_tools_by_name(tmp_path):
    for names in (["calibration", "search"], []):
        answers = ANSWERS | {"tools": names, "ci": "none", "docker": False}
        made = contents(cli._render_again(answers, tmp_path / str(len(names))))
        with update.rendered(str(ROOT), answers) as folder:
            assert contents(folder) == made


def test_of_an_answer_that_is_newer_than_the_base_that_has_its_default():
    newer = {"shiny": "yes", "license": "MPL-2.0"}
    with update.rendered(str(ROOT), ANSWERS | {"tools": "none"} | newer) as folder:
        answers = update.about(folder)[1]
    assert (answers["license"], answers["tools"]) == ("MIT", "none")
    refused = pytest.raises(RefusedError, match="can't make the project: ERROR: project_slug '-'")
    with refused, update.rendered(str(ROOT), {"project_slug": "-"}):
        pass


def test_what_cannot_be_updated_is_refused_in_a_line(project, tmp_path, capsys):
    def said(*words):
        assert cli.main(["update", *map(str, words)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "no project of this template" in said(tmp_path)
    assert "is not committed in a git repository" in said(made(tmp_path / "loose"))
    write(project / "new.txt", b"")
    assert "has changes that are not committed, such as 'new.txt'" in said(project)
    commit(project)
    assert "did not make" in said(project, "--base", ROOT)
    text = (project / "pyproject.toml").read_text()
    for old, new, reason in (
        ('tools = "all"', "tools = 3", "no such answer: tools = 3"),
        ('license = "MIT"\ndocker', 'license = "GPL"\ndocker', "no such answer: license = 'GPL'"),
        ("[tool.pretuned.answers]", "answers = []\n[tool.x]", "no project of this template"),
        ("[tool.pretuned]", "<<<<<<<", "can't be read"),
        (VERSION, 'version = "99.0"', "pretuned 99.0 made this project"),
        (VERSION, 'version = "."', "no project of this template"),
    ):
        assert old in text
        (project / "pyproject.toml").write_text(text.replace(old, new))
        commit(project)
        assert reason in said(project)
    (project / "pyproject.toml").write_text(text)
    outside = tmp_path / "output" / "outside"
    write(outside, b"precious")
    manifest = json.loads((project / update.MANIFEST).read_text())
    name = run("git", "hash-object", "-w", outside, folder=project).stdout.strip()
    for files, reason in (
        ({"../outside": name}, "it names files that are not in the project"),
        ({".git/HEAD": name}, "it names files that are not in the project"),
        ({"a//../b": name}, "it names files that are not in the project"),
        ({"README.md": "0" * 40}, "by --base"),
        ({"README.md": "\0"}, "it names no contents of git"),
    ):
        text = json.dumps({"files": manifest["files"] | files})
        (project / update.MANIFEST).write_text(text)
        commit(project)
        assert reason in said(project)
    (project / update.MANIFEST).write_text("[" * 10**5)
    commit(project)
    assert "can't be read" in said(project)
    assert outside.read_bytes() == b"precious"


def test_files_in_the_way_of_an_update_stop_it_before_it_writes(project, newer, tmp_path):
    (project / ".gitignore").write_text("run.sh\n")
    commit(project)
    write(project / "run.sh", b"precious")  # which git ignores
    with pytest.raises(RefusedError, match=r"run\.sh' is in the way of a new file"):
        update.update(project, newer, "")
    assert (project / "run.sh").read_bytes() == b"precious"
    (project / "run.sh").unlink()
    write(tmp_path / "elsewhere/guide.md", b"precious")  # where a link of the owner leads
    shutil.rmtree(project / "docs")
    (project / "docs").symlink_to(tmp_path / "elsewhere")
    commit(project)
    with pytest.raises(RefusedError, match=r"guide\.md' is in the way of a new file"):
        update.update(project, newer, "")
    assert (tmp_path / "elsewhere/guide.md").read_bytes() == b"precious"
    assert git(project, "status", "--porcelain") == ""


def made(folder):
    """A folder with nothing but what a project says of itself."""
    write(folder / "pyproject.toml", b'[tool.pretuned]\nversion = "0.9.0"\nanswers = {}\n')
    return folder


def repository_in(folder):
    """The repository of a project that says what it is, and no more."""
    made(folder)
    git(folder, "init")
    commit(folder)
    return update.Repository(folder)


def test_a_base_of_another_version_than_that_of_the_project_is_refused(tmp_path, monkeypatch):
    other = made(tmp_path / "other")
    monkeypatch.setattr(update, "rendered", lambda *_: nullcontext(other))
    with pytest.raises(RefusedError, match=r"--base 'x\.whl' is 0\.9\.0, and made no 0\.8\.0$"):
        update.base_of(repository_in(tmp_path / "one"), "x.whl", {}, "0.8.0", {})


def test_a_base_by_its_number_is_that_of_the_index_and_gets_answers_alone(monkeypatch):
    call = Mock(return_value=SimpleNamespace(returncode=1, stderr=b"offline"))
    monkeypatch.setattr(update.subprocess, "run", call)
    answers = {"ci": "none", "--output-dir": "/"}
    with pytest.raises(RefusedError, match="offline"), update.rendered("0.9.0", answers):
        pass
    command = call.call_args.args[0]
    assert command[:2] == ["uvx", "pretuned==0.9.0"]
    assert command[-1] == "ci=none"


def test_git_that_is_old_or_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(update.Repository, "git", lambda *_, **__: "git version 2.37.9")
    with pytest.raises(RefusedError, match=r"git 2\.38 or newer is needed"):
        update.Repository(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RefusedError, match="git is needed, and is not there"):
        update.Repository(tmp_path)


def test_an_older_template_makes_no_project_of_a_newer_one(tmp_path):
    repository = repository_in(tmp_path)

    def render(_, folder):
        return made(folder / "x")

    update.made_now(repository, render, {}, "0.9.0")
    with pytest.raises(RefusedError, match=r"pretuned 0.10.0 made this project; this one is older"):
        update.made_now(repository, render, {}, "0.10.0")


def test_git_is_asked_of_the_project_whatever_repository_a_hook_is_of(tmp_path, monkeypatch):
    repository_in(tmp_path / "one")
    repository_in(tmp_path / "two")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "two/.git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "two"))
    top = update.Repository(tmp_path / "one").git("rev-parse", "--show-toplevel")
    assert Path(top) == tmp_path / "one"


def with_files(repository, *paths):
    """The tree of a repository with more files."""
    blob = repository.git("hash-object", "-w", "--stdin", content="new")
    new = dict.fromkeys(paths, update.File("100644", blob))
    return repository.tree(repository.files("HEAD") | new)


def test_a_link_that_leads_nowhere_and_a_file_in_place_of_a_folder_are_in_the_way_too(tmp_path):
    repository = repository_in(tmp_path)
    (tmp_path / "run.sh").symlink_to("nowhere")
    with pytest.raises(RefusedError, match=r"run\.sh' is in the way of a new file"):
        repository.look_for_obstacles(with_files(repository, "run.sh"))
    write(tmp_path / "a/tool", b"precious")  # which git would delete if it ignores it
    with pytest.raises(RefusedError, match=r"a/tool' is in the way of a new file"):
        repository.look_for_obstacles(with_files(repository, "a/tool/x/code.py"))
    repository.look_for_obstacles(with_files(repository, "a/code.py"))


def test_files_that_git_would_not_commit_do_not_come(tmp_path):
    write(tmp_path / ".gitignore", b"runs/\n")
    repository = repository_in(tmp_path)
    new = with_files(repository, "a/runs/x.py")
    said = (
        r"ignores 'a/runs/x\.py', a file of the template, by 'runs/' in line 1 of '\.gitignore': c"
    )
    with pytest.raises(RefusedError, match=said):
        repository.look_for_obstacles(new)
    (tmp_path / ".gitignore").write_text("runs/\n!/a/runs/\n")
    repository.look_for_obstacles(new)


def test_a_file_that_git_ignores_is_named_and_passes_for_no_deleted_one(render, tmp_path):
    home = tmp_path / "all"
    project = shutil.move(render(project_slug="photos", package_name="photos"), home / "photos")
    git(home, "init")
    (home / ".gitignore").write_text("wandb/\n")
    git(home, "add", "--all")
    git(home, "commit", "--message=all")
    with pytest.raises(RefusedError, match=r"ignores 'src/photos/tools/wandb/\S*', .* by 'wandb/'"):
        update.compare(project, cli._render_again, "")
    (home / ".gitignore").write_text("wandb/\n!/photos/**/wandb/\n")
    git(home, "add", "--all")
    git(home, "commit", "--message=all")
    assert update.compare(project, cli._render_again, "") == ""


def test_names_with_any_character_and_moves_beyond_the_users_limit_are_found(tmp_path):
    repository = repository_in(tmp_path)
    git(tmp_path, "config", "diff.renameLimit", "1")
    files = {f"{name}\u2028.txt": f"{name}\n" * 30 for name in "ab"}
    trees = []
    for folder, more in (("old", ""), ("new", "mine\n")):
        for name, text in files.items():
            write(tmp_path / folder / name, (text + more).encode())
        commit(tmp_path)
        trees.append(git(tmp_path, "rev-parse", f"HEAD:{folder}").strip())
        shutil.rmtree(tmp_path / folder)
    moved = {f"c{name}": repository.files(trees[1])[name] for name in files}
    rows = repository.changes(trees[0], repository.tree(moved))
    assert [(row[0][0], *row[1:]) for row in rows] == [("R", name, f"c{name}") for name in files]


@pytest.mark.parametrize("how", ["--skip-worktree", "--assume-unchanged"])
def test_files_that_git_does_not_look_at_are_named(tmp_path, how):
    repository = repository_in(tmp_path)
    repository.check_seen()
    git(tmp_path, "update-index", how, "pyproject.toml")
    cure = f"git update-index {how.replace('--', '--no-')} -- pyproject.toml"
    with pytest.raises(RefusedError, match=f"does not look at 'pyproject.toml'.*{cure}"):
        repository.check_seen()
    with pytest.raises(RefusedError, match=r"does not look at 'pyproject\.toml'"):
        update.carry_out(repository, "update", Mock())
    git(tmp_path, *cure.split()[1:])
    repository.check_seen()


def test_of_a_sparse_checkout_the_whole_is_wanted(tmp_path):
    repository = repository_in(tmp_path)
    git(tmp_path, "update-index", "--skip-worktree", "pyproject.toml")
    (tmp_path / "pyproject.toml").unlink()  # a line that names it alone would have it deleted
    with pytest.raises(RefusedError, match=r"would not update it: git sparse-checkout disable$"):
        repository.check_seen()


def test_a_file_outside_of_a_sparse_checkout_stays(tmp_path):
    write(tmp_path / "other/mine.txt", b"mine\n")
    (tmp_path / "one").mkdir()
    git(tmp_path, "init")
    made(tmp_path / "one")
    commit(tmp_path)
    git(tmp_path, "sparse-checkout", "set", "one")
    git(tmp_path, "update-index", "--no-skip-worktree", "other/mine.txt")
    git(tmp_path, "checkout", "other/mine.txt")
    repository = update.Repository(tmp_path / "one")
    new = repository.commit(with_files(repository, "one/run.sh"), "HEAD")
    repository.write("HEAD", new)
    assert git(tmp_path, "status", "--porcelain") == "?? one/run.sh\n"


def test_a_manifest_that_git_ignores_is_to_be_committed(tmp_path):
    repository = repository_in(tmp_path)
    write(tmp_path / update.MANIFEST, b"{}")
    with pytest.raises(
        RefusedError, match=r"ignores it: git add --force \.pretuned\.json && git c"
    ):
        repository.check_manifest()
    write(tmp_path / ".git/info/exclude", f"{update.MANIFEST}\n".encode())
    with pytest.raises(RefusedError, match="is not committed, as git ignores it"):
        update.carry_out(repository, "update", Mock())


def test_what_git_itself_refuses_is_said_and_settings_in_the_environment_count(
    tmp_path, monkeypatch
):
    repository_in(tmp_path)
    for number, (key, value) in enumerate({"a.b": "c", "merge.renames": "false"}.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    repository = update.Repository(tmp_path)
    assert repository.git("config", "a.b") == "c"
    assert repository.git("config", "merge.renames") == "true"  # ours come last
    edit(tmp_path / ".git/config", b"[[\n")
    with pytest.raises(RefusedError, match="bad config"):
        update.Repository(tmp_path)


def test_the_first_update_leaves_a_manifest_that_names_the_same(render):
    folder = render(project_slug="photos", tools="none")
    git(folder, "init")
    commit(folder)
    assert update.update(folder, cli._render_again, "") == ("", True)
    assert git(folder, "status", "--porcelain") == ""
    text = (folder / "pyproject.toml").read_text()
    assert "slurm = true" in text
    (folder / "pyproject.toml").write_text(text.replace("slurm = true", "slurm = false"))
    commit(folder)
    said = update.update(folder, cli._render_again, "")
    assert said == ("D  slurm.sh", True)


def test_an_update_installs_no_environment_to_be_checked_in(monkeypatch, tmp_path, capsys):
    project = shutil.copytree(PROJECT, tmp_path / "photos", ignore=lambda *_: ["src", ".venv"])
    calls = []
    monkeypatch.delenv("VENV", raising=False)
    monkeypatch.setenv("MAKEFLAGS", "")  # of an outer make
    monkeypatch.setattr(update, "update", lambda *_: ("M  LICENSE", True))
    call = cli.subprocess.run

    def make(words, **how):
        if words != ["make", "check"]:
            return call(words, **how)
        calls.append(1)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(cli.subprocess, "run", make)
    assert cli.main(["update", str(project)]) == 1
    assert "not checked: '.venv' is not there, and would be installed" in capsys.readouterr().err
    monkeypatch.setenv("VENV", str(tmp_path / "other"))
    assert cli.main(["update", str(project)]) == 1
    assert not calls
    (tmp_path / "other").mkdir()
    assert cli.main(["update", str(project)]) == 0
    assert calls


@pytest.mark.parametrize(
    "lines",
    [
        "VENV ?= $(HOME)/envs/birds",
        "VENV = ${HOME}/envs/birds  # mine",
        "ENVS := $(HOME)/envs\nVENV := $(ENVS)/birds",
    ],
)
def test_an_environment_is_looked_for_where_make_has_it(lines, tmp_path, monkeypatch):
    write(tmp_path / "Makefile", f"{lines}\nBIN := $(VENV)/bin\n".encode())
    for name, value in {"HOME": str(tmp_path), "MAKEFLAGS": "", "VENV": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VENV")
    with pytest.raises(OSError, match=r"envs/birds' is not there, and would be installed"):
        cli._check_environment(tmp_path)
    (tmp_path / "envs/birds").mkdir(parents=True)
    cli._check_environment(tmp_path)


@pytest.mark.parametrize(
    ("is_clean", "words", "checked", "code"),
    [
        (True, [], 0, 0),
        (True, [], 2, 1),
        (True, ["--no-check"], None, 0),
        (False, [], None, 1),
    ],
)
def test_an_update_is_checked_and_its_exit_code_says_what_is_left(  # noqa: PLR0913, PLR0917
    is_clean, words, checked, code, monkeypatch, tmp_path, capsys
):
    ran = []
    project = tmp_path / "my project"
    project.mkdir()

    def make(command, **how):
        ran.append((command, how["cwd"]))
        return SimpleNamespace(returncode=checked)

    monkeypatch.setattr(update, "update", lambda *_: ("M  LICENSE", is_clean))
    monkeypatch.setattr(cli.subprocess, "run", make)
    assert cli.main(["update", str(project), *words]) == code
    assert ran == [(["make", "check"], project)] * (checked is not None)
    undo = f"git -C {shlex.quote(str(project))} stash --include-untracked -- . undoes them"
    assert (undo in capsys.readouterr().out) == is_clean


def test_checks_of_an_update_that_are_interrupted_leave_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(update, "update", lambda *_: ("M  LICENSE", True))
    monkeypatch.setattr(cli.subprocess, "run", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["update", str(tmp_path)]) == 1
    said = "\nERROR: the update is there, and not checked: make check\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("verb", "function", "said"), [("diff", "compare", "x"), ("update", "update", ("x", True))]
)
def test_the_base_that_is_named_is_the_one_that_is_asked(
    verb, function, said, monkeypatch, tmp_path
):
    asked = Mock(return_value=said)
    monkeypatch.setattr(update, function, asked)
    words = ["--no-check"] * (verb == "update")
    assert cli.main([verb, str(tmp_path), "--base", "x.whl", *words]) == 0
    asked.assert_called_once_with(tmp_path, cli._render_again, "x.whl")
