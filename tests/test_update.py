"""A project gets what changed in the template since it was made, and loses nothing of its owner."""

import json
import os
import shutil

import pytest
from conftest import ROOT, contents, python, run

from pretuned import cli, update
from pretuned_answers import RefusedError

AS = ("-c", "user.name=a", "-c", "user.email=a@b.c")
OLD = "src/photos/tools/probe/layers.py"
NEW = "src/photos/tools/head_layers/layers.py"
ANSWERS = {"project_slug": "photos", "package_name": "photos"}


def commit(project):
    """Commit all of a project."""
    run("git", "add", "--all", folder=project)
    run("git", *AS, "commit", "--allow-empty", "--message=all", folder=project)


@pytest.fixture
def project(render):
    """A project whose owner changed, deleted and added files, made by an older template."""
    folder = render(**ANSWERS)
    made = update.read_manifest(folder)
    for path, text in {OLD: LAYERS, "docs/old.md": b"old\n", "docs/older.md": b"old\n"}.items():
        write(folder / path, text)
        made[path] = update.blob(text)
    for path in (NEW, "docs/guide.md"):
        made.pop(path)
        (folder / path).unlink()
    (folder / update.MANIFEST).write_text(json.dumps({"files": made}))
    run("git", "init", folder=folder)
    commit(folder)
    edit(folder / "Makefile", "# mine\n")
    edit(folder / OLD, "# mine\n")
    edit(folder / "README.md", "mine\n")
    edit(folder / "AGENTS.md", "mine\n", at_end=False)
    edit(folder / "docs/older.md", "mine\n")
    (folder / "sky.yaml").unlink()
    write(folder / "src/photos/mine.py", b"MINE = 1\n")
    commit(folder)
    return folder


LAYERS = (
    (ROOT / "{{cookiecutter.project_slug}}/src/image_classifier/tools/head_layers")
    .joinpath("layers.py")
    .read_bytes()
)


def newer(answers, folder):
    """What a newer template makes of answers: other files, of which some moved."""
    made = cli._render_again(answers, folder)
    edit(made / "README.md", "theirs\n", at_end=False)
    edit(made / "AGENTS.md", "theirs\n", at_end=False)
    edit(made / "LICENSE", "theirs\n")
    edit(made / NEW, "# theirs\n", at_end=False)
    return made


def write(path, content):
    """Write a file in a folder that there may not be yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def edit(path, line, at_end=True):
    """Add a line to a file."""
    text = path.read_text()
    path.write_text(text + line if at_end else line + text)


def verdicts(changes):
    """The files of each verdict."""
    found = {}
    for change in changes:
        found.setdefault(change.verdict, []).append(change.path)
    return found


EXPECTED = {
    "yours": ["Makefile"],
    "merged": ["README.md", NEW],
    "conflict": ["AGENTS.md"],
    "replaced": ["LICENSE"],
    "added": ["docs/guide.md"],
    "deleted": ["docs/old.md"],
    "kept": ["docs/older.md"],
    "gone": ["sky.yaml"],
}


def test_an_update_brings_what_is_new_and_keeps_what_is_yours(project, capsys):
    assert verdicts(update.compare(project, newer, "").changes) == EXPECTED
    assert run("git", "status", "--porcelain", folder=project).stdout == ""
    assert verdicts(update.update(project, newer, "")) == EXPECTED
    readme = (project / "README.md").read_text()
    assert readme.startswith("theirs\n")
    assert readme.endswith("mine\n")
    layers = (project / NEW).read_text()
    assert layers == f"# theirs\n{LAYERS.decode()}# mine\n"
    assert not (project / OLD).exists()
    agents = (project / "AGENTS.md").read_text()
    assert agents.startswith("<<<<<<< yours\nmine\n=======\ntheirs\n>>>>>>> template\n")
    assert (project / "src/photos/mine.py").read_text() == "MINE = 1\n"
    assert not (project / "sky.yaml").exists()
    assert os.access(project / "slurm.sh", os.X_OK)
    # Once more, nothing changes: what is the owner's stays so.
    commit(project)
    again = verdicts(update.update(project, newer, ""))
    yours = ["AGENTS.md", "Makefile", "README.md", NEW]
    assert again == {"yours": yours, "gone": ["sky.yaml"]}
    assert run("git", "status", "--porcelain", folder=project).stdout == ""
    assert cli.main(["diff", str(project)]) == 0
    said = capsys.readouterr().out
    assert "gone (you deleted it: stays deleted):\n  sky.yaml" in said


def test_an_update_that_is_killed_at_any_moment_is_finished_by_the_same_command(
    project, tmp_path, monkeypatch
):
    made = newer(update.answers_of(project)[1], tmp_path / "made")

    def render(_, folder):
        return shutil.copytree(made, folder / made.name)

    whole = tmp_path / "whole"
    shutil.copytree(project, whole)
    update.update(whole, render, "")
    replace, rename = update.Path.replace, update.Path.rename
    for moment in range(1, 8):
        killed = tmp_path / f"killed at {moment}"
        shutil.copytree(project, killed)
        moves = iter(range(1, 100))

        def last(move, *words, moves=moves, moment=moment):
            if next(moves) == moment:
                raise KeyboardInterrupt
            return move(*words)

        with monkeypatch.context() as patch:
            patch.setattr(update.Path, "replace", lambda *words: last(replace, *words))
            patch.setattr(update.Path, "rename", lambda *words: last(rename, *words))
            with pytest.raises(KeyboardInterrupt):
                update.update(killed, render, "")
        before_the_plan = moment == 1
        assert bool(update.update(killed, render, "")) == before_the_plan
        for folder in (whole, killed):
            shutil.rmtree(folder / ".git", ignore_errors=True)
        left = contents(killed)
        assert [name for name in left if name.endswith(".pretuned")] == []
        assert left == contents(whole)
        assert (killed / update.MANIFEST).read_bytes() == (whole / update.MANIFEST).read_bytes()


def test_a_project_without_digests_is_updated_from_the_template_that_made_it(project, tmp_path):
    python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, folder=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    (project / update.MANIFEST).unlink()
    commit(project)
    for base in (wheel, ROOT):
        found = verdicts(update.compare(project, newer, str(base)).changes)
        assert found["conflict"] == ["AGENTS.md"]
        assert found["merged"] == ["README.md"]


def test_what_cannot_be_updated_is_refused_in_a_line(project, tmp_path, capsys):
    def said(*words):
        assert cli.main(["update", *map(str, words)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "no project of this template" in said(tmp_path)
    write(project / "new.txt", b"")
    assert "has changes that are not committed: commit them" in said(project)
    commit(project)
    assert "is not the template that made" in said(project, "--base", ROOT)
    manifest = json.loads((project / update.MANIFEST).read_text())
    manifest["files"]["README.md"] = update.blob(b"never committed")
    (project / update.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(update.MissingBaseError, match=r"'README.md'.* by --base"):
        update.changes_of(project, manifest["files"], {"README.md": b"x"}, lambda _: None, {})
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    manifest["files"]["../../outside"] = update.blob(b"precious")
    (project / update.MANIFEST).write_text(json.dumps(manifest))
    commit(project)
    assert "it names a file outside of the project" in said(project)
    assert outside.exists()
    with pytest.raises(RefusedError, match="can't be had"):
        update.render_of(str(tmp_path / "no.whl"), {}).__enter__()
