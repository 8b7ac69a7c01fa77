"""What a project is built from is bounded or pinned, and what builds it may do no more."""

import re
import shlex
import shutil
import sys

import pytest
import yaml
from conftest import PROJECT, ROOT, pyproject, run
from uv import find_uv_bin

BOTH = pytest.mark.parametrize("folder", [ROOT, PROJECT], ids=["template", "project"])


@BOTH
def test_dependencies_have_lower_bounds_and_no_upper_ones(folder):
    project = pyproject(folder)
    needs = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    assert needs
    pattern = r"[a-z0-9-]+(\[.+\])?>=[0-9]+(\.[0-9]+)*(; python_version < '3\.15')?"
    assert not [need for need in needs if not re.fullmatch(pattern, need)]


def test_torch_is_none_whose_safe_loading_can_be_passed_by():
    needs = dict(need.split(">=") for need in pyproject(PROJECT)["project"]["dependencies"])
    assert tuple(map(int, needs["torch"].split("."))) >= (2, 6)  # CVE-2025-32434


@BOTH
def test_actions_and_hooks_are_pinned_to_commits(folder):
    files = [*folder.glob(".github/workflows/*.yml"), folder / ".pre-commit-config.yaml"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        pinned = re.findall(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v[0-9.]+\n", text)
        pinned += re.findall(r"rev: [0-9a-f]{40} # v[0-9.]+\n", text)
        assert len(pinned) == len(re.findall("uses: |rev: ", text)) >= 1, file


@BOTH
def test_hooks_take_ruff_from_the_environment_and_where_there_is_none_they_make_none(
    folder, tmp_path
):
    hooks = read(folder / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    commands = [shlex.split(hook["entry"].replace("uv", find_uv_bin(), 1)) for hook in hooks]
    shutil.copy(folder / "pyproject.toml", tmp_path)
    for command in commands:
        run(*command, folder=tmp_path, code=2, PATH="/usr/bin:/bin")
    assert not (tmp_path / ".venv").exists()
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for command in commands:
        run(*command, folder=tmp_path, PATH="/usr/bin:/bin")


@BOTH
def test_what_anyone_can_start_may_only_read(folder):
    workflow = read(folder / ".github/workflows/ci.yml")
    assert workflow["permissions"] == {}
    # A pull request from outside must not run with the secrets of the repository.
    assert set(workflow[True]) == {"push", "pull_request", "schedule"}  # `on` is true in YAML 1.1
    for job in workflow["jobs"].values():
        # Nor may it run on a machine of theirs.
        assert "vars." not in job["runs-on"] or "!= 'pull_request'" in job["if"]
        check_job(job)


def test_only_a_tag_publishes_and_only_a_job_without_our_code_has_the_token():
    workflow = read(ROOT / ".github/workflows/release.yml")
    assert workflow["permissions"] == {}
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    check_job(build)
    assert publish["permissions"] == {"id-token": "write"}
    assert (publish["needs"], publish["environment"]) == ("build", "pypi")
    names = [step["uses"].partition("@")[0] for step in publish["steps"]]  # none has `run`
    assert names == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]


def test_a_tag_that_is_not_the_version_stops_a_release(tmp_path):
    (step,) = [
        step["run"]
        for step in read(ROOT / ".github/workflows/release.yml")["jobs"]["build"]["steps"]
        if "GITHUB_REF_NAME" in step.get("run", "")
    ]
    command = tmp_path / "build/dist/bin/pretuned"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pretuned $*\n")
    command.chmod(0o755)
    version = pyproject(PROJECT)["tool"]["pretuned"]["version"]
    tags = {f"v{version}": 0, version: 1, f"v{version}.1": 1, "v": 1, "v*": 1}
    for tag, code in tags.items():
        names = {"GITHUB_REF_NAME": tag, "PYTHONPATH": str(ROOT / "src")}
        run("bash", "-e", "-c", step, folder=tmp_path, code=code, **names)


def read(path):
    """A workflow."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def check_job(job):
    """It may only read, for some minutes, and leaves nothing to read to what it runs."""
    assert job["permissions"] == {"contents": "read"}
    assert job["timeout-minutes"]
    for step in job["steps"]:
        assert "${{" not in step.get("run", "")  # it would be shell, whatever it holds
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@BOTH
def test_the_oldest_libraries_are_tried_with_a_python_that_they_have_wheels_for(folder):
    pythons = []
    for job in read(folder / ".github/workflows/ci.yml")["jobs"].values():
        if "lowest-direct" in str(job):
            matrix = job.get("strategy", {}).get("matrix", {})
            pythons += [row["python"] for row in matrix.get("include", []) if "python" in row]
            pythons += re.findall(r"UV_PYTHON': '([0-9.]+)|uv venv --python ([0-9.]+)", str(job))
    found = {"".join(python) for python in pythons}
    assert found == {"3.11", "3.12"}  # NumPy 2.0.1 and SciPy 1.13 have none for 3.13


def test_images_of_gitlab_and_docker_have_a_version():
    gitlab = (ROOT / "alternatives/ci/gitlab-ci/.gitlab-ci.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(gitlab)["test"]
    assert job["image"] == "python:$VERSION"
    for version in job["parallel"]["matrix"][0]["VERSION"]:
        assert re.fullmatch(r"3\.[0-9]+", version)
    dockerfile = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^FROM python:3\.[0-9]+-slim$", dockerfile, re.MULTILINE)
    assert re.search(r"^USER (?!root)\w+$", dockerfile, re.MULTILINE)
    assert not re.search(r"^ADD |curl|wget", dockerfile, re.MULTILINE)


def test_nothing_listens_beyond_the_machine():
    for path in [*PROJECT.rglob("*.py"), *PROJECT.glob("*.md"), *PROJECT.glob("[MDs]*")]:
        if path.is_file() and "tests" not in path.parts:
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"--bind_all|--host\b|0\.0\.0\.0", text), path
